"""The program of a worker: imports the target of Start, then runs jobs until the trainer hangs up or dies.

Serial jobs are plain calls in the main thread, with no event loop around them, so that signals and `asyncio.run` work in them.
Concurrent jobs are coroutines in one event loop. Each step of one, from one wait to the next, is noted with its begin, so that
the trainer knows which job blocks the loop. Leaves out limits on time (limits.py), which are the trainer's.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import importlib
import os
import signal
import socket
import time
from collections.abc import Callable, Generator, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from megasync.launch.processes import end_with_parent
from megasync.workers.children import CURRENT_JOB, Children
from megasync.workers.failure import Failure, failure_of, text_of
from megasync.workers.protocol import (
    RUNNING,
    Begin,
    Cancel,
    Ended,
    HeldUp,
    Post,
    Ready,
    Reply,
    Request,
    Start,
    Withdraw,
    pack,
    read,
    receive,
)

OOM_SCORE = "500"  # of 1000: when memory runs out, the kernel ends this process before the trainer
LONG_STEP_SECONDS = 0.1  # a longer step is reported as HeldUp
MAX_UNSENT_SECONDS = 0.02  # the end of a serial job waits at most that long for those of the jobs after it, unless one is longer
TICK_SECONDS = 0.25  # at most between two notes, while nothing blocks the loop


def main(parent: int, descriptor: int, notes: int) -> None:
    """`descriptor`: of a socket to the trainer; `notes`: of a file for RUNNING and, behind it, faulthandler's output."""
    end_with_parent(signal.SIGKILL)
    if os.getppid() != parent:
        return
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(OOM_SCORE)
    for each in (descriptor, notes):
        os.set_inheritable(each, False)
    os.lseek(notes, RUNNING.size, os.SEEK_SET)
    faulthandler.enable(notes, all_threads=False)
    faulthandler.register(signal.SIGUSR1, notes, all_threads=False)
    connection = socket.socket(fileno=descriptor)
    with contextlib.suppress(ConnectionError):  # the trainer has hung up
        file = connection.makefile("rb")
        first = read(file)
        if first is None:
            return
        (start,) = first
        if start.is_serial:
            run_serial(connection, notes, start, iter(partial(read, file), None))
        else:
            asyncio.run(Concurrent(connection, notes).run(start))


def load(start: Start) -> tuple[Any, Ready]:
    """The function of the jobs, and the message to the trainer."""
    try:
        module, _, name = start.target.partition(":")
        return getattr(importlib.import_module(module), name)(*start.arguments), Ready()
    except BaseException as error:  # noqa: BLE001 # the trainer reports it
        return None, Ready(text_of(error))


def run_serial(connection: socket.socket, notes: int, start: Start, received: Iterator[list[Begin]]) -> None:
    """Jobs in the order of their Begin; no other message follows. The ends of short ones are sent together."""
    function, ready = load(start)
    connection.sendall(pack([ready]))
    worker = os.getpid()
    for begins in received if not ready.problem else ():
        ended, last_sent = list[Ended](), time.monotonic()
        for begin in begins:
            started = time.monotonic()
            note(notes, started, begin.job)
            try:
                value, failure = function(begin.payload), None
            except BaseException as error:  # noqa: BLE001 # the user's; the trainer reports it
                value, failure = None, failure_of(error)
            end_if_forked(worker)
            now = time.monotonic()
            ended.append(Ended(begin.job, value, failure, now - started))
            if begin is begins[-1] or now - last_sent > MAX_UNSENT_SECONDS:
                connection.sendall(pack(ended))
                ended, last_sent = [], now


def end_if_forked(worker: int) -> None:
    """A child that a job has forked, and that comes back from it, would read and answer beside the worker."""
    if os.getpid() != worker:
        os._exit(1)


def note(notes: int, begin: float, number: int) -> None:
    """A step of this job has begun; 0: none runs."""
    os.pwrite(notes, RUNNING.pack(begin, number), 0)


