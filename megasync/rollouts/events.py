"""Events of a run's groups, the queue that has them, and the thread that reads it.

The dispatcher, the episodes and the scoring start tasks, whose results are events; one function handles all of them in turn
(RolloutStream.handle), so that nothing else changes a group. Leaves out what an event means (stream.py, dispatch.py, turns.py).

    events = EventThread("rollouts", handle)      # handle(events), on the thread's asyncio loop
    events.start(collect())                       # a task; it calls events.put(SamplesFinished(...))
    events.run(coroutine)                         # from another thread: its result
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from megasync.rollouts.scheduler import Load

if TYPE_CHECKING:
    from bridge.generation import Finished
    from megasync.episodes.task import EpisodeResult
    from megasync.rewards.pool import Scored
    from megasync.rollouts.group import Group

Result = TypeVar("Result")
CLOSE_SECONDS = 10.0  # for cancelled tasks to end


@dataclass(eq=False)
class ReplicaSlot:
    """A replica that gets groups, from its first sync until it is lost or released."""

    replica: int
    number: int  # no other slot's, so that late events of a lost replica are not its successor's
    load: Load = field(default_factory=Load)
    is_open: bool = True  # false: its sync broke off, and it gets no group before the next one

    def add_load(self, samples: int, tokens_each: float) -> None:
        self.load = Load(self.load.samples + samples, self.load.tokens + samples * tokens_each)


@dataclass(frozen=True, slots=True)
class SamplesFinished:
    """A replica has generated these samples."""

    slot: ReplicaSlot
    samples: tuple[Finished, ...]


@dataclass(frozen=True, slots=True)
class ReplicaLost:
    """A replica died or gave no answer."""

    slot: ReplicaSlot
    reason: str


@dataclass(frozen=True, slots=True)
class NotServing:
    """A replica that was to serve `version` has no whole weights: its sync broke off."""

    slot: ReplicaSlot
    groups: Sequence[Group]
    version: int


@dataclass(frozen=True, slots=True)
class RequestRefused:
    """One of the groups' requests is wrong; another replica would refuse it, too."""

    slot: ReplicaSlot
    groups: Sequence[Group]
    error: Exception


@dataclass(frozen=True, slots=True)
class TurnAsked:
    """An episode waits for this turn."""

    turn: Group


@dataclass(frozen=True, slots=True)
class EpisodeEnded:
    """A member of a group."""

    group: Group
    member: int
    played: EpisodeResult


@dataclass(frozen=True, slots=True)
class SamplesScored:
    """Rewards of these samples of the group, by index."""

    group: Group
    samples: Sequence[int]
    scored: Sequence[Scored]


@dataclass(frozen=True, slots=True)
class Failed:
    """The run cannot continue; the trainer's thread raises `error`."""

    error: BaseException


Event = SamplesFinished | ReplicaLost | NotServing | RequestRefused | TurnAsked | EpisodeEnded | SamplesScored | Failed


async def _cancel(given: Iterable[asyncio.Task[Any]]) -> None:
    tasks = list(given)
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=CLOSE_SECONDS)


class EventThread:
    """An asyncio loop in a thread of its own. `run` and `close` are for other threads, `put` and `start` for the loop's."""

    def __init__(
        self, name: str, handle: Callable[[Sequence[Event]], None], loop: asyncio.AbstractEventLoop | None = None
    ) -> None:
        """`handle` gets all events that came in one iteration of the loop. `loop`: with a clock of its own, for tests."""
        self.loop = loop or asyncio.new_event_loop()
        self._handle = handle
        self._queue: asyncio.Queue[Event] = asyncio.Queue()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._thread = threading.Thread(target=self.loop.run_forever, name=name, daemon=True)
        self._thread.start()
        self.loop.call_soon_threadsafe(lambda: self.start(self._read()))

    async def _read(self) -> None:
        while True:
            events = [await self._queue.get()]
            while not self._queue.empty():
                events.append(self._queue.get_nowait())
            self._handle(events)

    def put(self, event: Event) -> None:
        self._queue.put_nowait(event)

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """A task of the loop. An exception in it becomes Failed."""
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._note_end)
        return task

    def _note_end(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.put(Failed(error))

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Wait for the result of `work` on the loop."""
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return future.result()
        except BaseException:  # such as a signal's: nobody waits for it any more
            future.cancel()
            raise

    def close(self, *last: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Cancel all tasks, run each of `last`, and end the thread, also where one of them fails. Safe to repeat."""
        if not self._thread.is_alive():
            return
        try:
            self.run(self.cancel())
            for each in last:
                self.run(each())
        finally:
            self.run(self._cancel_others())
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join()
            self.loop.close()

    async def cancel(self) -> None:
        await _cancel(self._tasks)

    async def _cancel_others(self) -> None:
        """Tasks that others made on the loop: readers of workers, which end later than the loop."""
        await _cancel(each for each in asyncio.all_tasks() if each is not asyncio.current_task())
