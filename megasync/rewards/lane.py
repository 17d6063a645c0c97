"""Some reward processes and the calls that wait for them: who gets which, time limits, and whom to blame for a process's end.

Calls are answered in turn or side by side (async functions). The process notes which call it works on and since when. In turn
that one is to blame where it is late, and is a suspect where the process dies, which a former call may have prepared; those
behind it go to another process. Side by side all are suspects. Suspects are called again in smaller sets, and one fails where a
process had no other call (suspects.py). Leaves out what a failure means for the run (pool.py).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from megasync.config.schema import RolloutConfig
from megasync.rewards.process import RewardProcess
from megasync.rewards.resolve import Reward
from megasync.rewards.suspects import divide, hand_out
from megasync.rewards.wire import Answers, Call, Failure, Ready, RewardError, Work

logger = logging.getLogger(__name__)

START_SECONDS = 120.0  # for a process to import the functions
ASYNC_GRACE_SECONDS = 1.0  # an async function is cancelled at its limit; its process is killed where that does not help
AHEAD_SECONDS = 0.02  # of work that a process has before it; calls that take longer wait until a process is free
MAX_AHEAD = 64  # calls
LIMIT_KEY = "rollout.reward_timeout_seconds"
CLOSED = "the processes of rewards have been closed"


@dataclass(eq=False, slots=True)
class Pending:
    """A call that has no answer yet."""

    reward: Reward
    call: Call
    values: asyncio.Future[list[float]]
    failed: bool = False
    given_seconds: float = 0.0  # time.monotonic() when a process got it


@dataclass
class _State:
    """Of a process."""

    timer: asyncio.TimerHandle  # for its start, then for its calls
    is_ready: bool = False
    ended_by_us: str = ""  # why
    late: int = 0  # the call that it is ended for
    num_begun: int = 0  # calls, all its life
    is_apart: bool = False  # its calls are suspects: no others join them
    calls: dict[int, Pending] = field(default_factory=dict)  # the oldest first

    @property
    def is_empty(self) -> bool:
        return not self.calls

    @property
    def is_usable(self) -> bool:
        return self.is_ready and not self.ended_by_us and not (self.is_apart and self.calls)


class Lane:
    """At most `rollout.reward_processes` processes, started as calls come. Used in one event loop, except `close`."""

    def __init__(
        self, names: list[str], rollout: RolloutConfig, fail: Callable[[Pending, Failure], None], *, is_serial: bool
    ) -> None:
        """`is_serial`: calls are answered in turn, else side by side."""
        self.names, self.rollout, self.fail, self.is_serial = names, rollout, fail, is_serial
        self.waiting: deque[Pending] = deque()
        self.suspects: deque[list[Pending]] = deque()  # sets that wait for a process without other calls
        self.processes: dict[RewardProcess, _State] = {}
        self.most_processes = rollout.reward_processes
        self.depth = 1 if is_serial else rollout.reward_concurrency  # calls that a process has at most
        self.call_seconds = 0.0  # about, and of late
        self.is_due = self.is_closed = False

    # ------------------------------------------------------------------------------------------------ handing out

    def add(self, calls: Sequence[Pending]) -> None:
        """RewardError after `close`."""
        if self.is_closed:
            raise RewardError(CLOSED)
        self.waiting.extend(calls)
        if not self.is_due:  # what is added before the loop comes round is handed out together
            self.is_due = True
            asyncio.get_running_loop().call_soon(self._dispatch)

    def _dispatch(self) -> None:
        """Hand out what waits, to the processes with the least to do; start more while there are too few."""
        self.is_due = False
        if self.is_closed:
            self._refuse(CLOSED)
        hand_out(self.suspects, self.processes, partial(self._give, is_apart=True), self._start_another)
        usable = [(process, state) for process, state in self.processes.items() if state.is_usable]
        while self.waiting:
            process, state = min(usable, key=lambda each: len(each[1].calls), default=(None, None))
            while (state is None or state.calls) and self._start_another():
                pass
            if process is None or state is None or len(state.calls) >= self.depth:
                return
            share = min(-(-len(self.waiting) // len(usable)), self.depth - len(state.calls))
            self._give(process, [self.waiting.popleft() for _ in range(share)])

    def _start_another(self) -> bool:
        """Where there is room for a process, and one is needed."""
        starting = sum(not state.is_ready for state in self.processes.values())
        if len(self.processes) >= self.most_processes or starting >= len(self.waiting) + len(self.suspects):
            return False
        self._start()
        return True

    def _start(self) -> None:
        try:
            process = RewardProcess(self, self.names, self.rollout.reward_timeout_seconds)
        except OSError as error:
            self._note_failed_start(f"could not be started: {error}")
            return
        why = f"was not ready after {START_SECONDS:g} s"
        self.processes[process] = _State(process.loop.call_later(START_SECONDS, self._end, process, why))
        if self.is_closed:  # from another thread, meanwhile
            process.kill()

    def _note_failed_start(self, why: str) -> None:
        """The others go on, those that are starting included; without any nothing can be scored."""
        problem = f"rollout.reward: a process for rewards {why}"
        if self.processes:
            self.most_processes = len(self.processes)
            logger.warning("%s\nit goes on with %d", problem, self.most_processes)
        else:
            self._refuse(problem)

    def _give(self, process: RewardProcess, calls: Sequence[Pending], *, is_apart: bool = False) -> None:
        """These, in one message."""
        state = self.processes[process]
        was_idle, now = not state.calls, time.monotonic()
        given = [pending for pending in calls if not pending.values.done()]  # else nobody waits for it any more
        for pending in given:
            state.calls[pending.call.number], pending.given_seconds = pending, now
        state.num_begun, state.is_apart = state.num_begun + len(given), is_apart
        if given:
            process.send(Work([pending.call for pending in given], is_serial=self.is_serial))
        if given and was_idle:
            self._watch(process, state)

    def _watch(self, process: RewardProcess, state: _State) -> None:
        """End it where a call takes too long, else look again when one may. In turn, time counts from a call's own begin; side by
        side an async function ends at its limit by itself, unless something holds the process up.
        """
        state.timer.cancel()
        if not state.calls or state.ended_by_us:
            return
        begin, number = process.begun() if self.is_serial else (0.0, 0)
        pending = state.calls.get(number) or next(iter(state.calls.values()))
        seconds = self.rollout.reward_timeout_seconds
        limit = seconds + ASYNC_GRACE_SECONDS * pending.reward.is_async
        left = max(begin, pending.given_seconds) + limit - time.monotonic()
        if left > 0:
            state.timer = process.loop.call_later(left, self._watch, process, state)
        else:
            state.late = pending.call.number
            self._end(process, f"took longer than {LIMIT_KEY} = {seconds:g}, and its process was killed")

    # ------------------------------------------------------------------------------------------------ what comes back

    def on_message(self, process: RewardProcess, message: Any) -> None:
        """Of RewardProcess."""
        state = self.processes[process]
        if isinstance(message, Ready):
            state.timer.cancel()
            state.is_ready, state.ended_by_us = not message.problem, message.problem
        elif isinstance(message, Answers):
            self._take_in(state, message)
        self._dispatch()

    def _take_in(self, state: _State, message: Answers) -> None:
        if self.is_serial:
            mean = message.seconds / len(message.answers)
            self.call_seconds = max(mean, 0.9 * self.call_seconds + 0.1 * mean)
            self.depth = max(1, min(MAX_AHEAD, int(AHEAD_SECONDS / max(self.call_seconds, 1e-6))))
        for answer in message.answers:
            if answer.number != state.late:
                pending = state.calls.pop(answer.number)
                if not pending.values.done():
                    self.fail(pending, answer.failure) if answer.failure else pending.values.set_result(answer.values)

    def _end(self, process: RewardProcess, why: str) -> None:
        state = self.processes[process]
        state.ended_by_us = state.ended_by_us or why
        process.kill_with_stack()

    def on_end(self, process: RewardProcess, how: str, stack: str) -> None:
        """Of RewardProcess."""
        state = self.processes.pop(process)
        state.timer.cancel()
        calls, why = list(state.calls.values()), state.ended_by_us or how
        if self.is_closed:
            self._refuse(CLOSED, calls)
        elif not state.is_ready:
            self._note_failed_start(f"{why}\n{stack}".strip())
        elif calls:
            self._judge(state, process.begun()[1], calls, Failure(why, stack))
        self._dispatch()

    def _judge(self, state: _State, noted: int, calls: list[Pending], failure: Failure) -> None:
        """`calls`: those without an answer in a process that has ended, while it worked on the `noted` one."""
        late, working = state.calls.get(state.late), state.calls.get(noted)
        guilty = late if self.is_serial and late else calls[0] if state.num_begun == 1 else None
        if guilty is not None:
            self.waiting.extendleft(pending for pending in reversed(calls) if pending is not guilty)
            if not guilty.values.done():
                self.fail(guilty, failure)
        elif self.is_serial and working:
            self.suspects.appendleft([working])
            self.waiting.extendleft(pending for pending in reversed(calls) if pending is not working)
        else:
            if not state.is_apart:
                told = "a process for rewards %s; %d calls in it are made again, in smaller sets"
                logger.warning(told, failure.what, len(calls))
            self.suspects.extendleft(reversed(divide(calls, [one for one in (working or late,) if one])))

    def _refuse(self, why: str, calls: Sequence[Pending] = ()) -> None:
        """These and all that wait."""
        for pending in itertools.chain(calls, self.waiting, *self.suspects):
            if not pending.values.done():
                pending.values.set_exception(RewardError(why))
        self.waiting.clear()
        self.suspects.clear()

    def close(self) -> list[RewardProcess]:
        """The processes, which end now. From any thread."""
        self.is_closed = True
        processes = list(self.processes)
        for process in processes:
            process.kill()
        return processes
