"""The program of one reward process: imports the functions, then answers calls until the trainer hangs up or dies.

A plain function runs in the main thread, one call after the other, with no event loop around it, so that signals and
`asyncio.run` work in it; an `async def` one runs in the process's event loop beside others. Leaves out the end of a call that
hangs, which is the trainer's. No torch in here. process.py starts it.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import importlib
import inspect
import math
import os
import pickle
import reprlib
import signal
import socket
import time
import traceback
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

from megasync.examples import tasks
from megasync.launch.processes import end_with_parent
from megasync.rewards.resolve import Reward, resolve_rewards
from megasync.rewards.wire import BEGUN, LENGTH, Answer, Answers, Call, Failure, Ready, Setup, Work, pack

TRACEBACK_CHARACTERS = 8000
MAX_UNSENT_SECONDS = 0.02  # an answer does not wait longer for the others of its message
OOM_SCORE = "500"  # of 1000: when memory runs out, the system ends this process before the trainer


class BadValueError(Exception):
    """What a reward returned is no finite number, or not one for each sample."""


def main(fields: list[Any]) -> None:
    """`fields` are those of a Setup."""
    setup = Setup(*fields)
    if (connection := begin(setup)) is None:
        return
    try:
        rewards = resolve_rewards(dict.fromkeys(setup.names, 1.0))
        if "math_verify" in setup.names:
            importlib.import_module("math_verify")  # takes a second, which no sample's time limit should pay for
        if "reasoning_gym" in setup.names:
            tasks.reasoning_gym()  # is fetched where it is not there yet
    except BaseException as error:  # noqa: BLE001 # told below
        connection.sendall(pack(Ready(text_of(error))))
        return
    Program(connection, rewards, setup).run()


def begin(setup: Setup) -> socket.socket | None:
    """The connection to the trainer, once this process ends with it and writes its stack when asked to; None: it is gone."""
    end_with_parent(signal.SIGKILL)
    if os.getppid() != setup.parent:
        return None
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(OOM_SCORE)
    connection = socket.socket(fileno=setup.socket)
    for descriptor in (setup.socket, setup.notes):
        os.set_inheritable(descriptor, False)
    os.lseek(setup.notes, BEGUN.size, os.SEEK_SET)
    faulthandler.enable(setup.notes, all_threads=False)
    faulthandler.register(signal.SIGUSR1, setup.notes, all_threads=False)
    return connection


def note(notes: int, number: int) -> None:
    """That the call of this number is worked on from now on; 0: none is."""
    os.pwrite(notes, BEGUN.pack(time.monotonic(), number), 0)


@contextlib.contextmanager
def noted(notes: int, number: int) -> Iterator[None]:
    """That the block is of this number."""
    note(notes, number)
    try:
        yield
    finally:
        note(notes, 0)


class Steps:
    """Awaits a coroutine, each of whose steps from one wait to the next is run in `around`."""

    def __init__(self, coroutine: Any, around: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
        self.coroutine, self.around = coroutine, around

    def __await__(self) -> Generator[Any, Any, Any]:
        send, throw = self.coroutine.send, self.coroutine.throw
        step, value = send, None
        while True:
            try:
                with self.around():
                    waits_for = step(value)
            except StopIteration as end:
                return end.value
            try:
                value, step = (yield waits_for), send
            except BaseException as error:  # noqa: BLE001 # handed on
                value, step = error, throw


class Program:
    """Reads calls and answers them."""

    def __init__(self, connection: socket.socket, rewards: list[Reward], setup: Setup) -> None:
        self.connection, self.rewards = connection, rewards
        self.notes, self.limit_seconds = setup.notes, setup.limit_seconds
        self.loop = asyncio.new_event_loop()
        self.tasks: set[asyncio.Task[None]] = set()
        self.answers: list[Answer] = []  # that are not sent yet

    def run(self) -> None:
        """Until the trainer hangs up."""
        self.reader, self.writer = self.loop.run_until_complete(asyncio.open_unix_connection(sock=self.connection))
        self.writer.write(pack(Ready()))
        while (calls := self.loop.run_until_complete(self._next_in_turn())) is not None:
            sent = time.monotonic()
            for call in calls:
                note(self.notes, call.number)
                self.answers.append(self._answer(call))
                seconds = time.monotonic() - sent
                if call is calls[-1] or seconds > MAX_UNSENT_SECONDS:
                    self._send(seconds)
                    sent += seconds

    async def _next_in_turn(self) -> list[Call] | None:
        """The next calls that are answered in turn; those beside are answered meanwhile. None: the trainer has hung up."""
        while (work := await self._read()) is not None and not work.is_serial:
            for call in work.calls:
                task = self.loop.create_task(self._answer_beside(call))
                self.tasks.add(task)
                task.add_done_callback(self.tasks.discard)
        return work and work.calls

    async def _answer_beside(self, call: Call) -> None:
        answer = await self._answer_async(call)
        if not self.answers:  # what others answer before the loop comes round goes with it
            self.loop.call_soon(self._send)
        self.answers.append(answer)

    def _send(self, seconds: float = 0.0) -> None:
        self.writer.write(pack(Answers(self.answers, seconds)))
        self.answers = []

    async def _read(self) -> Work | None:
        try:
            header = await self.reader.readexactly(LENGTH.size)
            work: Work = pickle.loads(await self.reader.readexactly(*LENGTH.unpack(header)))  # noqa: S301 # the trainer's
        except (asyncio.IncompleteReadError, ConnectionError):
            return None
        return work

    def _answer(self, call: Call) -> Answer:
        reward = self.rewards[call.reward]
        try:
            value = reward.function(call.samples if reward.takes_list else call.samples[0])
            if inspect.isawaitable(value):  # of a function that does not look like an async one
                value = asyncio.run(_wait(value))
            return Answer(call.number, numbers(value, reward, len(call.samples)))
        except BaseException as error:  # noqa: BLE001 # the user's, told to the trainer
            return Answer(call.number, [], failure_of(error))

    async def _answer_async(self, call: Call) -> Answer:
        reward, limit = self.rewards[call.reward], asyncio.timeout(self.limit_seconds)
        try:
            async with limit:
                given = reward.function(call.samples if reward.takes_list else call.samples[0])
                value = await Steps(given, lambda: noted(self.notes, call.number))
            return Answer(call.number, numbers(value, reward, len(call.samples)))
        except BaseException as error:  # noqa: BLE001 # the user's, told to the trainer
            late = f"took longer than rollout.reward_timeout_seconds = {self.limit_seconds:g}"
            failure = Failure(late, _traceback(error.__cause__ or error)) if limit.expired() else failure_of(error)
            return Answer(call.number, [], failure)


def numbers(value: Any, reward: Reward, num_samples: int) -> list[float]:
    """What a reward returned, as one finite number a sample.

    Raises:
        BadValueError: it is something else.
    """
    if not reward.takes_list:
        return [_number(value)]
    try:
        values = None if isinstance(value, str | bytes | dict) else list(value)
    except TypeError:
        values = None
    if values is None or len(values) != num_samples:
        held = f"{len(values)} values" if values is not None else reprlib.repr(value)
        raise BadValueError(f"returned {held}, a list of {num_samples} numbers is expected")
    return [_number(each) for each in values]


def _number(value: Any) -> float:
    try:
        number = math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise BadValueError(f"returned {reprlib.repr(value)}, a finite number is expected")
    return number


async def _wait(value: Any) -> Any:
    return await value


def failure_of(error: BaseException) -> Failure:
    return Failure(str(error)) if isinstance(error, BadValueError) else Failure(f"raised {text_of(error)}", _traceback(error))


def text_of(error: BaseException) -> str:
    return "".join(traceback.format_exception_only(error)).strip()


def _traceback(error: BaseException) -> str:
    """The user's part: without the frame of this file."""
    frames = error.__traceback__.tb_next if error.__traceback__ is not None else None
    return "".join(traceback.format_exception(type(error), error, frames))[-TRACEBACK_CHARACTERS:].strip()
