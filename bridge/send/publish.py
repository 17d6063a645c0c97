"""Publisher: one sync of weights as a transaction, called on every trainer rank alike.

    connect -> pause -> begin -> stream -> commit -> resume

Rank 0 talks to the replicas; one rank per pipeline stage sends, or on shared devices each rank sends to its own; the others take
part in the collectives of the weight source. After each phase all ranks agree on whether it succeeded. An error on any side
wakes up all sides and raises the same SyncError on every rank. Leaves out the pass over the source (sender.py), states and
messages (messages.py), the replicas (pool.py).

    publisher = Publisher(source, pool if rank == 0 else None, SyncConfig())
    report = publisher.publish(version=1)
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
import torch.distributed as dist

from bridge.config import SyncConfig, Verify
from bridge.export.adapter import AdapterSpec
from bridge.export.source import WeightSource, whole_tensors
from bridge.layout.digest import digest_value
from bridge.layout.manifest import TIED_HEAD
from bridge.messages import BeginSync, Replicas, Spans, SyncError, SyncReport, name_replicas
from bridge.send.connection import Connection, Ranks, Readers, connect

POLL_SECONDS = 0.01
MIN_SECONDS = 1.0  # of a call that starts late
ABORT_SECONDS = 10.0  # how long a failing sync waits for replicas to confirm that they stopped
EMBEDDING = "model.embed_tokens.weight"


class ManifestRefusedError(RuntimeError):
    """Replicas refused the manifest."""

    def __init__(self, reasons: list[str]) -> None:
        super().__init__("; ".join(reasons))
        self.reasons = reasons


class Publisher:
    """SPMD: construct and call it on every trainer rank; `pool` on rank 0 alone.

    `group`: a process group whose backend takes CPU tensors; None is the default group, or a single process where
    torch.distributed is not initialised. A rank that is stuck in, or lost from, a collective of the weight source is
    only noticed by that collective's own time limit.
    """

    def __init__(
        self,
        source: WeightSource,
        pool: Replicas | None,
        config: SyncConfig,
        group: dist.ProcessGroup | None = None,
        adapter: AdapterSpec | None = None,
        log: Path | None = None,
    ) -> None:
        """`log`: the run's log of versions, from which transport delta restores a replica that joins late."""
        self._source, self._pool = source, pool
        self._config = config
        self._adapter = dataclasses.asdict(adapter) if adapter is not None else None
        self._ranks, self._log = Ranks(group), log
        if (pool is not None) != (self._ranks.rank == 0):
            raise ValueError("Publisher takes the pool on rank 0 and None on the others")
        self._connection: Connection | None = None

    def publish(self, version: int, verify: Verify | None = None, slot: int = 0) -> SyncReport:
        """Bring every replica to this rank's weights, as `version`.

        `verify`: overrides SyncConfig.verify for this sync; the same on every rank. `slot`: the slot of the adapter to
        replace; the other slots stay served.

        Raises:
            ValueError: no such way to verify.
            SyncError: on every rank alike; refused (replicas continue to serve) or failed (names the replicas out of service).
        """
        verify = verify or self._config.verify
        if verify not in get_args(Verify):
            raise ValueError(f"verify = {verify!r}; choices: {', '.join(get_args(Verify))}")
        spans, pool = Spans(), self._pool
        connection = self._connect(version)
        with spans.measure("pause"), self._agreed(version):
            if pool is not None:
                pool.pause(slot)
        start, deadline = time.time(), time.monotonic() + self._config.timeout_seconds
        message = self._message(connection, version, verify, slot)
        if connection.num_syncs == 0:  # later the replicas have accepted the manifest
            with spans.measure("begin"), self._agreed(version):
                if pool is not None and (reasons := pool.begin(message)):
                    raise ManifestRefusedError(reasons)
        with self._agreed(version):
            loading = _Loading(pool, dataclasses.replace(message, timeout_seconds=_seconds_to(deadline)))
            sent = connection.sender.run(deadline, loading.check, verify)  # to the end, whatever fails: it runs collectives
            spans.taken += sent.spans
            with spans.measure("load"):
                problem = loading.problem or sent.problem or loading.wait(deadline)
            if problem:
                connection.abort(problem)  # other senders and the replicas may be waiting
                raise RuntimeError(problem)
        digests = self._share_digests(connection, sent.digests) if verify == "readback" else {}
        with self._agreed(version):
            if pool is not None:
                with spans.measure("commit"):
                    pool.commit(version, _seconds_to(deadline))
                if connection.num_syncs == 0:
                    connection.loader_fallback = pool.loader_fallback()
                if digests:
                    with spans.measure("readback"):
                        self._compare(pool, digests)
                with spans.measure("resume"):
                    pool.resume()
        connection.num_syncs += 1
        return self._report(connection, message, start, spans)

    def diff_with_replica(self, replica: int) -> tuple[list[str], str]:
        """Names, in order, of the tensors whose values on `replica` differ from the source's, and why the comparison failed, if
        it did. Collective, after a publish; the same on every rank.
        """
        assert self._connection is not None
        own = [digest_value(tensor) for _, tensor in whole_tensors(self._source)]
        digests = self._share_digests(self._connection, own if self._source.is_sender else [])
        names, problem = list[str](), ""
        if self._pool is not None:
            try:
                names = self._differences(self._pool, digests, [replica])[replica]
            except RuntimeError as error:
                problem = str(error)
        return self._ranks.gather((names, problem))[0]  # type: ignore[no-any-return]

    def close(self) -> None:
        """Free the buffers."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    # ------------------------------------------------------------------------------------------------ before and after

    def _connect(self, version: int) -> Connection:
        """Agree on manifest and endpoints: object collectives, at the first sync and after a failed one."""
        if self._connection is None:
            readers = None
            with self._agreed(version):
                if self._pool is not None:
                    readers = Readers(self._pool.reader_names, self._pool.reader_numbers, self._pool.reader_hosts())
            self._connection = connect(version, self._source, self._config, self._ranks, readers, self._log)
        return self._connection

    def _message(self, connection: Connection, version: int, verify: str, slot: int) -> BeginSync:
        """For all replicas; the pool makes each one's own of it."""
        plan = connection.plan
        return BeginSync(
            version=version,
            manifest_digest=plan.manifest.digest,
            manifest_json=connection.manifest_json,
            stage_sizes=plan.stage_sizes,
            bucket_bytes=plan.bucket_bytes,
            endpoints=connection.endpoints,
            sync_index=connection.num_syncs,
            first_reader=0,
            num_readers=len(connection.endpoints),
            replica=0,
            verify=verify != "none",
            timeout_seconds=self._config.timeout_seconds,
            lanes_json=connection.lanes_json,
            adapter=self._adapter,
            slot=slot,
        )

    def _report(self, connection: Connection, message: BeginSync, start: float, spans: Spans) -> SyncReport:
        resumed = [span.start for span in spans.taken if span.name == "resume"]
        return SyncReport(
            version=message.version,
            seconds=(resumed[0] if resumed else time.time()) - start,
            num_bytes=connection.plan.manifest.total_bytes,
            pause_seconds=time.time() - spans.taken[0].start,
            verified=message.verify,
            num_buckets=connection.plan.num_buckets,
            stages=tuple(spans.taken),
            loader_fallback=connection.loader_fallback,
            sent_bytes=int(self._ranks.sum(torch.tensor([connection.sent_bytes]))) if self._config.transport == "delta" else None,
        )

    # ------------------------------------------------------------------------------------------------ read-back

    def _share_digests(self, connection: Connection, digests: list[int]) -> dict[str, int]:
        """All stages' digests on all ranks, by tensor: a sum of int64 in which each has one owner."""
        tensors, first = connection.plan.manifest.tensors, connection.sender.stage.first_tensor
        shared = np.zeros(len(tensors), np.uint64)
        shared[first : first + len(digests)] = digests
        summed = self._ranks.sum(torch.from_numpy(shared.view(np.int64))).numpy().view(np.uint64)
        return dict(zip((spec.name for spec in tensors), summed.tolist(), strict=True))

    def _compare(self, pool: Replicas, digests: dict[str, int]) -> None:
        """Raises RuntimeError that names the tensors whose values on a replica differ from those that were sent."""
        wrong = {replica: names for replica, names in self._differences(pool, digests).items() if names}
        if wrong:
            texts = [f"replica {replica} holds other values than were sent in {', '.join(wrong[replica])}" for replica in wrong]
            raise RuntimeError("; ".join(texts))

    def _differences(self, pool: Replicas, digests: dict[str, int], replicas: list[int] | None = None) -> dict[int, list[str]]:
        """For each of these replicas the names of the tensors whose bytes do not match their digest, in order."""
        found = {}
        for replica, held in pool.read_digests(self._config.timeout_seconds, replicas).items():
            expected = {name: digest for name, digest in digests.items() if name in held or name != TIED_HEAD}
            if TIED_HEAD in held and TIED_HEAD not in digests:
                expected[TIED_HEAD] = digests[EMBEDDING]
            found[replica] = [name for name, digest in expected.items() if held.get(name) != digest]
        return found

    # ------------------------------------------------------------------------------------------------ agreement

    @contextmanager
    def _agreed(self, version: int) -> Iterator[None]:
        """Run a phase. Where it fails on any rank, abort on every side and raise the same SyncError on every rank."""
        problems, refused = list[str](), False
        try:
            yield
        except ManifestRefusedError as error:
            problems, refused = error.reasons, True
        except Exception as error:  # noqa: BLE001 # the other ranks wait for this rank's answer, whatever it is
            problems = [_text_of(error)]
        if not self._ranks.any(bool(problems)):
            return
        reasons = without_repeats([text for texts in self._ranks.gather(problems) for text in texts])
        left = self._ranks.gather(self._leave(reasons[0], refused))
        reasons += [f"rank {rank}: on leaving the sync: {text}" for rank, each in enumerate(left) for text in each.problems]
        failed, stale = tuple(left[0].failed_replicas), tuple(left[0].stale_replicas)
        raise SyncError(version, reasons, refused=left[0].refused, failed_replicas=failed, stale_replicas=stale)

    def _leave(self, reason: str, refused: bool) -> _Left:
        """Abort on this rank's side. Never raises: the other ranks wait for the answer."""
        left = _Left(refused, [], [], [])

        def abort_replicas() -> None:
            if self._pool is not None:
                left.failed_replicas, left.stale_replicas = self._pool.abort(timeout=ABORT_SECONDS)

        steps: list[Callable[[], None]] = [abort_replicas, self.close]
        if self._connection is not None:
            steps.insert(0, partial(self._connection.abort, reason))
        for step in steps:
            try:
                step()
            except Exception as error:  # noqa: BLE001 # it must not keep the ranks apart
                left.problems.append(f"{type(error).__name__}: {error}")
        return left


