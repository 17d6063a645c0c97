"""A job with its clock, and the state of a worker that has jobs. Leaves out who runs where, and limits (pool.py)."""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from megasync.workers.failure import Failure

MAX_LATE = 8  # late jobs of a worker, whose threads may still hang: it gets no others then, and ends with its last one


class Outcome(NamedTuple):
    value: Any
    failure: Failure | None


class Job:
    """One call of the workers' function. Override `payload` and the methods below it to talk with it."""

    def __init__(self, payload: Any = None, *, is_deadly: bool = False) -> None:
        """`is_deadly`: it has ended a process before, and runs alone in a new one."""
        self.number, self.limit_seconds = 0, 0.0  # the pool's
        self._payload, self.is_deadly = payload, is_deadly
        self.result: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.left_seconds, self.since = 0.0, math.inf  # since when the clock runs; infinite: it stands still
        self.is_late = False
        self.num_lost = 0  # workers that it was alone in, lost with their actors
        self.requests: dict[int, asyncio.Task[None]] = {}  # that have no reply yet

    def payload(self) -> Any:
        """The argument of the worker's function, at each start."""
        return self._payload

    async def on_request(self, number: int, message: Any) -> Any:
        """The reply. An error is the error of the job's result."""
        raise NotImplementedError

    def on_post(self, message: Any) -> None:
        raise NotImplementedError

    def on_restart(self) -> None:
        """Its worker has ended; another one will start it again."""

    def finish(self, outcome: Outcome) -> None:
        """Set the result."""
        self.result.set_result(outcome)

    # ------------------------------------------------------------------------------------------------ the pool's

    @property
    def spent_seconds(self) -> float:
        """Time on the clock, which stands still while a request has no reply."""
        return self.limit_seconds - self.left_seconds

    @property
    def due(self) -> float:
        """The deadline, by time.monotonic()."""
        return self.since + self.left_seconds

    def stop_clock(self) -> None:
        if self.since < math.inf:
            self.left_seconds, self.since = self.due - time.monotonic(), math.inf

    def reset(self) -> None:
        self.stop_clock()
        for task in self.requests.values():
            task.cancel()
        self.requests, self.is_late = {}, False
        self.on_restart()


@dataclass(eq=False)
class WorkerState:
    """A worker and its jobs."""

    worker: Any  # Worker | RemoteWorker
    timer: asyncio.TimerHandle | None = None  # of the start, then of the job that is due first
    is_ready: bool = False
    ended_by_us: str = ""  # why
    late: Job | None = None  # the job that it is ended for
    num_late: int = 0
    num_begun: int = 0  # jobs in all its life
    is_apart: bool = False  # its jobs are suspects (suspects.py): no others join them
    jobs: dict[int, Job] = field(default_factory=dict)  # oldest first

    @property
    def is_usable(self) -> bool:
        return self.is_ready and not self.ended_by_us and self.num_late < MAX_LATE and not (self.is_apart and self.jobs)

    def stop_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def end(self, why: str) -> None:
        """Kill the worker; `why`: a predicate for messages."""
        self.ended_by_us = self.ended_by_us or why
        self.worker.kill_with_stack()
