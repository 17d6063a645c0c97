"""Publisher: one sync of weights as a transaction, called on every trainer rank alike.

Rank 0 talks to the replicas, one rank a pipeline stage sends, the others take part in the collectives of the weight
source. An error on any side wakes up all sides and raises the same SyncError on every rank. Leaves out the pass over
the source (sender.py), states and messages (messages.py), the replicas (pool.py).

    publisher = Publisher(source, pool if rank == 0 else None, SyncConfig())
    report = publisher.publish(version=1)
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import torch
import torch.distributed as dist

from bridge.bucket import buffer_bytes, plan_buckets
from bridge.manifest import TIED_HEAD, Manifest
from bridge.messages import BeginSync, StageSpan, SyncError, SyncReport
from bridge.sender import StageStream, StreamResult, WeightSource
from bridge.transport.shm import Segment, ShmWriter, sweep_stale_segments

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from bridge.adapter import AdapterSpec
    from bridge.config import SyncConfig
    from bridge.pool import ReplicaPool

POLL_SECONDS = 0.01
ABORT_SECONDS = 10.0  # how long a failing sync waits for replicas to say that they stopped
EMBEDDING = "model.embed_tokens.weight"


class ManifestRefusedError(RuntimeError):
    """Replicas turned the manifest down."""

    def __init__(self, reasons: list[str]) -> None:
        super().__init__("; ".join(reasons))
        self.reasons = reasons


class Session:
    """What is agreed on once and kept until a sync fails: the full manifest and the stages' segments."""

    def __init__(self, manifests: list[Manifest], segments: list[str], stream: StageStream) -> None:
        self.manifest = Manifest.concatenate(manifests)
        self.stage_sizes = tuple(len(manifest.tensors) for manifest in manifests)
        self.segments = tuple(segments)
        self.stream = stream
        self.num_syncs = 0

    def first_tensor(self, stage: int) -> int:
        return sum(self.stage_sizes[:stage])

    def abort(self, reason: str) -> None:
        """Wake up everyone who waits at any segment."""
        for path in self.segments:
            if Path(path).exists():
                segment = Segment(Path(path), owner=False)
                segment.abort(reason)
                segment.close()

    def close(self) -> None:
        if self.stream.writer is not None:
            self.stream.writer.segment.close()


