"""The processes that episodes run in, as the trainer holds them: who runs where, limits on time, and who is to blame for an end.

Hundreds run side by side in a process. The time of an episode counts while it does not wait for the model; where another one
holds the process up meanwhile, it gets that time back. One that does not end at its limit is ended with its process. Where a
process dies, those in it are suspects: they begin again in new processes, in smaller sets, and fail only where they were alone
(rewards/suspects.py). What they had sampled is kept and answers their turns again, as long as they ask the same. Used in one
event loop, but for `close`. Leaves out what a failure means for the run, and how a turn is sampled (rollouts/).

    ended = await pool.run(task, ask)        # ask: the tokens of a turn
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import re
import sys
import time
from collections import deque
from typing import Any

import numpy as np

from megasync.config.schema import Config
from megasync.episodes.record import History
from megasync.episodes.remote import EpisodeProcess, Places, RemoteProcess
from megasync.episodes.running import MOST_LATE, AskFunction, ProcessState, Running
from megasync.episodes.segments import Turn
from megasync.episodes.task import EpisodeLimitError, Task
from megasync.episodes.wire import Anew, Answered, Ask, Begin, Cancel, Drop, Ended, Held, Settings, Told
from megasync.rewards.suspects import divide, hand_out
from megasync.rewards.wire import Failure, Ready

logger = logging.getLogger(__name__)

START_SECONDS = 120.0  # for a process to import the episode and the tokenizer
GRACE_SECONDS = 1.5  # from an episode's cancellation to its end; its process is killed where it does not come
HELD_SECONDS = 1.0  # a process that shows no step for longer is held up; more than program.TICK_SECONDS and less than the grace
MOST_LOST = 5  # starts of processes on nodes that are gone then, one after another
MOST_LOST_ALONE = 3  # processes that an episode was alone in, each lost with its actor
# Limits of the process that others may have used up: tried again alone.
SHARED = re.compile(r"raised (MemoryError|OSError: \[Errno (12|24)\]|RuntimeError: can't start new thread)")
LIMIT_KEY = "rollout.episode_timeout_seconds"
CLOSED = "the processes of episodes have been closed"


class EpisodeError(RuntimeError):
    """Episodes cannot be played."""


Process = EpisodeProcess | RemoteProcess


class EpisodePool:
    """At most `rollout.episode_processes` processes, or so many on each node, started as episodes come."""

    def __init__(self, config: Config) -> None:
        self.config, self.rollout = config, config.rollout
        own = config.rollout
        limits = own.episode_memory_bytes, own.episode_open_files
        self.settings = Settings(config.model.path, config.data, *limits, own.episode_concurrency)
        self.waiting: deque[Running] = deque()
        self.suspects: deque[list[Running]] = deque()  # sets that wait for a process of their own
        self.processes: dict[Process, ProcessState] = {}
        self.places = Places(config.rollout)
        self.most_processes, self.is_closed, self._number, self._num_lost = sys.maxsize, False, 0, 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(
        self, task: Task, ask: AskFunction, history: History | None = None
    ) -> tuple[Ended, list[tuple[Any, Turn]]]:
        """How the episode ended, and the turns that are trained, each with its prompt, in their order.

        It goes on from `history`, which grows as it does.

        Raises:
            EpisodeError: no process can be started, or `close` was called.
        """
        if self.is_closed:
            raise EpisodeError(CLOSED)
        ended, limit = asyncio.get_running_loop().create_future(), self.rollout.episode_timeout_seconds
        running = Running(self._number, task, ask, ended, limit, history=history or History())
        running.former, running.of_checkpoint = dict(running.history.turns), frozenset(running.history.turns)
        self._number += 1
        if running.history.is_deadly:
            self.suspects.append([running])
        else:
            self.waiting.append(running)
        self._dispatch()
        try:
            return await running.ended
        finally:
            if not running.ended.done() or running.ended.cancelled():
                self._give_up(running)

    def _give_up(self, running: Running) -> None:
        """Nobody waits for it any more."""
        running.begin_anew()
        if running in self.waiting:
            self.waiting.remove(running)
        rest = [[one for one in each if one is not running] for each in self.suspects]
        self.suspects = deque(filter(None, rest))
        for process, state in self.processes.items():
            if running.number in state.episodes:
                self._cancel(process, state, running)

    # ------------------------------------------------------------------------------------------------ handing out

    def _dispatch(self) -> None:
        """To the processes with the fewest; more are started while all have some."""
        if self.is_closed:
            self._refuse(CLOSED)
        hand_out(self.suspects, self.processes, self._begin_apart, self._start_another)
        usable = [(process, state) for process, state in self.processes.items() if state.is_usable]
        while self.waiting:
            process, state = min(usable, key=lambda each: len(each[1].episodes), default=(None, None))
            while (state is None or state.episodes) and self._start_another():
                pass
            if process is None or state is None or len(state.episodes) >= self.rollout.episode_concurrency:
                return
            self._begin(process, state, self.waiting.popleft())

    def _begin_apart(self, process: Process, suspects: list[Running]) -> None:
        for running in suspects:
            self._begin(process, self.processes[process], running, is_apart=True)

    def _begin(self, process: Process, state: ProcessState, running: Running, *, is_apart: bool = False) -> None:
        running.left_seconds = running.limit_seconds
        state.episodes[running.number] = running
        state.num_begun, state.is_apart = state.num_begun + 1, is_apart
        process.send(Begin(running.number, running.task, dict(running.history.answers), running.history.state))
        self._start_clock(process, state, running)

    def _start_another(self) -> bool:
        """Where there is room for a process, and one is needed."""
        starting = sum(not state.is_ready for state in self.processes.values())
        is_needed = starting < len(self.waiting) + len(self.suspects)
        if not is_needed or len(self.processes) >= self.most_processes or (node := self.places.room(self.processes)) is None:
            return False
        self._start(node)
        return True

    def _start(self, node: str) -> None:
        try:
            process = self.places.start(self, node)
        except OSError as error:
            self._note_failed_start(f"could not be started: {error}")
            return
        why = f"was not ready after {START_SECONDS:g} s"
        self.processes[process] = ProcessState(process.loop.call_later(START_SECONDS, self._end, process, why))
        process.send(self.settings)

    def _note_failed_start(self, why: str, *, is_lost: bool = False) -> None:
        """The others go on; without any nothing can be played. A lost one is tried again, now and then on another node."""
        problem = f"rollout.episode: a process for episodes {why}"
        self._num_lost += is_lost
        if is_lost and self._num_lost < MOST_LOST:
            logger.warning("%s\nit is tried again", problem)
            return
        self.most_processes = len(self.processes)
        if self.processes:
            logger.warning("%s\nit goes on with %d", problem, self.most_processes)
        else:
            self._refuse(problem)

    def _refuse(self, why: str) -> None:
        for running in itertools.chain(self.waiting, *self.suspects):
            if not running.ended.done():
                running.ended.set_exception(EpisodeError(why))
        self.waiting.clear()
        self.suspects.clear()

    # ------------------------------------------------------------------------------------------------ time

    def _start_clock(self, process: Process, state: ProcessState, running: Running) -> None:
        running.stop()
        running.since = time.monotonic()
        running.timer = process.loop.call_later(max(0.0, running.left_seconds), self._run_out, process, state, running)

    def _run_out(self, process: Process, state: ProcessState, running: Running) -> None:
        """Of time; but what another one holds up is not late."""
        running.stop()
        held, holder = self._held(process, since=running.since)
        if held > HELD_SECONDS and holder != running.number:
            running.left_seconds = held
            self._start_clock(process, state, running)
            if held > running.limit_seconds / 2:
                self._end(process, f"took longer than {LIMIT_KEY} = {running.limit_seconds:g}, and held its process up")
            return
        running.is_late = True
        self._cancel(process, state, running)

    def _give_back(self, process: Process, state: ProcessState, held: Held) -> None:
        """To those that an episode has held up."""
        for other in [one for one in state.episodes.values() if one.timer is not None and one.number != held.number]:
            seconds = min(held.seconds, time.monotonic() - other.since)
            other.stop()
            other.left_seconds += seconds
            self._start_clock(process, state, other)

    def _held(self, process: Process, since: float = 0.0) -> tuple[float, int]:
        """For how long the process has shown no step, and the number of the episode whose step it is in; -1: of none."""
        begin, noted = process.begun()
        return time.monotonic() - max(begin, since), noted - 1

    def _cancel(self, process: Process, state: ProcessState, running: Running) -> None:
        process.send(Cancel(running.number))
        process.loop.call_later(GRACE_SECONDS, self._kill_with, process, state, running)

    def _kill_with(self, process: Process, state: ProcessState, running: Running) -> None:
        """The process of an episode that should have ended. Where nobody holds it up, that one is known to be the cause."""
        if state.episodes.get(running.number) is not running or process not in self.processes or state.ended_by_us:
            return
        held, holder = self._held(process)
        other = state.episodes.get(holder)
        if held > HELD_SECONDS and holder != running.number and held < running.limit_seconds and not (other and other.is_late):
            process.loop.call_later(held, self._kill_with, process, state, running)  # until that one is late itself
            return
        state.late = running if held <= HELD_SECONDS else None
        self._end(process, "did not end when it was cancelled")

    def _end(self, process: Process, why: str) -> None:
        state = self.processes[process]
        state.ended_by_us = state.ended_by_us or why
        process.kill_with_stack()

    # ------------------------------------------------------------------------------------------------ what comes back

    def on_message(self, process: Any, message: Any) -> None:
        """Of a process."""
        state = self.processes[process]
        if isinstance(message, Ready):
            state.timer.cancel()
            state.is_ready, state.ended_by_us, self._num_lost = not message.problem, message.problem, 0
            self._dispatch()
            return
        running = state.episodes.get(message.number)
        if running is None:
            return
        if isinstance(message, Ask):
            running.stop()
            task = process.loop.create_task(self._answer(process, state, running, message))
            running.asking[message.turn] = task
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        elif isinstance(message, Drop) and message.turn in running.asking:
            running.asking.pop(message.turn).cancel()
            if not running.asking:
                self._start_clock(process, state, running)
        elif isinstance(message, Answered):
            running.history.keep_answer(message.place, message.answer, message.state, is_other=message.is_other)
        elif isinstance(message, Held):
            self._give_back(process, state, message)
        elif isinstance(message, Anew):
            running.former, running.turns = {}, {}
            running.history.forget()
        elif isinstance(message, Ended):
            self._on_ended(process, state, running, message)

    def _on_ended(self, process: Process, state: ProcessState, running: Running, message: Ended) -> None:
        what = message.failure.what if message.failure is not None else ""
        if SHARED.match(what) and state.num_begun > 1 and not running.is_late and not running.ended.done():
            del state.episodes[running.number]
            running.begin_anew()
            self.suspects.append([running])
        else:
            self._finish(state, running, message)
        if state.num_late >= MOST_LATE and not state.episodes:
            self._end(process, "had too many episodes that were late")
        self._dispatch()

    async def _answer(self, process: Process, state: ProcessState, running: Running, asked: Ask) -> None:
        """From what it had sampled before its process died, where it asks the same, else anew."""
        former = running.former.pop(asked.turn, None)
        try:
            if former is not None and np.array_equal(former[0], asked.prompt_ids):
                turn = former[1]
                running.history.resumed |= running.of_checkpoint & {asked.turn}
            else:
                if former is not None:
                    running.former, running.history.is_anew = {}, running.history.is_anew or asked.turn in running.of_checkpoint
                turn = await running.ask(asked)
            told = Told(asked.number, asked.turn, turn.token_ids, turn.log_probs, turn.weight_versions, turn.finish_reason)
            running.turns[asked.turn] = running.history.turns[asked.turn] = asked.prompt_ids, turn
        except EpisodeLimitError as error:
            told = Told(asked.number, asked.turn, limit=str(error))
        except ValueError as error:
            told = Told(asked.number, asked.turn, problem=str(error))
        except asyncio.CancelledError:
            raise
        except Exception as error:  # noqa: BLE001 # who waits for the episode has to hear of it
            if not running.ended.done():
                running.ended.set_exception(error)
            return
        running.asking.pop(asked.turn, None)
        if state.episodes.get(running.number) is running:
            process.send(told)
            if not running.asking:
                self._start_clock(process, state, running)

    def _finish(self, state: ProcessState, running: Running, message: Ended) -> None:
        running.stop()
        for task in running.asking.values():  # those of tasks that it left behind
            task.cancel()
        del state.episodes[running.number]
        if running.is_late:
            state.num_late += 1
            late = f"took longer than {LIMIT_KEY} = {running.limit_seconds:g}, without the model's time"
            details = message.failure.details if message.failure is not None else ""
            message = Ended(running.number, failure=Failure(late, details))
        if not running.ended.done():
            own = running.limit_seconds - running.left_seconds
            tool = own if message.tool_seconds is None else message.tool_seconds
            message = message._replace(own_seconds=own, tool_seconds=tool)
            running.ended.set_result((message, [running.turns[number] for number in message.kept]))

    def on_end(self, process: Any, how: str, stack: str) -> None:
        """Of a process."""
        state = self.processes.pop(process)
        state.timer.cancel()
        why, left = state.ended_by_us or how, [one for one in state.episodes.values() if not one.ended.done()]
        guilty = state.late if state.late in left else self._alone(process, state, left)
        if process.is_lost:
            self.places.look_again()
        if not state.is_ready:
            self._note_failed_start(f"{why}\n{stack}".strip(), is_lost=process.is_lost)
        others = [one for one in left if one is not guilty]
        if others and not state.is_apart:
            logger.warning("a process of episodes %s; %d that were in it start again, in smaller sets", why, len(others))
        likely = [state.episodes[number] for number in (process.begun()[1] - 1,) if number in state.episodes]
        if guilty is not None:
            guilty.history.is_deadly = True
            self._finish(state, guilty, Ended(guilty.number, failure=Failure(why, stack)))
        for running in others:
            running.begin_anew()
        if guilty is None:
            self.suspects.extendleft(reversed(divide(others, likely)))
        elif state.is_apart and others:  # suspects of an earlier end
            self.suspects.appendleft(others)
        else:
            self.waiting.extendleft(reversed(others))
        self._dispatch()

    def _alone(self, process: Process, state: ProcessState, left: list[Running]) -> Running | None:
        """Whom nobody else can have ended the process for; one that is lost may be so through its node."""
        if state.num_begun != 1 or not left:
            return None
        left[0].num_lost += process.is_lost
        return left[0] if not process.is_lost or left[0].num_lost >= MOST_LOST_ALONE else None

    def close(self) -> None:
        """End all processes. From any thread, more than once."""
        self.is_closed = True
        for process in list(self.processes):
            process.kill()
            process.join()
