"""The limit on a job's time. A serial job that is late ends with its worker; a concurrent one is cancelled first.

The clock stands still while a job waits for the trainer (pool.py). Time in which another job blocks the event loop is given back.
If the trainer itself stood still (its event loop, or the machine), jobs that seem late get a new limit.
Leaves out which jobs fail when a worker ends (pool.py).
"""

from __future__ import annotations

import math
import time

from megasync.workers.job import Job, WorkerState
from megasync.workers.protocol import Cancel, HeldUp

GRACE_SECONDS = 1.5  # from the cancellation of a job to its end; then its worker is killed
HELD_SECONDS = 1.0  # a worker that shows no step for longer is blocked; more than program.TICK_SECONDS and less than the grace


class TimeLimit:
    """The limit of all jobs of a pool. `key`: the config key that sets it."""

    def __init__(self, key: str, seconds: float, *, is_serial: bool) -> None:
        self.key, self.seconds, self.is_serial = key, seconds, is_serial

    def late_text(self) -> str:
        return f"took longer than {self.key} = {self.seconds:g}"

    def start_clock(self, state: WorkerState, job: Job) -> None:
        """A worker has one timer, for its job that is due first. It stays if that job ends, and then finds none that is late."""
        job.stop_clock()
        job.since = time.monotonic()
        if state.timer is None or job.due < state.timer.when():
            state.stop_timer()
            state.timer = state.worker.loop.call_at(job.due, self._look, state)

    def _look(self, state: WorkerState) -> None:
        """End the jobs that are late, and look again when the next one is due."""
        assert state.timer is not None
        is_behind, state.timer = _is_behind(state.timer.when()), None
        if self.is_serial:
            _find_running(state)
        for job in [one for one in state.jobs.values() if one.due <= time.monotonic()]:
            if is_behind:
                job.since, job.left_seconds = time.monotonic(), job.limit_seconds
            else:
                self._on_limit(state, job)
        running = [one for one in state.jobs.values() if one.since < math.inf]
        if running and state.timer is None and not state.ended_by_us:
            state.timer = state.worker.loop.call_at(min(one.due for one in running), self._look, state)

    def _on_limit(self, state: WorkerState, job: Job) -> None:
        """End the job, unless another one has blocked its worker meanwhile."""
        since = job.since
        job.stop_clock()
        held, holder = _blocked(state, since=since)
        if not self.is_serial and held > HELD_SECONDS and holder != job.number:
            job.left_seconds = held
            self.start_clock(state, job)
            if held > self.seconds / 2:
                state.end(f"{self.late_text()}, and blocked its process")
            return
        job.is_late = True
        if self.is_serial:
            state.late = job
            state.end(self.late_text())
        else:
            cancel(state, job)

    def give_back(self, state: WorkerState, held: HeldUp) -> None:
        """The time in which a job has blocked the worker does not count for the others."""
        for other in [one for one in state.jobs.values() if one.since < math.inf and one.number != held.job]:
            seconds = min(held.seconds, time.monotonic() - other.since)
            other.stop_clock()
            other.left_seconds += seconds
            self.start_clock(state, other)


def _find_running(state: WorkerState) -> None:
    """Only the serial job that runs has a clock. Those before it have ended, and their ends have not been sent yet."""
    begin, number = state.worker.running_job()
    if (running := state.jobs.get(number)) is not None:
        for job in state.jobs.values():
            job.since = math.inf
        running.since, running.left_seconds = begin, running.limit_seconds


def cancel(state: WorkerState, job: Job) -> None:
    """Cancel a concurrent job; its worker is killed if it does not end."""
    state.worker.send(Cancel(job.number))
    _kill_later(state, job, GRACE_SECONDS)


def _kill_later(state: WorkerState, job: Job, seconds: float) -> None:
    due = time.monotonic() + seconds
    state.worker.loop.call_at(due, _kill_with, state, job, due)


def _kill_with(state: WorkerState, job: Job, due: float) -> None:
    """Kill the worker of a job that did not end when it was cancelled. Where nothing blocks the worker, the job is guilty."""
    if state.jobs.get(job.number) is not job or state.ended_by_us:
        return
    if _is_behind(due):
        _kill_later(state, job, HELD_SECONDS)
        return
    held, holder = _blocked(state)
    other = state.jobs.get(holder)
    if held > HELD_SECONDS and holder != job.number and held < job.limit_seconds and not (other and other.is_late):
        _kill_later(state, job, held)  # until that one is late itself
        return
    state.late = job if held <= HELD_SECONDS else None
    state.end("did not end when it was cancelled")


def _is_behind(due: float) -> bool:
    """Whether this event loop has stood still until after `due`: the ends of jobs may have come, and are not read yet."""
    return time.monotonic() - due > HELD_SECONDS


def _blocked(state: WorkerState, since: float = 0.0) -> tuple[float, int]:
    """Seconds for which the worker has shown no step, and the number of the job whose step runs; 0: no job's."""
    begin, number = state.worker.running_job()
    return time.monotonic() - max(begin, since), number
