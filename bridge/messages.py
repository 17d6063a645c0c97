"""The protocol of a sync: its states, its typed messages, and the transition for each message in each state.

    SERVING --pause--> PAUSED --receive--> RECEIVING --received--> RECEIVED --commit--> COMMITTED
       ^                                                                                     |
       +-------------------------------------- resume ---------------------------------------+

A replica that shares its devices with the trainer goes from SERVING to ASLEEP, its memory given up, and on to PAUSED by the
next pause, or back by resume where it kept its weights. A manifest is offered to a replica that is PAUSED before the first
receive: begin changes no weight, whether it is accepted or refused, and resume serves the former version, if there still is
one. An abort in PAUSED does the same; from RECEIVING on it leads to STALE, where nothing generates, and which the next whole sync
leaves, by a pause. A replica whose vLLM died, or that gives no answer, is FAILED; only a new one takes its place
(ReplicaPool.replace). Leaves out who sends what when: publish.py drives, replica.py obeys. No torch in here.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any, Protocol

FOLDER_VERSION = -1  # weights as loaded from the model folder, before any sync


class ReplicaState(Enum):
    """The state of a replica; it generates only in SERVING."""

    SERVING = "serving"
    ASLEEP = "asleep"
    PAUSED = "paused"
    RECEIVING = "receiving"
    RECEIVED = "received"
    COMMITTED = "committed"
    STALE = "stale"
    FAILED = "failed"


class Event(Enum):
    """An event that changes the state of a replica."""

    SLEEP = "sleep"
    PAUSE = "pause"
    BEGIN = "begin"
    RECEIVE = "receive"
    RECEIVED = "have received"
    COMMIT = "commit"
    RESUME = "resume"
    ABORT = "abort"
    DIE = "die"  # vLLM's processes ended


TRANSITIONS: dict[tuple[ReplicaState, Event], ReplicaState] = {
    (ReplicaState.SERVING, Event.SLEEP): ReplicaState.ASLEEP,
    (ReplicaState.SERVING, Event.PAUSE): ReplicaState.PAUSED,
    (ReplicaState.ASLEEP, Event.PAUSE): ReplicaState.PAUSED,
    (ReplicaState.STALE, Event.PAUSE): ReplicaState.PAUSED,
    (ReplicaState.PAUSED, Event.BEGIN): ReplicaState.PAUSED,
    (ReplicaState.PAUSED, Event.RECEIVE): ReplicaState.RECEIVING,
    (ReplicaState.RECEIVING, Event.RECEIVED): ReplicaState.RECEIVED,
    (ReplicaState.RECEIVED, Event.COMMIT): ReplicaState.COMMITTED,
    (ReplicaState.ASLEEP, Event.RESUME): ReplicaState.SERVING,
    (ReplicaState.PAUSED, Event.RESUME): ReplicaState.SERVING,
    (ReplicaState.COMMITTED, Event.RESUME): ReplicaState.SERVING,
    (ReplicaState.SERVING, Event.ABORT): ReplicaState.SERVING,
    (ReplicaState.ASLEEP, Event.ABORT): ReplicaState.ASLEEP,
    (ReplicaState.PAUSED, Event.ABORT): ReplicaState.SERVING,
    (ReplicaState.RECEIVING, Event.ABORT): ReplicaState.STALE,
    (ReplicaState.RECEIVED, Event.ABORT): ReplicaState.STALE,
    (ReplicaState.COMMITTED, Event.ABORT): ReplicaState.STALE,
    (ReplicaState.STALE, Event.ABORT): ReplicaState.STALE,
    (ReplicaState.FAILED, Event.ABORT): ReplicaState.FAILED,
} | {(state, Event.DIE): ReplicaState.FAILED for state in ReplicaState}


def next_state(state: ReplicaState, event: Event) -> ReplicaState:
    """The state after `event`.

    Raises:
        RuntimeError: the protocol has no such step.
    """
    if (state, event) not in TRANSITIONS:
        raise RuntimeError(f"a replica that is {state.value} cannot {event.value}")
    return TRANSITIONS[state, event]


def name_replicas(replicas: Sequence[int]) -> str:
    """For messages: `replica 1`, `replicas 0, 2`; `replicas` where they are unknown."""
    if not replicas:
        return "replicas"
    return f"replica{'s' if len(replicas) > 1 else ''} {', '.join(map(str, replicas))}"


class SyncError(RuntimeError):
    """A sync that failed; the same text on every trainer rank. `version` is the one that was to be published.

    `refused`: the replicas refused the manifest and still serve the former version. Otherwise those in `failed_replicas` are
    out of service until ReplicaPool.replace, and those in `stale_replicas` until another sync.
    """

    def __init__(
        self,
        version: int,
        reasons: list[str],
        *,
        refused: bool = False,
        failed_replicas: tuple[int, ...] = (),
        stale_replicas: tuple[int, ...] = (),
    ) -> None:
        self.version, self.reasons, self.refused = version, reasons, refused
        self.failed_replicas, self.stale_replicas = failed_replicas, stale_replicas
        outcomes = []
        if failed_replicas:
            outcomes.append(f"out of service until restarted: replicas {list(failed_replicas)}")
        if stale_replicas:
            outcomes.append(f"out of service until the next sync: replicas {list(stale_replicas)}")
        outcome = f"failed; {'; '.join(outcomes) or 'no replica changed'}"
        if refused:
            outcome = "refused; replicas still serve the former version"
        super().__init__(f"sync of version {version} {outcome}: " + "; ".join(reasons))

    def __reduce__(self) -> tuple[Any, ...]:
        """Exceptions with their own arguments need this to be pickled, which Ray does."""
        failed, stale = self.failed_replicas, self.stale_replicas
        rebuild = partial(SyncError, refused=self.refused, failed_replicas=failed, stale_replicas=stale)
        return rebuild, (self.version, self.reasons)


class NotServingError(RuntimeError):
    """A replica has no complete weights until the next sync."""


@dataclass(frozen=True)
class BeginSync:
    """Opens a sync. The plan is not in it: both sides make it from manifest, stages and bucket size (layout/bucket.py).

    `manifest_json` is None when the replica already holds the manifest of that digest. `stage_sizes` are numbers of
    tensors. `endpoints` has for each reader one a stage (transport/open.py); a replica gets those of its workers.
    `sync_index` counts the syncs of these endpoints. `first_reader` is the index of the replica's
    first worker among all `num_readers` workers of all replicas. With `lanes_json` (layout/lanes.py) an endpoint is a lane's.
    An adapter replaces the one in its `slot`.
    """

    version: int
    manifest_digest: str
    manifest_json: str | None
    stage_sizes: tuple[int, ...]
    bucket_bytes: int
    endpoints: tuple[tuple[str, ...], ...]
    sync_index: int
    first_reader: int
    num_readers: int
    replica: int
    verify: bool
    timeout_seconds: float  # from its arrival on: clocks of two hosts are not compared
    lanes_json: str | None = None
    adapter: dict[str, Any] | None = None  # AdapterSpec's fields, where the tensors are an adapter and no weights
    slot: int = 0

    @staticmethod
    def from_dict(fields: dict[str, Any]) -> BeginSync:
        """From `dataclasses.asdict`, the form in which vLLM passes it to its workers."""
        endpoints = tuple(tuple(stages) for stages in fields["endpoints"])
        return BeginSync(**(fields | {"stage_sizes": tuple(fields["stage_sizes"]), "endpoints": endpoints}))


@dataclass(frozen=True, slots=True)
class StageSpan:
    """A span of a sync for the timeline; wall clock, seconds since the epoch."""

    name: str
    start: float
    end: float


@dataclass
class Spans:
    """Collects spans."""

    taken: list[StageSpan] = field(default_factory=list)

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        start = time.time()
        yield
        self.taken.append(StageSpan(name, start, time.time()))


class Replicas(Protocol):
    """The methods that a Publisher calls on the replicas: ReplicaPool's side of the protocol. They raise RuntimeError."""

    @property
    def reader_names(self) -> list[str]: ...

    @property
    def reader_numbers(self) -> list[int]: ...

    def reader_hosts(self) -> list[str]: ...

    def pause(self, slot: int = 0) -> None: ...

    def begin(self, message: BeginSync) -> list[str]: ...

    def receive(self, message: BeginSync) -> list[Any]: ...

    def raise_if_failed(self, refs: list[Any], seconds: float = 0.0) -> list[int]: ...

    def commit(self, version: int, timeout: float) -> None: ...

    def loader_fallback(self) -> dict[str, str]: ...

    def read_digests(self, timeout: float, replicas: Sequence[int] | None = None) -> dict[int, dict[str, int]]: ...

    def resume(self) -> None: ...

    def abort(self, *, timeout: float) -> tuple[list[int], list[int]]: ...


@dataclass(frozen=True, slots=True)
class SyncReport:
    """One sync in figures, as seen by this rank. All sizes count all pipeline stages.

    `seconds`: from begin to the end of commit and verification. `pause_seconds`: how long no replica took on new
    requests; the wait for running ones is in it. `stages`: pause, begin (in the first sync), then gather, pack and wait for
    each bucket that this rank sends (gather alone where it sends none; their lengths are measured, within a bucket they are
    laid end to end), load, commit, readback, resume. With CUDA gather and pack are the time to queue work, which runs while
    the rank waits. `loader_fallback`: vLLM layers that are loaded by vLLM's own loader
    instead of the baked plan (bake.py), in the first worker of the first replica, each with the reason; known on rank 0.
    """

    version: int
    seconds: float
    num_bytes: int
    pause_seconds: float
    verified: bool
    num_buckets: int
    stages: tuple[StageSpan, ...]
    loader_fallback: dict[str, str]
    sent_bytes: int | None = None  # by transport delta: to one worker, the deltas of all stages

    @property
    def gb_per_second(self) -> float:
        """10**9 bytes a second."""
        return self.num_bytes / 1e9 / self.seconds if self.seconds > 0 else 0.0
