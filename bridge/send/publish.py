"""Publisher: one sync of weights as a transaction, called on every trainer rank alike.

Rank 0 talks to the replicas, one rank a pipeline stage sends, or on shared devices each to its own, the others take part in
the collectives of the weight source. An error on any side wakes up all sides and raises the same SyncError on every rank.
Leaves out the pass over the source (sender.py), states and messages (messages.py), the replicas (pool.py).

    publisher = Publisher(source, pool if rank == 0 else None, SyncConfig())
    report = publisher.publish(version=1)
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

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
from bridge.send.sender import PassResult

POLL_SECONDS = 0.01
MIN_SECONDS = 1.0  # of a call that comes late
ABORT_SECONDS = 10.0  # how long a failing sync waits for replicas to say that they stopped
EMBEDDING = "model.embed_tokens.weight"


class ManifestRefusedError(RuntimeError):
    """Replicas turned the manifest down."""

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
        """`log`: the run's log of versions, out of which transport delta brings up a replica that came late."""
        self._source, self._pool = source, pool
        self._config = config
        self._adapter = dataclasses.asdict(adapter) if adapter is not None else None
        self._ranks, self._log = Ranks(group), log
        if (pool is not None) != (self._ranks.rank == 0):
            raise ValueError("Publisher takes the pool on rank 0 and None on the others")
        self._connection: Connection | None = None
        self._spans = Spans()
        self._broken: tuple[list[int], list[int]] = ([], [])  # replicas out of service, and those that wait for another sync

    def publish(self, version: int, verify: Verify | None = None) -> SyncReport:
        """Bring every replica to this rank's weights, as `version`.

        `verify`: for this sync in the place of SyncConfig.verify; the same on every rank.

        Raises:
            ValueError: there is no such way to verify.
            SyncError: on every rank alike; refused (replicas serve on) or failed (replicas named are out of service).
        """
        verify = SyncConfig(verify=verify or self._config.verify).verify
        self._spans = Spans()
        connection = self._connect(version)
        with self._spans.measure("pause"):
            self._phase(version, self._pause)
        start = time.time()
        deadline = time.monotonic() + self._config.timeout_seconds
        message = self._message(connection, version, verify)
        if connection.num_syncs == 0:  # later the replicas have accepted the manifest
            with self._spans.measure("begin"):
                self._phase(version, lambda: self._begin(message))
        digests = self._stream(connection, message, deadline, verify)
        self._phase(version, lambda: self._commit(connection, version, deadline, digests))
        connection.num_syncs += 1
        spans = self._spans.taken
        resumed = [span.start for span in spans if span.name == "resume"]
        return SyncReport(
            version=version,
            seconds=(resumed[0] if resumed else time.time()) - start,
            num_bytes=connection.plan.manifest.total_bytes,
            pause_seconds=time.time() - spans[0].start,
            verified=verify != "none",
            num_buckets=connection.plan.num_buckets,
            stages=tuple(spans),
            loader_fallback=connection.loader_fallback,
            sent_bytes=int(self._ranks.sum(torch.tensor([connection.sent_bytes]))) if self._config.transport == "delta" else None,
        )

    def differing(self, replica: int) -> tuple[list[str], str]:
        """Names, in order, of the tensors that `replica` holds otherwise than the source has them now, and what kept it from
        telling, if anything. Collective, after a publish; the same on every rank.
        """
        assert self._connection is not None
        digests = [digest_value(tensor) for _, tensor in whole_tensors(self._source)]
        shared = self._share_digests(self._connection, digests if self._source.is_sender else [])
        names = [spec.name for spec in self._connection.plan.manifest.tensors]
        found, problem = list[str](), ""
        if self._pool is not None:
            try:
                found = self._differences(dict(zip(names, shared, strict=True)), [replica])[replica]
            except RuntimeError as error:
                problem = str(error)
        return self._ranks.gather((found, problem))[0]  # type: ignore[no-any-return]

    def close(self) -> None:
        """Give the buffers back."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    # The phases. Each ends in an agreement of all ranks.

    def _connect(self, version: int) -> Connection:
        """Agree on manifest and endpoints: object collectives, at the first sync and after a failed one."""
        if self._connection is None:
            self._readers: Readers | None = None
            self._phase(version, self._find_readers)
            self._connection = connect(version, self._source, self._config, self._ranks, self._readers, self._log)
        return self._connection

    def _find_readers(self) -> None:
        if self._pool is not None:
            self._readers = Readers(self._pool.reader_names, self._pool.reader_numbers, self._pool.reader_hosts())

    def _pause(self) -> None:
        if self._pool is not None:
            self._pool.pause()

    def _begin(self, message: BeginSync) -> None:
        if self._pool is not None and (reasons := self._pool.begin(message)):
            raise ManifestRefusedError(reasons)

    def _message(self, connection: Connection, version: int, verify: str) -> BeginSync:
        """To all replicas; the pool makes each one's own of it."""
        plan = connection.plan
        return BeginSync(
            version=version,
            manifest_digest=plan.manifest.digest,
            manifest_json=connection.manifest_json,
            stage_sizes=plan.stage_sizes,
            bucket_bytes=plan.bucket_bytes,
            endpoints=connection.routes,
            sync_index=connection.num_syncs,
            first_reader=0,
            num_readers=len(connection.routes),
            replica=0,
            verify=verify != "none",
            timeout_seconds=self._config.timeout_seconds,
            lanes_json=connection.lanes_json,
            adapter=self._adapter,
        )

    def _stream(self, connection: Connection, message: BeginSync, deadline: float, verify: str) -> list[int]:
        """Send and let the replicas load; digests of all tensors when they are to be read back."""
        message = dataclasses.replace(message, timeout_seconds=max(MIN_SECONDS, deadline - time.monotonic()))
        refs, problem_before = self._let_receive(message)
        result = PassResult()

        def stream() -> None:
            nonlocal result
            result = connection.sender.run(deadline, self._watch(refs, problem_before), verify)
            self._spans.taken += result.spans
            with self._spans.measure("load"):
                problem = problem_before or result.problem or self._wait_for_replicas(refs, deadline)
            if problem is not None:
                connection.abort(problem)  # other senders and the replicas may be waiting
                raise RuntimeError(problem)

        self._phase(message.version, stream)
        return self._share_digests(connection, result.digests) if verify == "readback" else []

    def _let_receive(self, message: BeginSync) -> tuple[list[Any], str | None]:
        """References to what the replicas answer; or what went wrong, such as with one that was lost since the pause.

        The other ranks hear of it after the pass, whose collectives need this one.
        """
        try:
            return (self._pool.receive(message) if self._pool is not None else []), None
        except Exception as error:  # noqa: BLE001 # whatever it is, the other ranks have to hear of it
            return [], str(error) or type(error).__name__

    def _commit(self, connection: Connection, version: int, deadline: float, digests: list[int]) -> None:
        if self._pool is None:
            return
        with self._spans.measure("commit"):
            self._pool.commit(version, max(MIN_SECONDS, deadline - time.monotonic()))
        if connection.num_syncs == 0:
            connection.loader_fallback = self._pool.loader_fallback()
        if digests:
            with self._spans.measure("readback"):
                names = [spec.name for spec in connection.plan.manifest.tensors]
                self._compare(dict(zip(names, digests, strict=True)))
        with self._spans.measure("resume"):
            self._pool.resume()

    def _compare(self, expected: dict[str, int]) -> None:
        """Raises RuntimeError that names the tensors which a replica holds otherwise than they were sent."""
        wrong = {replica: names for replica, names in self._differences(expected).items() if names}
        if wrong:
            texts = [f"replica {replica} holds other values than were sent in {', '.join(wrong[replica])}" for replica in wrong]
            raise RuntimeError("; ".join(texts))

    def _differences(self, expected: dict[str, int], replicas: list[int] | None = None) -> dict[int, list[str]]:
        """For each of these replicas the names of tensors that it holds otherwise than their digests say, in order."""
        assert self._pool is not None
        found = {}
        for replica, held in self._pool.read_digests(self._config.timeout_seconds, replicas).items():
            wanted = {name: digest for name, digest in expected.items() if name in held or name != TIED_HEAD}
            if TIED_HEAD in held and TIED_HEAD not in expected:
                wanted[TIED_HEAD] = expected[EMBEDDING]
            found[replica] = [name for name, digest in wanted.items() if held.get(name) != digest]
        return found

    # Waiting and agreeing.

    def _watch(self, refs: list[Any], problem: str | None) -> Callable[[], None]:
        """A check for the stream: raises `problem`, of before it, or what a replica failed with. Looks every POLL_SECONDS."""
        last = 0.0

        def check() -> None:
            nonlocal last
            if problem:
                raise RuntimeError(problem)
            if self._pool is not None and time.monotonic() - last > POLL_SECONDS:
                self._pool.raise_if_failed(refs)
                last = time.monotonic()

        return check

    def _wait_for_replicas(self, refs: list[Any], deadline: float) -> str | None:
        """Until all have loaded the stream; what went wrong with one of them, if anything."""
        if self._pool is None:
            return None
        try:
            while waiting := self._pool.raise_if_failed(refs, POLL_SECONDS):
                if time.monotonic() > deadline:
                    return f"deadline passed (sync.timeout_seconds): the last buckets are not loaded by {name_replicas(waiting)}"
        except Exception as error:  # noqa: BLE001 # whatever it is, other senders may be waiting
            return str(error) or type(error).__name__
        return None

    def _phase(self, version: int, action: Callable[[], None]) -> None:
        """Run `action`, then let all ranks know whether it went well everywhere; else undo and raise on all."""
        problems: list[str] = []
        refused = False
        try:
            action()
        except ManifestRefusedError as error:
            problems, refused = error.reasons, True
        except Exception as error:  # noqa: BLE001 # whatever it is, the other ranks have to hear of it
            problems = [str(error) or type(error).__name__]
        if self._ranks.any(bool(problems)):
            self._fail(version, problems, refused)

    def _fail(self, version: int, problems: list[str], refused: bool) -> None:
        """Abort on every side and raise the same SyncError on every rank."""
        reasons = _essential([text for texts in self._ranks.gather(problems) for text in texts])
        problem = self._undo(reasons[0])
        told = self._ranks.gather((refused, self._broken, problem))
        refused, (failed, stale), _ = told[0]
        reasons += [f"rank {rank}: on leaving the sync: {text}" for rank, (*_, text) in enumerate(told) if text]
        raise SyncError(version, reasons, refused=refused, failed_replicas=tuple(failed), stale_replicas=tuple(stale))

    def _undo(self, reason: str) -> str | None:
        """What went wrong here, if anything: the other ranks wait to hear of it. Notes which replicas are `_broken` then."""
        self._broken = ([], [])
        try:
            with ExitStack() as leave:  # calls all, whatever one of them raises, the last first
                leave.callback(self.close)
                leave.callback(self._abort_replicas)
                if self._connection is not None:
                    self._connection.abort(reason)
        except Exception as error:  # noqa: BLE001 # whatever it is, it must not keep the ranks apart
            return f"{type(error).__name__}: {error}"
        return None

    def _abort_replicas(self) -> None:
        if self._pool is not None:
            self._broken = self._pool.abort(timeout=ABORT_SECONDS)

    def _share_digests(self, connection: Connection, digests: list[int]) -> list[int]:
        """All stages' digests on all ranks, by a sum of int64 in which each has one owner."""
        shared, first = np.zeros(len(connection.plan.manifest.tensors), np.uint64), connection.sender.stage.first_tensor
        shared[first : first + len(digests)] = digests
        return self._ranks.sum(torch.from_numpy(shared.view(np.int64))).numpy().view(np.uint64).tolist()  # type: ignore[no-any-return]


def _essential(reasons: list[str]) -> list[str]:
    """Each reason once, without those that only repeat another."""
    unique = list(dict.fromkeys(reasons))
    return [text for text in unique if not any(text != other and text in other for other in unique)]
