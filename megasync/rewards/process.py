"""One reward process as the trainer holds it: started, written to, read from, ended. program.py is what runs in it.

It is a new Python, not a fork: it has nothing of the trainer's (CUDA, Ray, threads, torch) and sees no GPU. It ends with the
trainer, however that dies: the kernel ends it with the thread that started it (PR_SET_PDEATHSIG in man 2 prctl), which is the
event loop's. Leaves out who gets which sample (lane.py).
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
from collections.abc import Mapping
from typing import Any, Protocol

from megasync.rewards.wire import BEGUN, Setup, Unpacker, pack

PROGRAM = (
    "import json, sys; fields = json.loads(sys.argv.pop()); sys.path[:] = fields[0]; "
    "from {module} import main; main(fields)"
)
ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
STACK_SECONDS = 2.0  # for a process to write down where it stands before it is killed; it takes milliseconds on a quiet machine
LOOK_SECONDS = 0.05
HUNG_UP_SECONDS = 1.0  # for a process that closed its socket to end, as it should
STACK_BYTES = 20_000
STACK_FRAMES = 12
JOIN_SECONDS = 10.0


class Owner(Protocol):
    """Who hears of the messages and of the end of a process, which is of the owner's kind."""

    def on_message(self, process: Any, message: Any) -> None: ...

    def on_end(self, process: Any, how: str, stack: str) -> None: ...


class RewardProcess:
    """Made in the event loop, in which everything but `kill` and `join` is called.

    Raises:
        OSError: it cannot be started.
    """

    module = "megasync.rewards.program"  # whose `main` runs in it
    program = "megasync/rewards/program.py"  # the file that calls what is the user's
    environment: Mapping[str, str] = ENVIRONMENT

    def __init__(self, owner: Owner, names: list[str], limit_seconds: float) -> None:
        self.owner, self.loop = owner, asyncio.get_running_loop()
        self._unpacker, self._to_send = Unpacker(), bytearray()
        with contextlib.ExitStack() as unused:
            self._socket, theirs = map(unused.enter_context, socket.socketpair())
            self._notes = unused.enter_context(os.fdopen(os.memfd_create("megasync-reward-notes"), "rb", buffering=0))
            setup = Setup(list(sys.path), os.getpid(), theirs.fileno(), self._notes.fileno(), names, limit_seconds)
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-c", PROGRAM.format(module=self.module), json.dumps(setup)],
                stdin=subprocess.DEVNULL,
                env=os.environ | self.environment,
                pass_fds=(setup.socket, setup.notes),
                start_new_session=True,
            )
            self._pid_file = unused.enter_context(os.fdopen(os.pidfd_open(self._process.pid), "rb", buffering=0))
            unused.pop_all()
        theirs.close()
        self._socket.setblocking(False)
        self.loop.add_reader(self._socket, self._read)
        self.loop.add_reader(self._pid_file, self._end)

    # ------------------------------------------------------------------------------------------------ messages

    def send(self, message: tuple[Any, ...]) -> None:
        """What is sent before the loop comes round goes at once."""
        self.send_packed(pack(message))

    def send_packed(self, data: bytes) -> None:
        """One message or several."""
        if not self._to_send:
            self.loop.call_soon(self._write)
        self._to_send += data

    def _write(self) -> None:
        if self._socket.fileno() < 0:  # closed
            return
        try:
            sent = self._socket.send(self._to_send)
            del self._to_send[:sent]
        except BlockingIOError:
            pass
        except ConnectionError:  # its end is seen by `_end`
            self._to_send.clear()
        if self._to_send:
            self.loop.add_writer(self._socket, self._write)
        else:
            self.loop.remove_writer(self._socket)

    def _read(self) -> None:
        data = b""
        with contextlib.suppress(BlockingIOError, ConnectionError):
            data = self._socket.recv(1 << 20)
            if not data:
                self.loop.remove_reader(self._socket)
                self.loop.call_later(HUNG_UP_SECONDS, self.kill)
        for message in self._unpacker.feed(data):
            self.owner.on_message(self, message)

    def begun(self) -> tuple[float, int]:
        """time.monotonic() when the call that it works on in turn began, or the last such, and its number; zeros: none has."""
        noted = os.pread(self._notes.fileno(), BEGUN.size, 0)
        while noted != (again := os.pread(self._notes.fileno(), BEGUN.size, 0)):  # it is being written
            noted = again
        begin, number = BEGUN.unpack(noted) if noted else (0.0, 0)
        return begin, number

    # ------------------------------------------------------------------------------------------------ the end

    def kill_with_stack(self) -> None:
        """Kill it a moment later, once it has written down where it stands."""
        if self._process.returncode is None:
            os.kill(self._process.pid, signal.SIGUSR1)
        self.loop.call_later(LOOK_SECONDS, self._kill_once_written, BEGUN.size, self.loop.time() + STACK_SECONDS)

    def _kill_once_written(self, former_size: int, deadline: float) -> None:
        if self._notes.closed:  # it has ended
            return
        size = os.fstat(self._notes.fileno()).st_size
        if BEGUN.size < size == former_size or self.loop.time() > deadline:
            self.kill()
        else:
            self.loop.call_later(LOOK_SECONDS, self._kill_once_written, size, deadline)

    def kill(self) -> None:
        """It and what it has started itself. From any thread; `on_end` follows."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def join(self) -> None:
        """Wait until the process that was killed is gone. From any thread."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(JOIN_SECONDS)

    def _end(self) -> None:
        """It is dead: the last messages, then the end."""
        self.kill()  # its group's others
        how = _how(self._process.wait())
        self._read()
        written = os.pread(self._notes.fileno(), STACK_BYTES, BEGUN.size).decode(errors="replace")
        stack = _stack(written, self.program)
        self.loop.remove_reader(self._pid_file)
        self.loop.remove_reader(self._socket)
        self.loop.remove_writer(self._socket)
        self.owner.on_end(self, how, stack)
        for file in (self._socket, self._notes, self._pid_file):
            file.close()


def _how(code: int) -> str:
    if code >= 0:
        return f"ended its process with exit code {code}"
    name = signal.Signals(-code).name
    return f"had its process killed by {name}" + (", as the system does when memory runs out" if name == "SIGKILL" else "")


def _stack(written: str, program: str) -> str:
    """Of what faulthandler wrote the user's frames, those above the file `program`, the innermost first."""
    lines = []
    for line in written.splitlines():
        if program in line:
            break
        lines.append(line)
    return "\n".join(lines[: STACK_FRAMES + 1]).strip()
