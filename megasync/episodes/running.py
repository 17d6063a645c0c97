"""An episode that has not ended, with its clock, and what the trainer knows of a process that such ones are in.

Leaves out who runs where, and what becomes of it when a limit is passed or a process ends (pool.py).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from megasync.episodes.record import History
from megasync.episodes.segments import Turn
from megasync.episodes.task import Task
from megasync.episodes.wire import Ask, Ended

MOST_LATE = 8  # episodes of a process, whose threads may still hang: it gets no others then, and ends with its last one

AskFunction = Callable[[Ask], Awaitable[Turn]]


@dataclass(eq=False)
class Running:
    """An episode that has not ended."""

    number: int
    task: Task
    ask: AskFunction
    ended: asyncio.Future[tuple[Ended, list[tuple[Any, Turn]]]]
    limit_seconds: float
    left_seconds: float = 0.0
    since: float = 0.0
    timer: asyncio.TimerHandle | None = None
    is_late: bool = False
    num_lost: int = 0  # processes that it was alone in, lost with their actors
    asking: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    turns: dict[int, tuple[Any, Turn]] = field(default_factory=dict)  # prompt and what was sampled
    former: dict[int, tuple[Any, Turn]] = field(default_factory=dict)  # of a process that died, or of a checkpoint
    history: History = field(default_factory=History)
    of_checkpoint: frozenset[int] = frozenset()  # turns

    def stop(self) -> None:
        """Its clock."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer, self.left_seconds = None, self.left_seconds - (time.monotonic() - self.since)

    def begin_anew(self) -> None:
        self.stop()
        for task in self.asking.values():
            task.cancel()
        self.former = {**self.former, **self.turns}
        self.asking, self.turns, self.left_seconds, self.is_late = {}, {}, self.limit_seconds, False


@dataclass(eq=False)
class ProcessState:
    """Of a process."""

    timer: asyncio.TimerHandle
    is_ready: bool = False
    ended_by_us: str = ""
    late: Running | None = None  # what it is ended for
    num_late: int = 0
    num_begun: int = 0  # episodes in it, all its life
    is_apart: bool = False  # those in it are suspects (rewards/suspects.py): no others join them
    episodes: dict[int, Running] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        return not self.episodes

    @property
    def is_usable(self) -> bool:
        return self.is_ready and not self.ended_by_us and self.num_late < MOST_LATE and not (self.is_apart and self.episodes)
