"""Which request is executed next: training in the order of acceptance, samples as soon as the replicas have their version.

For several threads. Leaves out results, and who waits for them (desk.py).
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from megasync.config.service_section import ServiceConfig
from megasync.service.calls import CREATING, OVERTAKEN, SAMPLE, TRAINING
from megasync.service.requests import Request

WAIT_SECONDS = 0.05  # a client's requests take some 10 ms to come, and a pass of one client on a GPU 100 to 200 ms
RECENT_SECONDS = 5.0
PASSES_WITHOUT_WAITING = 20  # after one that waited for nobody


class Work(NamedTuple):
    """Work of the main thread: a training request, passes that are done together, samples of versions that the replicas have, or
    a sync of another version.

    `slot`: of the version that the sync replaces.
    """

    kind: Literal["train", "sample", "sync", "end"]
    requests: Sequence[Request] = ()
    version: str = ""
    slot: int = 0


class WorkQueue:
    """`with_arguments`: reads a request's arguments from the log; `num_slots`: for versions, in the replicas; `wait_seconds`:
    how long a pass waits at most for passes of other clients that had one lately; 0 where passes are not shared.
    """

    def __init__(
        self,
        config: ServiceConfig,
        num_slots: int,
        with_arguments: Callable[[Request], Request],
        wait_seconds: float,
    ) -> None:
        self._config, self._num_slots, self._with_arguments = config, num_slots, with_arguments
        self._wait_seconds, self._wait_end, self._num_at_first = wait_seconds, 0.0, 0  # 0: the oldest pass does not wait
        self._last_pass: dict[str, float] = {}  # of each client that had one lately, when it was taken
        self._passes_without_waiting = 0
        self._training: deque[Request] = deque()
        self._samples: list[Request] = []
        self._in_flight: set[Request] = set()  # samples that replicas work on
        self._sampled: dict[str, None] = {}  # versions, the one that was sampled most recently last
        self._changed, self._is_ended = threading.Condition(), False
        self._failure: BaseException | None = None  # of a thread beside the main one

    def __len__(self) -> int:
        with self._changed:
            return len(self._training) + len(self._samples) + len(self._in_flight)

    def add(self, request: Request) -> None:
        with self._changed:
            if request.call.kind in TRAINING:
                self._training.append(request)
            elif request.call.kind == SAMPLE:
                self._samples.append(request)
            self._changed.notify_all()

    def models_to_come(self) -> set[str]:
        """Names of the models whose creation is still queued."""
        with self._changed:
            return {each.call.scope for each in self._training if each.call.kind in CREATING}

    def num_open(self) -> tuple[Counter[str], Counter[str]]:
        """Requests that wait, and samples that replicas work on, by session."""
        with self._changed:
            return _by_session([*self._training, *self._samples]), _by_session(self._in_flight)

    def is_used(self, version: str) -> bool:
        """Whether samples of this version wait or run."""
        with self._changed:
            return any(each.call.version == version for each in (*self._samples, *self._in_flight))

    def next_work(self, present: Callable[[], Mapping[str, int]]) -> Work:
        """Waits for it. `present`: the versions that the replicas have by now, with their slots.

        Samples of those go first, since nothing waits for them. Of all else the oldest is first.
        """
        with self._changed:
            while True:
                if self._failure is not None:
                    raise self._failure
                if self._is_ended:
                    return Work("end")
                if (work := self._choose(present())) is not None:
                    return work
                self._changed.wait(max(0.0, self._wait_end - time.monotonic()) if self._wait_end else None)

    def fail(self, failure: BaseException) -> None:
        """`next_work` raises it."""
        with self._changed:
            self._failure = failure
            self._changed.notify_all()

    def end(self) -> None:
        with self._changed:
            self._is_ended = True
            self._changed.notify_all()

    def done(self, request: Request) -> None:
        with self._changed:
            self._in_flight.discard(request)

    def give_back(self, request: Request) -> None:
        """A sample that a replica did not finish waits again."""
        with self._changed:
            self._in_flight.discard(request)
            self._samples.append(request)
            self._changed.notify_all()

    def take_samples(self, version: str) -> list[Request]:
        """The samples of a version that there cannot be; they do not wait any more."""
        with self._changed:
            found = [each for each in self._samples if each.call.version == version]
            self._samples = [each for each in self._samples if each.call.version != version]
            return found

    # ------------------------------------------------------------------------------------------------ inside

    def _choose(self, present: Mapping[str, int]) -> Work | None:
        if own := [each for each in self._samples if each.call.version in present]:
            self._samples = [each for each in self._samples if each.call.version not in present]
            self._in_flight |= set(own)
            for version in dict.fromkeys(each.call.version for each in own):
                self._sampled.pop(version, None)
                self._sampled[version] = None
            return Work("sample", [self._with_arguments(each) for each in own])
        oldest = min(self._samples, key=lambda each: each.number, default=None)
        if self._training and (oldest is None or self._training[0].number < oldest.number):
            return None if self._waits_for_others() else Work("train", self._take_training())
        if oldest is not None:
            return Work("sync", version=oldest.call.version, slot=self._slot_to_fill(present))
        return None

    def _waits_for_others(self) -> bool:
        """Whether the oldest request is a pass that waits for those of other clients, so that they are done together."""
        passes = {each.call.scope for each in self._training if each.call.kind == "forward_backward"}
        now = time.monotonic()
        self._last_pass = {scope: at for scope, at in self._last_pass.items() if now - at < RECENT_SECONDS}
        is_wanted = self._training[0].call.kind == "forward_backward" and not self._passes_without_waiting
        is_complete = len(passes) >= self._config.shared_clients or self._last_pass.keys() <= passes
        if is_wanted and not is_complete and not self._wait_end:
            self._wait_end, self._num_at_first = now + self._wait_seconds, len(passes)
        if is_wanted and not is_complete and now < self._wait_end:
            return True
        if self._wait_end and len(passes) == self._num_at_first:
            self._passes_without_waiting = PASSES_WITHOUT_WAITING
        self._wait_end = 0.0
        return False

    def _take_training(self) -> list[Request]:
        """The oldest request and, where it is a pass with gradients, those of other clients that may be done at the same time.

        A client's own come in order. So that a checkpoint holds the first requests and no others, none is taken from behind the
        next place of one, or of a request that may cause one.
        """
        first = self._with_arguments(self._training.popleft())
        taken, every = [first], self._config.checkpoint_every
        if not _is_pass(first):
            return taken
        self._passes_without_waiting = max(0, self._passes_without_waiting - 1)
        before = {first.call.scope}
        for request in list(self._training):
            is_behind = every and request.order // every > first.order // every
            if is_behind or request.call.kind not in OVERTAKEN or len(taken) >= self._config.shared_clients:
                break
            if request.call.kind == "forward_backward" and request.call.scope not in before:
                if _is_pass(self._with_arguments(request)):
                    taken.append(request)
                    self._training.remove(request)
                else:
                    request.call = dataclasses.replace(request.call, arguments={})
            before.add(request.call.scope)
        self._last_pass |= dict.fromkeys((each.call.scope for each in taken), time.monotonic())
        return taken

    def _slot_to_fill(self, present: Mapping[str, int]) -> int:
        """An empty one, or that of the version which was sampled least recently; one without running samples if possible."""
        held = {slot: version for version, slot in present.items()}
        running, order = {each.call.version for each in self._in_flight}, [*self._sampled]

        def last_use(slot: int) -> tuple[bool, int]:
            version = held.get(slot)
            return version in running, order.index(version) if version in order else -1

        return min(range(self._num_slots), key=last_use)


def _by_session(requests: Iterable[Request]) -> Counter[str]:
    return Counter(each.call.scope.partition(":")[0] or "none" for each in requests)


def _is_pass(request: Request) -> bool:
    return request.call.kind == "forward_backward" and bool(request.call.arguments["has_gradients"])
