"""Some reward processes and the calls that wait for them: who gets which, time limits, and whom to blame for a process's end.

Calls are answered in turn or side by side. In turn: the process works on the oldest call that it has, which is the one to blame
where it is late or dies; those after it go to another process. Side by side (async functions): where the process dies with
several calls in it nobody can be blamed, and each is made again in turn. Leaves out what a failure means for the run (pool.py).
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from megasync.rollouts.rewards.failure import RewardError
from megasync.rollouts.rewards.process import RewardProcess
from megasync.rollouts.rewards.resolve import Reward
from megasync.rollouts.rewards.wire import Answer, Call, Failure, Ready

if TYPE_CHECKING:
    from megasync.config.schema import RolloutConfig

logger = logging.getLogger(__name__)

START_SECONDS = 120.0  # for a process to import the functions
ASYNC_GRACE_SECONDS = 1.0  # an async function is cancelled at its limit; its process is killed where that does not help
AHEAD_SECONDS = 0.02  # of work that a process has before it; calls that take longer wait until a process is free
MOST_AHEAD = 64  # calls
LIMIT_KEY = "rollout.reward_timeout_seconds"
CLOSED = "the processes of rewards have been closed"


@dataclass(eq=False, slots=True)
class Pending:
    """A call that has no answer yet."""

    reward: Reward
    call: Call
    values: asyncio.Future[list[float]]
    failed: bool = False
    limit: asyncio.TimerHandle | None = None


@dataclass
class _State:
    """Of a process."""

    start_limit: asyncio.TimerHandle
    is_ready: bool = False
    ended_by_us: str = ""  # why
    calls: dict[int, Pending] = field(default_factory=dict)  # the oldest first


class Lane:
    """At most `rollout.reward_processes` processes, started as calls come. Used in one event loop, except `close`."""

    def __init__(
        self, names: list[str], rollout: RolloutConfig, fail: Callable[[Pending, Failure], None], then: Lane | None = None
    ) -> None:
        """Calls are answered side by side where `then`, a lane in turn, is there to repeat them."""
        self.names, self.rollout, self.fail, self.then = names, rollout, fail, then
        self.waiting: deque[Pending] = deque()
        self.processes: dict[RewardProcess, _State] = {}
        self.depth = rollout.reward_concurrency if then else 1  # calls that a process has at most
        self.call_seconds = 0.0  # about, and of late
        self.is_closed = False

    # ------------------------------------------------------------------------------------------------ handing out

    def add(self, calls: Sequence[Pending]) -> None:
        """RewardError after `close`."""
        if self.is_closed:
            raise RewardError(CLOSED)
        self.waiting.extend(calls)
        self._dispatch()

    def _dispatch(self) -> None:
        """Hand out what waits, to the processes with the least to do; start more while there are too few."""
        usable = [(process, state) for process, state in self.processes.items() if state.is_ready and not state.ended_by_us]
        while self.waiting and not self.is_closed:
            if self.waiting[0].values.done():  # nobody waits for it any more
                self.waiting.popleft()
                continue
            process, state = min(usable, key=lambda each: len(each[1].calls), default=(None, None))
            if (state is None or state.calls) and self._may_start():
                self._start()
            if process is None or state is None or len(state.calls) >= self.depth:
                return
            self._give(process, state, self.waiting.popleft())

    def _may_start(self) -> bool:
        starting = sum(not state.is_ready for state in self.processes.values())
        return len(self.processes) < self.rollout.reward_processes and starting < len(self.waiting)

    def _start(self) -> None:
        process = RewardProcess(self, self.names, self.rollout.reward_timeout_seconds)
        why = f"was not ready after {START_SECONDS:g} s"
        self.processes[process] = _State(process.loop.call_later(START_SECONDS, self._end, process, why))
        if self.is_closed:  # from another thread, meanwhile
            process.kill()

    def _give(self, process: RewardProcess, state: _State, pending: Pending) -> None:
        state.calls[pending.call.number] = pending
        process.send(pending.call._replace(in_turn=self.then is None))
        if self.then or len(state.calls) == 1:
            self._limit(process, pending)

    def _limit(self, process: RewardProcess, pending: Pending) -> None:
        """The call begins now."""
        seconds = self.rollout.reward_timeout_seconds
        why = f"took longer than {LIMIT_KEY} = {seconds:g}, and its process was killed"
        limit = seconds + ASYNC_GRACE_SECONDS * pending.reward.is_async
        pending.limit = process.loop.call_later(limit, self._end, process, why)

    # ------------------------------------------------------------------------------------------------ what comes back

    def on_message(self, process: RewardProcess, message: Any) -> None:
        """Process's Owner."""
        state = self.processes[process]
        if isinstance(message, Ready):
            state.start_limit.cancel()
            state.is_ready, state.ended_by_us = not message.problem, message.problem
        elif isinstance(message, Answer):
            self._answer(process, state, message)
        self._dispatch()

    def _answer(self, process: RewardProcess, state: _State, answer: Answer) -> None:
        pending = state.calls.pop(answer.number)
        _cancel(pending.limit)
        if self.then is None:
            self.call_seconds = max(answer.seconds, 0.9 * self.call_seconds + 0.1 * answer.seconds)
            self.depth = max(1, min(MOST_AHEAD, int(AHEAD_SECONDS / max(self.call_seconds, 1e-6))))
            for following in list(state.calls.values())[:1]:
                self._limit(process, following)
        if not pending.values.done():
            self.fail(pending, answer.failure) if answer.failure else pending.values.set_result(answer.values)

    def _end(self, process: RewardProcess, why: str) -> None:
        state = self.processes[process]
        state.ended_by_us = state.ended_by_us or why
        process.kill_with_stack()

    def on_end(self, process: RewardProcess, how: str, stack: str) -> None:
        """Process's Owner."""
        state = self.processes.pop(process)
        calls, why = list(state.calls.values()), state.ended_by_us or how
        for handle in (state.start_limit, *(pending.limit for pending in calls)):
            _cancel(handle)
        if self.is_closed:
            self._refuse([*calls, *self.waiting], CLOSED)
        elif not state.is_ready:
            self._refuse(self.waiting, f"rollout.reward: a process for rewards {why}\n{stack}".strip())
        elif self.then and len(calls) > 1:
            logger.warning("a process for rewards %s, with %d calls in it; each is made again in turn", why, len(calls))
            self.then.add(calls)
        elif calls:
            self.waiting.extendleft(reversed(calls[1:]))
            if not calls[0].values.done():
                self.fail(calls[0], Failure(why, stack))
        self._dispatch()

    def _refuse(self, calls: Iterable[Pending], why: str) -> None:
        for pending in calls:
            if not pending.values.done():
                pending.values.set_exception(RewardError(why))

    def close(self) -> list[RewardProcess]:
        """The processes, which end now. From any thread."""
        self.is_closed = True
        processes = list(self.processes)
        for process in processes:
            process.kill()
        return processes


def _cancel(handle: asyncio.TimerHandle | None) -> None:
    if handle is not None:
        handle.cancel()