class Caller:
    """The connection of one concurrent job to the trainer."""

    def __init__(self, jobs: Concurrent, number: int) -> None:
        self._jobs, self.number, self.num_requests, self.is_over = jobs, number, 0, False

    async def request(self, message: Any) -> Any:
        """The trainer's reply. A cancelled request is withdrawn.

        Raises:
            RuntimeError: the job has ended, or asks in a thread with an event loop of its own.
        """
        if self.is_over:
            raise RuntimeError("this task asks the model after the end of the episode that has started it")
        request = Request(self.number, self.num_requests, message)
        self._jobs.send(request)
        self.num_requests += 1
        reply = self._jobs.replies[request[:2]] = self._jobs.loop.create_future()
        try:
            return await reply
        except asyncio.CancelledError:
            self._jobs.send(Withdraw(*request[:2]))
            raise
        finally:
            del self._jobs.replies[request[:2]]

    def post(self, message: Any) -> None:
        self._jobs.send(Post(self.number, message))

    def end(self) -> None:
        """Requests of tasks that the job leaves behind are cancelled: nobody would answer them."""
        self.is_over = True
        for reply in [reply for (number, _), reply in self._jobs.replies.items() if number == self.number]:
            reply.cancel()


class Concurrent:
    """Runs jobs side by side in the event loop."""

    def __init__(self, connection: socket.socket, notes: int) -> None:
        self.connection, self.notes, self.pid = connection, notes, os.getpid()
        self.tasks: dict[int, asyncio.Task[None]] = {}
        self.replies: dict[tuple[int, int], asyncio.Future[Any]] = {}

    async def run(self, start: Start) -> None:
        """Until the trainer hangs up."""
        self.loop = asyncio.get_running_loop()
        self.children = Children() if start.ends_children else None
        self.function, ready = load(start)
        reader, self.writer = await asyncio.open_unix_connection(sock=self.connection)
        self.send(ready)
        await self.writer.drain()
        self._tick()
        if not ready.problem:
            async for message in receive(reader):
                self._on_message(message)

    def send(self, message: tuple[Any, ...]) -> None:
        """At once: the next step may end the process. A message that cannot be pickled is an error of its sender."""
        if asyncio.get_running_loop() is not self.loop:
            remedy = "from a thread use asyncio.run_coroutine_threadsafe(model.chat(...), loop), with the episode's loop"
            raise RuntimeError(f"the model, or a tool, is called in another event loop than the episode's: {remedy}")
        self.writer.write(pack([message]))

    def _on_message(self, message: Begin | Cancel | Reply) -> None:
        if isinstance(message, Begin):
            self.tasks[message.job] = self.loop.create_task(self._run_job(message))
        elif isinstance(message, Cancel) and message.job in self.tasks:
            # after its first step: a task that is cancelled before runs no line, and would send no end
            self.loop.call_soon(self.tasks[message.job].cancel)
        elif isinstance(message, Reply):
            reply = self.replies.get((message.job, message.number))
            if reply is not None and not reply.done():
                reply.set_result(message.value)

    async def _run_job(self, begin: Begin) -> None:
        CURRENT_JOB.set(begin.job)
        caller, value, failure = Caller(self, begin.job), None, None
        try:
            value = await Steps(self.function(begin.payload, caller), lambda: self._step(begin.job))
        except BaseException as error:  # noqa: BLE001 # the user's; the trainer reports it
            failure = failure_of(error)
            if isinstance(error, asyncio.CancelledError):
                failure = Failure("was cancelled", failure.details)
        caller.end()
        del self.tasks[begin.job]
        if self.children is not None:
            self.children.end(begin.job)
            if not self.tasks:
                self.children.end_all()
        self.send(Ended(begin.job, value, failure))

    @contextlib.contextmanager
    def _step(self, number: int) -> Iterator[None]:
        end_if_forked(self.pid)  # by a task that a job has started
        begin = time.monotonic()
        note(self.notes, begin, number)
        try:
            with self.children.of(number) if self.children is not None else contextlib.nullcontext():
                yield
        finally:
            end_if_forked(self.pid)
            note(self.notes, now := time.monotonic(), 0)
            if now - begin > LONG_STEP_SECONDS:
                self.send(HeldUp(number, now - begin))

    def _tick(self) -> None:
        end_if_forked(self.pid)
        note(self.notes, time.monotonic(), 0)
        self.loop.call_later(TICK_SECONDS, self._tick)


class Steps:
    """Awaits a coroutine; each of its steps, from one wait to the next, runs in the context manager `around()`."""

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
            except BaseException as error:  # noqa: BLE001 # raised in the coroutine
                value, step = error, throw