@dataclass
class _Left:
    """How a rank has left a failed sync. Rank 0 knows whether it was refused, and the replicas' states."""

    refused: bool
    failed_replicas: list[int]
    stale_replicas: list[int]
    problems: list[str]


class _Loading:
    """The replicas' part of a stream: asked to receive when built, polled while this rank sends, waited for at the end.

    On ranks without a pool there is nothing to wait for. `problem`: why the replicas could not be asked, such as one that was
    lost since the pause; raised by `check`, since other ranks need this one in the collectives of the pass.
    """

    def __init__(self, pool: Replicas | None, message: BeginSync) -> None:
        self.problem = ""
        self._pool, self._answers = pool, list[Any]()  # references to the replicas' answers
        self._last_poll = 0.0
        try:
            if pool is not None:
                self._answers = pool.receive(message)
        except Exception as error:  # noqa: BLE001 # raised by `check`
            self.problem = _text_of(error)

    def check(self) -> None:
        """Called often during a pass; raises `problem`, or RuntimeError of a replica that failed. Polls every POLL_SECONDS."""
        if self.problem:
            raise RuntimeError(self.problem)
        if self._pool is not None and time.monotonic() - self._last_poll > POLL_SECONDS:
            self._pool.raise_if_failed(self._answers)
            self._last_poll = time.monotonic()

    def wait(self, deadline: float) -> str:
        """Until all replicas have loaded the stream; the problem of one of them, if any."""
        if self._pool is None:
            return ""
        try:
            while waiting := self._pool.raise_if_failed(self._answers, POLL_SECONDS):
                if time.monotonic() > deadline:
                    return f"deadline passed (sync.timeout_seconds): the last buckets are not loaded by {name_replicas(waiting)}"
        except Exception as error:  # noqa: BLE001 # other senders may be waiting
            return _text_of(error)
        return ""


def without_repeats(reasons: list[str]) -> list[str]:
    """Each reason once, without those that another one contains."""
    unique = list(dict.fromkeys(reasons))
    return [text for text in unique if not any(text != other and text in other for other in unique)]


def _seconds_to(deadline: float) -> float:
    return max(MIN_SECONDS, deadline - time.monotonic())


def _text_of(error: Exception) -> str:
    return str(error) or type(error).__name__
