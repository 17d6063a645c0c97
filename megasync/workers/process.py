"""One worker process as the trainer holds it: start, send, receive, kill. It runs program.py.

It is forked by a fork server (fork_server.py), a new Python that has nothing of the trainer's (CUDA, Ray, threads, torch), sees
no GPU, and ends all that is below it. When its worker has ended, it forks another one. Both end with the trainer, however it
dies: the kernel signals them (PR_SET_PDEATHSIG in man 2 prctl) at the end of the thread that started the server, the event
loop's. Leaves out which job runs where (pool.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from io import FileIO
from typing import Any, Protocol

from megasync.workers.failure import describe_exit, user_frames
from megasync.workers.protocol import RUNNING, STATUS, Setup, pack, receive

PROGRAM = (
    "import json, sys; fields = json.loads(sys.argv.pop()); sys.path[:] = fields[0]; "
    "from megasync.workers.fork_server import main; main(fields)"
)
# Few malloc arenas: the many threads of episodes would each reserve 64 MiB of a limited address space.
ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}
STACK_SECONDS = 2.0  # for a worker to write its stack before it is killed; it takes milliseconds on a quiet machine
POLL_SECONDS = 0.05
HANGUP_SECONDS = 1.0  # for a worker that closed its socket to end
MAX_STACK_BYTES = 20_000
JOIN_SECONDS = 10.0


class Owner(Protocol):
    """Receives the messages and the end of a worker. `how`: a predicate; `stack`: the user's frames, where it was written."""

    def on_message(self, worker: Any, message: Any) -> None: ...

    def on_end(self, worker: Any, how: str, stack: str) -> None: ...


class ForkServer:
    """A process that forks workers, one at a time. OSError: it cannot be started."""

    def __init__(self) -> None:
        self.is_busy = False
        with contextlib.ExitStack() as unused:
            pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self.control, theirs = map(unused.enter_context, pair)
            setup = Setup(list(sys.path), os.getpid(), theirs.fileno())
            self.process = subprocess.Popen(
                [sys.executable, "-u", "-c", PROGRAM, json.dumps(setup)],
                stdin=subprocess.DEVNULL,
                env=os.environ | ENVIRONMENT,
                pass_fds=(setup.control,),
                start_new_session=True,
            )
            unused.pop_all()
        theirs.close()

    def join(self) -> None:
        """Wait for its end after SIGTERM. From any thread."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(JOIN_SECONDS)


class Worker:
    """Made in the event loop, in which all methods are called. It ends when its fork server ends.

    Raises:
        OSError: it cannot be started.
    """

    node, is_lost = "", False  # on this machine

    def __init__(self, owner: Owner, server: ForkServer, target: str) -> None:
        """`server`: a free one, which imports the module of `target`, that of Start."""
        self.owner, self.loop = owner, asyncio.get_running_loop()
        self.server, self._exited = server, self.loop.create_future()
        self._pid_file: FileIO | None = None  # a pidfd
        self._writer: asyncio.StreamWriter | None = None
        self._unsent = list[tuple[Any, ...]]()
        self._packed = bytearray()
        with contextlib.ExitStack() as unused:
            self._socket, theirs = map(unused.enter_context, socket.socketpair())
            self._notes = unused.enter_context(os.fdopen(os.memfd_create("megasync-worker-notes"), "rb", buffering=0))
            socket.send_fds(server.control, [target.encode()], [theirs.fileno(), self._notes.fileno()])
            unused.pop_all()
        theirs.close()
        server.is_busy = True
        self.loop.add_reader(server.control, self._on_server)
        self._task = self.loop.create_task(self._run())

    def _on_server(self) -> None:
        """It has forked the worker, reports its exit code, or has ended itself."""
        control, data, descriptors = self.server.control, b"", list[int]()
        with contextlib.suppress(ConnectionError):  # it has ended with a request unread
            data, descriptors, *_ = socket.recv_fds(control, STATUS.size, 1)
        has_ended, code = STATUS.unpack(data) if data else (True, self.server.process.wait())
        if descriptors:
            os.set_inheritable(descriptors[0], False)
            self._pid_file = FileIO(descriptors[0])
        elif not has_ended:  # this process may open no more files
            self.server.process.terminate()
        if not has_ended:
            return
        self.loop.remove_reader(control)
        if not data:
            control.close()
        if not self._exited.done():  # nobody waits any more: the loop ends
            self._exited.set_result(code)

    async def _run(self) -> None:
        """Hand over its messages and its end."""
        reader, self._writer = await asyncio.open_unix_connection(sock=self._socket)
        self._flush()
        async for message in receive(reader):
            self.owner.on_message(self, message)
        self.loop.call_later(HANGUP_SECONDS, self.kill)
        how = describe_exit(await self._exited)
        if self._pid_file is not None:
            self._pid_file.close()
        self.server.is_busy = False
        stack = user_frames(os.pread(self._notes.fileno(), MAX_STACK_BYTES, RUNNING.size).decode(errors="replace"))
        self.owner.on_end(self, how, stack)
        self._writer.close()
        self._notes.close()

    def send(self, message: tuple[Any, ...]) -> None:
        """Messages of one event-loop iteration are pickled and written together."""
        if not self._unsent:
            self.loop.call_soon(self._flush)
        self._unsent.append(message)

    def send_packed(self, data: bytes) -> None:
        """Messages that were packed on another node. A worker gets these, or those of `send`, not both."""
        self._packed += data
        self._flush()

    def _flush(self) -> None:
        if self._writer is None:  # the connection is not open yet
            return
        if self._unsent:
            self._packed += pack(self._unsent)
            self._unsent.clear()
        self._writer.write(bytes(self._packed))
        self._packed.clear()

    def running_job(self) -> tuple[float, int]:
        """time.monotonic() of the start of the step that runs, and the number of its job; 0: no job's, or none yet."""
        noted = os.pread(self._notes.fileno(), RUNNING.size, 0)
        while noted != (again := os.pread(self._notes.fileno(), RUNNING.size, 0)):  # it is being written
            noted = again
        begin, number = RUNNING.unpack(noted) if noted else (0.0, 0)
        return begin, number

    def kill_with_stack(self) -> None:
        """Kill it once it has written its stack, or after STACK_SECONDS."""
        self._signal(signal.SIGUSR1)
        self.loop.call_later(POLL_SECONDS, self._kill_once_written, RUNNING.size, self.loop.time() + STACK_SECONDS)

    def _kill_once_written(self, former_size: int, deadline: float) -> None:
        if self._notes.closed:  # it has ended
            return
        size = os.fstat(self._notes.fileno()).st_size
        if RUNNING.size < size == former_size or self.loop.time() > deadline:
            self.kill()
        else:
            self.loop.call_later(POLL_SECONDS, self._kill_once_written, size, deadline)

    def kill(self) -> None:
        """Kill the worker and all its descendants; `on_end` follows."""
        if self._pid_file is None:  # it is not forked yet
            self.server.process.terminate()
        self._signal(signal.SIGKILL)

    def _signal(self, kind: signal.Signals) -> None:
        if self._pid_file is not None and not self._pid_file.closed:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pid_file.fileno(), kind)
