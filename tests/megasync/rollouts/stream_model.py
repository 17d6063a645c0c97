"""A stream of rollouts in virtual time: the real stream, dispatcher and scheduler beside replicas that are a formula.

A decode step of a replica takes `step_seconds + sample_seconds * samples that run`, and gives each of them a token. Nothing waits
for real: the event loop's clock goes on to the next timer at once, so that a long run takes a moment and is the same each time.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from bridge.generation import Collected, Completion, Finished, GroupRequest
from bridge.messages import NotServingError
from megasync.rewards.pool import Scored
from megasync.rollouts.group import Group, StreamSettings
from megasync.rollouts.stream import RolloutStream

START_SECONDS = 0.1  # of a replica in the place of one that was lost; long enough for the dispatcher to hear of the loss


class VirtualLoop(asyncio.SelectorEventLoop):
    """Its clock stands still while something runs, and goes on to the next timer when nothing does."""

    def __init__(self) -> None:
        self.now = 0.0
        super().__init__()

    def time(self) -> float:
        return self.now

    def _run_once(self) -> None:
        own = cast(Any, self)
        if not own._ready and own._scheduled:
            self.now = max(self.now, own._scheduled[0]._when)
        cast(Any, super())._run_once()


@dataclass(order=True)
class Running:
    """A sample; `end` is the number of decode steps after which it ends."""

    end: float
    key: int
    sample: int
    length: int = field(compare=False)
    version: int = field(compare=False)
    token: int = field(compare=False)  # the first of its prompt, which it repeats


@dataclass
class ModelReplica:
    """One of them; the steps that it has done are a real number, so that others may come in between."""

    pool: ModelPool
    steps: float = 0.0
    last_seconds: float = 0.0
    idle_seconds: float = 0.0
    waiting: deque[tuple[GroupRequest, int]] = field(default_factory=deque)
    running: list[Running] = field(default_factory=list)
    finished: list[Finished] = field(default_factory=list)
    asked: Future[Collected] | None = None
    timer: asyncio.TimerHandle | None = None
    is_open: bool = True
    lost_seconds: float = 0.0

    @property
    def seconds_of_a_step(self) -> float:
        return self.pool.step_seconds + self.pool.sample_seconds * len(self.running)

    def advance(self) -> None:
        """To the present: who has ended is finished, who waits begins."""
        now, pool = self.pool.loop.time(), self.pool
        if self.running:
            self.steps += (now - self.last_seconds) / self.seconds_of_a_step
        else:
            self.idle_seconds += now - self.last_seconds
        self.last_seconds = now
        while self.running and self.running[0].end <= self.steps + 1e-6:
            one = heapq.heappop(self.running)
            versions = np.full(one.length, one.version, np.int32)
            versions[-1] = pool.version  # it is held at a sync and goes on
            empty = np.zeros(one.length, np.float32)
            tokens = np.full(one.length, one.token, np.int32)
            self.finished.append(Finished(one.key, one.sample, Completion(tokens, empty, versions, "stop")))
        while self.waiting and len(self.running) < pool.max_num_seqs:
            group, sample = self.waiting.popleft()
            length = pool.length(group, sample)
            token = group.request.prompt_ids[0]
            heapq.heappush(self.running, Running(self.steps + length, group.key, sample, length, pool.version, token))
        if self.timer is not None:
            self.timer.cancel()
        if self.running:
            seconds = max(0.0, self.running[0].end - self.steps) * self.seconds_of_a_step
            self.timer = pool.loop.call_later(seconds, self.advance)
        if self.finished:
            self.answer()

    def answer(self, asked: Future[Collected] | None = None) -> None:
        """To whoever asked; `asked`: unless that was answered."""
        if self.asked is not None and not self.asked.done() and asked in (None, self.asked):
            finished, self.finished = tuple(self.finished), []
            self.asked.set_result(Collected(finished, 0.0))


class ModelPool:
    """What a stream asks of a ReplicaPool."""

    def __init__(
        self,
        num_replicas: int,
        length: Callable[[GroupRequest, int], int],
        *,
        max_num_seqs: int = 10**9,
        step_seconds: float = 1.0,
        sample_seconds: float = 0.0,
    ) -> None:
        self.loop, self.length, self.max_num_seqs = VirtualLoop(), length, max_num_seqs
        self.step_seconds, self.sample_seconds = step_seconds, sample_seconds
        self.version = 0
        self.replicas = {number: ModelReplica(self) for number in range(num_replicas)}
        self.lost: set[int] = set()
        self.wanted = set(self.replicas)
        self.gone: set[int] = set()  # wanted no more, and let go

    @property
    def members(self) -> list[int]:
        return sorted(self.replicas.keys() - self.lost - self.gone)

    @property
    def leaving(self) -> set[int]:
        """Those that are there and wanted no more."""
        return set(self.members) - self.wanted

    def scale(self, wanted: Collection[int]) -> None:
        """These are to be there; those that were gone, or never there, come with the next `sync`."""
        self.wanted = set(wanted)
        for replica in self.wanted - (self.replicas.keys() - self.gone):
            self.replicas[replica] = ModelReplica(self)
            self.lost.add(replica)
        self.gone -= self.wanted

    def dismiss(self, replicas: Collection[int]) -> None:
        """They end."""
        self.gone |= set(replicas)
        for replica in replicas:
            assert not self.replicas[replica].running and not self.replicas[replica].waiting, "it was in the midst of a group"
            self._die(self.replicas[replica])

    @property
    def starting(self) -> set[int]:
        """Those that were lost a moment ago."""
        return {each for each in self.lost if self.loop.time() - self.replicas[each].lost_seconds < START_SECONDS}

    async def hand_in(self, replica: int, groups: Sequence[GroupRequest]) -> None:
        chosen = self.replicas[replica]
        await asyncio.sleep(0)
        if replica in self.lost:
            raise RuntimeError("it died")
        if not chosen.is_open:
            raise NotServingError("its sync broke off")
        if any(-1 in group.request.prompt_ids for group in groups):
            raise ValueError("there is no such token")
        chosen.waiting.extend((group, sample) for group in groups for sample in group.samples)
        chosen.advance()

    async def abort_groups(self, replica: int, keys: Sequence[int]) -> None:
        chosen = self.replicas[replica]
        await asyncio.sleep(0)
        if replica in self.lost:
            raise RuntimeError("it died")
        chosen.advance()
        chosen.waiting = deque(pair for pair in chosen.waiting if pair[0].key not in keys)
        chosen.running = [one for one in chosen.running if one.key not in keys]
        heapq.heapify(chosen.running)
        chosen.finished = [one for one in chosen.finished if one.key not in keys]
        chosen.advance()

    def collect(self, replica: int, seconds: float) -> Any:
        chosen, asked = self.replicas[replica], Future[Collected]()
        chosen.asked = asked
        if replica in self.lost:
            asked.set_exception(RuntimeError("it died"))
        elif chosen.finished:
            chosen.answer()
        else:
            self.loop.call_later(seconds, chosen.answer, asked)
        return type("Reference", (), {"future": lambda self: asked})()

    def replace(self, replica: int) -> None:
        """It is there again after a later `sync`, if it is wanted."""
        if replica not in self.wanted:
            self.gone.add(replica)
        if replica not in self.lost:
            self.kill(replica)

    def kill(self, replica: int) -> None:
        self.lost.add(replica)
        self.replicas[replica].lost_seconds = self.loop.time()
        self._die(self.replicas[replica])

    @staticmethod
    def _die(chosen: ModelReplica) -> None:
        if chosen.timer is not None:
            chosen.timer.cancel()
        if chosen.asked is not None and not chosen.asked.done():
            chosen.asked.set_exception(RuntimeError("it died"))

    def sync(self, version: int, absent: Collection[int] = ()) -> None:
        """All serve `version`, those that were lost too, but not those that are `absent`; samples that run go on.

        Who was there until now and is absent says what it has finished, and dies a moment later.
        """
        now = self.loop.time()
        for replica in self.lost - set(absent) - self.gone:
            self.replicas[replica] = ModelReplica(self, last_seconds=now)
        for replica in set(absent) - self.lost - self.gone:
            chosen = self.replicas[replica]
            chosen.advance()
            chosen.lost_seconds = now
            self.loop.call_later(START_SECONDS / 2, self._die, chosen)
        self.lost = set(absent) - self.gone
        for replica in self.members:
            self.replicas[replica].advance()
            self.replicas[replica].is_open = True
        self.version = version


async def by_parity(group: Group, samples: Sequence[int]) -> list[Scored]:
    """Rewards of 0 and 1 in turns."""
    return [Scored(float(sample % 2), {}) for sample in samples]


@contextmanager
def streaming(
    pool: object, settings: StreamSettings, make_group: Callable[[int], Group], score: Any = by_parity, episodes: Any = None
) -> Iterator[RolloutStream]:
    """A stream on the pool's loop, if it has one."""
    stream = RolloutStream(cast(Any, pool), settings, make_group, score, print, getattr(pool, "loop", None), episodes)
    try:
        yield stream
    finally:
        stream.close()