class Publisher:
    """SPMD: construct and call it on every trainer rank; `pool` on rank 0 alone.

    `group`: a process group whose backend takes CPU tensors; None is the default group, or a single process where
    torch.distributed is not initialised. A rank that is stuck in, or lost from, a collective of the weight source is
    only noticed by that collective's own time limit.
    """

    def __init__(
        self,
        source: WeightSource,
        pool: ReplicaPool | None,
        config: SyncConfig,
        group: dist.ProcessGroup | None = None,
        adapter: AdapterSpec | None = None,
    ) -> None:
        if config.transport not in {"auto", "shm"}:
            raise ValueError(f"sync.transport is {config.transport}; choose auto or shm")
        if config.verify not in {"none", "digest", "readback"}:
            raise ValueError(f"sync.verify is {config.verify}; choose none, digest or readback")
        self._source, self._pool, self._config, self._group = source, pool, config, group
        self._adapter = adapter.to_dict() if adapter is not None else None
        self._is_distributed = dist.is_available() and dist.is_initialized()
        self._rank = dist.get_rank(group) if self._is_distributed else 0
        if (pool is not None) != (self._rank == 0):
            raise ValueError("Publisher takes the pool on rank 0 and None on the others")
        self._session: Session | None = None
        self._spans: list[StageSpan] = []
        sweep_stale_segments()

    def publish(self, version: int) -> SyncReport:
        """Bring every replica to this rank's weights, as `version`.

        Raises:
            SyncError: on every rank alike; refused (replicas serve on) or failed (replicas named are out of service).
        """
        self._spans = []
        session = self._connect(version)
        with self._span("pause"):
            self._phase(version, self._pause)
        start = time.time()
        deadline = start + self._config.timeout_seconds
        with self._span("begin"):
            self._phase(version, lambda: self._begin(session, version, deadline))
        digests = self._stream(session, version, deadline)
        self._phase(version, lambda: self._commit(session, version, deadline, digests))
        end = time.time()
        with self._span("resume"):
            self._phase(version, lambda: self._pool.resume() if self._pool else None)
        session.num_syncs += 1
        return SyncReport(
            version=version,
            seconds=end - start,
            num_bytes=session.manifest.total_bytes,
            pause_seconds=time.time() - self._spans[0].start,
            verified=self._config.verify != "none",
            num_buckets=self._count_buckets(session),
            stages=tuple(self._spans),
        )

    def close(self) -> None:
        """Give the shared memory back."""
        if self._session is not None:
            self._session.close()
            self._session = None

    # The phases. Each ends in an agreement of all ranks.

    def _connect(self, version: int) -> Session:
        """Agree on manifest and segments: object collectives, at the first sync and after a failed one."""
        if self._session is not None:
            return self._session
        readers = self._gather_objects(self._pool.reader_names if self._pool is not None else None)[0]
        manifest, writer, problem = Manifest(()), None, None
        try:
            manifest = self._source.manifest()
            if self._source.is_sender:
                size = buffer_bytes(manifest, self._config.bucket_bytes)
                segment = Segment.create(f"{self._source.stage}-{uuid4().hex[:8]}", size, len(readers))
                writer = ShmWriter(segment, self._source.stage, readers)
        except (ValueError, OSError, RuntimeError) as error:
            problem = f"rank {self._rank}: {error}"
        path = str(writer.segment.path) if writer is not None else None
        entries = self._gather_objects((self._source.stage, manifest.to_json(), path, problem))
        problems = [entry[3] for entry in entries if entry[3]] or _check_stages(entries, self._source.num_stages)
        if problems:
            if writer is not None:
                writer.segment.close()
            raise SyncError(version, problems)
        senders = sorted((entry for entry in entries if entry[2]), key=lambda entry: entry[0])
        manifests = [Manifest.from_json(entry[1]) for entry in senders]
        stream = StageStream(self._source, manifest, self._config.bucket_bytes, writer, verify=self._config.verify)
        self._session = Session(manifests, [entry[2] for entry in senders], stream)
        return self._session

    def _pause(self) -> None:
        if self._pool is not None:
            self._pool.pause()

    def _begin(self, session: Session, version: int, deadline: float) -> None:
        if self._pool is None:
            return
        message = BeginSync(
            version=version,
            manifest_digest=session.manifest.digest,
            manifest_json=session.manifest.to_json(),
            stage_sizes=session.stage_sizes,
            bucket_bytes=self._config.bucket_bytes,
            segments=session.segments,
            sync_index=session.num_syncs,
            first_reader=0,
            replica=0,
            verify=self._config.verify != "none",
            deadline=deadline,
            adapter=self._adapter,
        )
        reasons = self._pool.begin(message)
        if reasons:
            raise ManifestRefusedError(reasons)

    def _stream(self, session: Session, version: int, deadline: float) -> list[int]:
        """Send and let the replicas load; digests of all tensors when they are to be read back."""
        refs = self._pool.receive(version) if self._pool is not None else []
        result = StreamResult()

        def stream() -> None:
            nonlocal result
            result = session.stream.run(deadline, self._watch(refs))
            self._spans += result.spans
            with self._span("load"):
                problem = result.problem or self._wait_for_replicas(refs, deadline)
            if problem is not None:
                session.abort(problem)  # other senders and the replicas may be waiting
                raise RuntimeError(problem)

        self._phase(version, stream)
        if self._config.verify != "readback":
            return []
        return self._share_digests(session, result.digests)

    def _commit(self, session: Session, version: int, deadline: float, digests: list[int]) -> None:
        if self._pool is None:
            return
        with self._span("commit"):
            self._pool.commit(version, max(1.0, deadline - time.time()))
        if digests:
            with self._span("readback"):
                names = [spec.name for spec in session.manifest.tensors]
                self._compare(dict(zip(names, digests, strict=True)))

    def _compare(self, expected: dict[str, int]) -> None:
        """Raises RuntimeError that names the tensors which a replica holds otherwise than they were sent."""
        assert self._pool is not None
        answers = self._pool.read_digests([*expected, TIED_HEAD], self._config.timeout_seconds)
        problems = []
        for replica, held in enumerate(answers):
            wanted = {name: digest for name, digest in expected.items() if name in held or name != TIED_HEAD}
            if TIED_HEAD in held and TIED_HEAD not in expected:
                wanted[TIED_HEAD] = expected[EMBEDDING]
            wrong = [name for name, digest in wanted.items() if held.get(name) != digest]
            if wrong:
                problems.append(f"replica {replica} holds other values than were sent in {', '.join(wrong)}")
        if problems:
            raise RuntimeError("; ".join(problems))

    # Waiting and agreeing.

    def _watch(self, refs: list[Any]) -> Callable[[], None]:
        """A check for the stream: raises when a replica failed. Looks every POLL_SECONDS."""
        last = 0.0

        def check() -> None:
            nonlocal last
            if self._pool is not None and time.monotonic() - last > POLL_SECONDS:
                self._pool.raise_if_failed(refs)
                last = time.monotonic()

        return check

    def _wait_for_replicas(self, refs: list[Any], deadline: float) -> str | None:
        """Until all have loaded the stream; what went wrong with one of them, if anything."""
        if self._pool is None:
            return None
        try:
            while not self._pool.raise_if_failed(refs):
                if time.time() > deadline:
                    return f"deadline of {self._config.timeout_seconds:g} s passed: replicas still load"
                time.sleep(POLL_SECONDS / 10)
        except RuntimeError as error:
            return str(error)
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
        if self._any_rank(bool(problems)):
            self._fail(version, problems, refused)

    def _fail(self, version: int, problems: list[str], refused: bool) -> None:
        """Abort on every side and raise the same SyncError on every rank."""
        reasons = _essential([text for texts in self._gather_objects(problems) for text in texts])
        if self._session is not None:
            self._session.abort(reasons[0])
        failed = self._pool.abort(reasons[0], timeout=ABORT_SECONDS) if self._pool is not None else []
        self.close()
        refused, failed = self._gather_objects((refused, failed))[0]
        raise SyncError(version, reasons, refused=refused, failed_replicas=tuple(failed))

    def _any_rank(self, flag: bool) -> bool:
        if not self._is_distributed:
            return flag
        status = torch.tensor([int(flag)])
        dist.all_reduce(status, op=dist.ReduceOp.MAX, group=self._group)
        return bool(status.item())

    def _gather_objects(self, value: Any) -> list[Any]:
        if not self._is_distributed:
            return [value]
        values: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(values, value, group=self._group)
        return values

    def _share_digests(self, session: Session, digests: list[int]) -> list[int]:
        """All stages' digests on all ranks, by a sum of int64 in which each has one owner."""
        shared = torch.zeros(len(session.manifest.tensors), dtype=torch.int64)
        signed = [digest - 2**64 if digest >= 2**63 else digest for digest in digests]
        first = session.first_tensor(self._source.stage)
        shared[first : first + len(signed)] = torch.tensor(signed, dtype=torch.int64)
        if self._is_distributed:
            dist.all_reduce(shared, group=self._group)
        return [value % 2**64 for value in shared.tolist()]

    def _count_buckets(self, session: Session) -> int:
        count, first = 0, 0
        for size in session.stage_sizes:
            part = Manifest(session.manifest.tensors[first : first + size])
            count += len(plan_buckets(part, self._config.bucket_bytes))
            first += size
        return count

    @contextmanager
    def _span(self, name: str) -> Iterator[None]:
        start = time.time()
        yield
        self._spans.append(StageSpan(name, start, time.time()))


def _check_stages(entries: list[Any], num_stages: int) -> list[str]:
    """Each stage has one sender."""
    senders = sorted(stage for stage, _, path, _ in entries if path)
    if senders == list(range(num_stages)):
        return []
    return [f"stages with a sender are {senders}, needed is one each for 0 to {num_stages - 1}"]


def _essential(reasons: list[str]) -> list[str]:
    """Each reason once, without those that only repeat another."""
    unique = list(dict.fromkeys(reasons))
    return [text for text in unique if not any(text != other and text in other for other in unique)]
