"""A pool of workers: which job runs where, and which job is to blame for the end of a worker.

Serial workers run one job after another; a few short ones are sent ahead. Concurrent workers run hundreds side by side.

When a worker dies, its jobs are suspects: of a serial one the job that ran, of a concurrent one all. They run again in other
workers, in smaller sets, and one fails when it was alone in a new worker (suspects.py). Used in one event loop, but for `close`.
Leaves out limits on time (limits.py), and what a failure means for a run (rewards/, episodes/).

    pool = WorkerPool(PoolSettings(...))
    outcome = await pool.submit(Job(payload))
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import re
import sys
from collections import deque
from typing import Any

from megasync.workers.failure import WAS_KILLED, Failure
from megasync.workers.job import MAX_LATE, Job, Outcome, WorkerState
from megasync.workers.limits import TimeLimit, cancel
from megasync.workers.process import Worker
from megasync.workers.protocol import Begin, Ended, HeldUp, Post, Ready, Reply, Request, Withdraw
from megasync.workers.remote import Hosts, RemoteWorker
from megasync.workers.settings import PoolSettings, WorkersError
from megasync.workers.suspects import sort_out

logger = logging.getLogger(__name__)

START_SECONDS = 120.0  # for a worker to import its function
AHEAD_SECONDS = 0.02  # of serial work that a worker has in advance; longer jobs wait until a worker is free
MAX_AHEAD = 64  # jobs
MAX_LOST = 5  # starts of workers on nodes that are lost, in succession
MAX_KILLED = 5  # starts of workers that are killed, such as for want of memory
MAX_LOST_ALONE = 3  # workers that a job was alone in, each lost with its actor
# Resources of the process that other jobs may have used up: the job is tried again alone.
SHARED = re.compile(r"raised (MemoryError|OSError: \[Errno (12|24)\]|RuntimeError: can't start new thread)")
CLOSED = "the worker processes have been closed"

AnyWorker = Worker | RemoteWorker


class WorkerPool:
    """Workers are started as jobs come, at most `max_workers`, or that many on each node of the cluster."""

    def __init__(self, settings: PoolSettings) -> None:
        self.settings, self.is_serial = settings, settings.start.is_serial
        self.limit = TimeLimit(settings.limit_key, settings.limit_seconds, is_serial=self.is_serial)
        self.waiting: deque[Job] = deque()
        self.suspects: deque[list[Job]] = deque()  # each set waits for a worker without other jobs
        self.states: dict[AnyWorker, WorkerState] = {}
        self.hosts = Hosts(settings)
        self.max_workers, self._num_lost, self._num_killed = sys.maxsize, 0, 0
        self.is_closed = self._is_due = False
        self.depth = settings.concurrency  # jobs that a worker has at most
        self._mean_seconds = 0.0  # of serial jobs, of late
        self._numbers, self._tasks = itertools.count(1), set[asyncio.Task[None]]()

    def submit(self, job: Job) -> asyncio.Future[Any]:
        """The job's result; a cancelled one cancels the job.

        Raises:
            WorkersError: the pool is closed. As the result's error, also: no worker can be started.
        """
        if self.is_closed:
            raise WorkersError(CLOSED)
        job.number, job.limit_seconds = next(self._numbers), self.settings.limit_seconds
        if not self.is_serial:
            job.result.add_done_callback(lambda result: self._give_up(job) if result.cancelled() or result.exception() else None)
        if job.is_deadly:
            self.suspects.append([job])
        else:
            self.waiting.append(job)
        self._dispatch_soon()
        return job.result

    def _give_up(self, job: Job) -> None:
        """Cancel a running concurrent job that nobody waits for. A serial one ends at its limit."""
        for state in self.states.values():
            if job.number in state.jobs:
                job.reset()
                cancel(state, job)

    # ------------------------------------------------------------------------------------------------ handing out

    def _dispatch_soon(self) -> None:
        """Once in an event-loop iteration."""
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._dispatch)

    def _dispatch(self) -> None:
        """Give waiting jobs to the workers with the fewest; start workers while all have some."""
        self._is_due = is_full = False
        if self.is_closed:
            self._refuse(CLOSED)
        self._dispatch_suspects()
        usable = [state for state in self.states.values() if state.is_usable]
        while self.waiting:
            state = min(usable, key=lambda one: len(one.jobs), default=None)
            while (state is None or state.jobs) and not is_full:
                is_full = not self._start_another()
            if state is None or len(state.jobs) >= self.depth:
                return
            self._give(state, [self.waiting.popleft()])

    def _dispatch_suspects(self) -> None:
        """Give each set to an empty worker, a set of one to a worker that has run no job.

        Workers are started for the sets that are left; where none can be, empty ones are ended to make room.
        """
        for suspects in list(self.suspects):
            empty = [state for state in self.states.values() if state.is_usable and not state.jobs]
            found = next((state for state in empty if len(suspects) > 1 or not state.num_begun), None)
            if found is not None:
                self.suspects.remove(suspects)
                self._give(found, suspects, is_apart=True)
        coming = sum(not state.is_ready or bool(state.ended_by_us) for state in self.states.values())
        for _ in range(len(self.suspects) - coming):
            spare = next((state for state in self.states.values() if state.is_usable and not state.jobs), None)
            if not self._start_another() and spare is not None:
                spare.ended_by_us = "makes room"
                spare.worker.kill()

    def _give(self, state: WorkerState, jobs: list[Job], *, is_apart: bool = False) -> None:
        for job in jobs:
            if job.result.done():  # cancelled
                continue
            job.left_seconds = job.limit_seconds
            is_first, state.jobs[job.number] = not state.jobs, job
            state.num_begun, state.is_apart = state.num_begun + 1, is_apart
            state.worker.send(Begin(job.number, job.payload()))
            if is_first or not self.is_serial:
                self.limit.start_clock(state, job)

    def _start_another(self) -> bool:
        """Start a worker if one is needed and there is room."""
        starting = sum(not state.is_ready for state in self.states.values())
        is_needed = starting < len(self.waiting) + len(self.suspects)
        if not is_needed or len(self.states) >= self.max_workers or (node := self.hosts.least_loaded(self.states)) is None:
            return False
        try:
            worker = self.hosts.start(self, node)
        except OSError as error:
            self._on_failed_start(f"could not be started: {error}")
            return True
        why = f"was not ready after {START_SECONDS:g} s"
        self.states[worker] = state = WorkerState(worker)
        state.timer = worker.loop.call_later(START_SECONDS, state.end, why)
        worker.send(self.settings.start)
        if self.is_closed:  # from another thread, meanwhile
            worker.kill()
        return True

    def _on_failed_start(self, why: str, *, is_lost: bool = False, is_killed: bool = False) -> None:
        """The other workers continue; without any, all jobs are refused. A lost or killed one is tried again, maybe elsewhere."""
        problem = f"{self.settings.name} {why}"
        self._num_lost, self._num_killed = self._num_lost + is_lost, self._num_killed + is_killed
        if (is_lost and self._num_lost < MAX_LOST) or (is_killed and self._num_killed < MAX_KILLED):
            logger.warning("%s\nit is tried again", problem)
            return
        self.max_workers = len(self.states)
        if self.states:
            logger.warning("%s\nthe run continues with %d", problem, self.max_workers)
        else:
            self._refuse(problem)

    def _refuse(self, why: str) -> None:
        for job in itertools.chain(self.waiting, *self.suspects):
            if not job.result.done():
                job.result.set_exception(WorkersError(why))
        self.waiting.clear()
        self.suspects.clear()

    # ------------------------------------------------------------------------------------------------ messages

    def on_message(self, worker: Any, message: Any) -> None:
        """Called by a worker."""
        state = self.states[worker]
        if isinstance(message, Ready):
            state.stop_timer()
            state.is_ready, state.ended_by_us, self._num_lost = not message.problem, message.problem, 0
            self._dispatch_soon()
            return
        job = state.jobs.get(message.job)
        if job is None or job is state.late:
            return
        if isinstance(message, Request):
            job.stop_clock()
            task = worker.loop.create_task(self._reply(state, job, message))
            job.requests[message.number] = task
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        elif isinstance(message, Withdraw) and message.number in job.requests:
            job.requests.pop(message.number).cancel()
            if not job.requests:
                self.limit.start_clock(state, job)
        elif isinstance(message, Post):
            job.on_post(message.message)
        elif isinstance(message, HeldUp):
            self.limit.give_back(state, message)
        elif isinstance(message, Ended):
            self._on_ended(state, job, message)

    async def _reply(self, state: WorkerState, job: Job, request: Request) -> None:
        try:
            value = await job.on_request(job.number, request.message)
        except Exception as error:  # noqa: BLE001 # raised by the job's result
            if not job.result.done():
                job.result.set_exception(error)
            return
        job.requests.pop(request.number, None)
        if state.jobs.get(job.number) is job:
            state.worker.send(Reply(job.number, request.number, value))
            if not job.requests:
                self.limit.start_clock(state, job)

    def _on_ended(self, state: WorkerState, job: Job, message: Ended) -> None:
        del state.jobs[job.number]
        what = message.failure.what if message.failure is not None else ""
        if SHARED.match(what) and state.num_begun > 1 and not (self.is_serial or job.is_late or job.result.done()):
            job.reset()
            self.suspects.append([job])
        else:
            state.num_late += job.is_late
            self._finish(job, Outcome(message.value, message.failure))
        if self.is_serial:
            self._mean_seconds = max(message.seconds, 0.9 * self._mean_seconds + 0.1 * message.seconds)
            self.depth = max(1, min(MAX_AHEAD, int(AHEAD_SECONDS / max(self._mean_seconds, 1e-6))))
            if first := next(iter(state.jobs.values()), None):
                self.limit.start_clock(state, first)
        elif state.num_late >= MAX_LATE and not state.jobs:
            state.end("had too many late jobs")
        self._dispatch_soon()

    def _finish(self, job: Job, outcome: Outcome) -> None:
        job.stop_clock()
        for task in job.requests.values():  # of tasks that it left behind
            task.cancel()
        if job.is_late:
            details = outcome.failure.details if outcome.failure is not None else ""
            outcome = Outcome(None, Failure(self.limit.late_text(), details))
        if not job.result.done():
            job.finish(outcome)

    # ------------------------------------------------------------------------------------------------ the end of a worker

    def on_end(self, worker: Any, how: str, stack: str) -> None:
        """Called by a worker."""
        state = self.states.pop(worker)
        state.stop_timer()
        why = state.ended_by_us or how
        if worker.is_lost:
            self.hosts.look_again()
        if not state.is_ready and not self.is_closed:
            is_killed = why.startswith(WAS_KILLED)
            self._on_failed_start(f"{why}\n{stack}".strip(), is_lost=worker.is_lost, is_killed=is_killed)
        self._blame(state, Failure(why, stack))
        self._dispatch_soon()

    def _blame(self, state: WorkerState, failure: Failure) -> None:
        """Fail the guilty job, if it is known; put the others back into the queues."""
        for job in state.jobs.values():
            job.stop_clock()
        left = [job for job in state.jobs.values() if not job.result.done()]
        guilty = state.late if state.late in left else self._alone(state, left)
        guilty = None if self.is_closed else guilty
        others = [job for job in left if job is not guilty]
        for job in others:
            job.reset()
        if guilty is not None:
            guilty.is_deadly = True
            self._finish(guilty, Outcome(None, failure))
        likely = [state.jobs[number] for number in (state.worker.running_job()[1],) if number in state.jobs]
        options = {"is_serial": self.is_serial, "is_solved": guilty is not None, "were_suspects": state.is_apart}
        suspects, innocent = sort_out(others, likely=likely, **options)
        if suspects and not (self.is_serial or state.is_apart or self.is_closed):
            logger.warning("%s %s; %d jobs in it start again, in smaller sets", self.settings.name, failure.what, len(others))
        state.jobs.clear()
        self.suspects.extendleft(reversed(suspects))
        self.waiting.extendleft(reversed(innocent))

    def _alone(self, state: WorkerState, left: list[Job]) -> Job | None:
        """The only job that was ever in the worker. A lost worker may be the fault of its node."""
        if state.num_begun != 1 or not left:
            return None
        left[0].num_lost += state.worker.is_lost
        return left[0] if not state.worker.is_lost or left[0].num_lost >= MAX_LOST_ALONE else None

    def close(self) -> None:
        """End all workers. From any thread, more than once."""
        self.is_closed = True
        remote = [worker for worker in list(self.states) if isinstance(worker, RemoteWorker)]
        for worker in remote:
            worker.kill()
        self.hosts.close()
        for worker in remote:
            worker.join()
