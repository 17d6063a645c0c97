"""One reward process as the trainer holds it: started, written to, read from, ended. program.py is what runs in it.

It is a new Python, not a fork: it has nothing of the trainer's (CUDA, Ray, threads, torch) and sees no GPU. It ends with the
trainer, however that dies: the kernel ends it with the thread that started it (PR_SET_PDEATHSIG in man 2 prctl), so that each has
a thread of its own, which waits for its end. Leaves out who gets which sample (lane.py).
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
import threading
from typing import Any, Protocol

from megasync.rollouts.rewards.wire import Setup, Unpacker, pack

PROGRAM = (
    "import json, sys; fields = json.loads(sys.argv.pop()); sys.path[:] = fields[0]; "
    "from megasync.rollouts.rewards.program import main; main(fields)"
)
ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
STACK_SECONDS = 0.2  # for a process to write down where it stands before it is killed
HUNG_UP_SECONDS = 1.0  # for a process that closed its socket to end, as it should
STACK_BYTES = 20_000
STACK_FRAMES = 12
JOIN_SECONDS = 10.0


class Owner(Protocol):
    """Who hears of a process; called in the event loop."""

    def on_message(self, process: RewardProcess, message: Any) -> None: ...

    def on_end(self, process: RewardProcess, how: str, stack: str) -> None: ...


class RewardProcess:
    """Made in the event loop, in which everything but `kill` and `join` is called."""

    def __init__(self, owner: Owner, names: list[str], limit_seconds: float) -> None:
        self.owner, self.loop = owner, asyncio.get_running_loop()
        self._socket, theirs = socket.socketpair()
        self._socket.setblocking(False)
        self._stack = os.fdopen(os.memfd_create("megasync-reward-stack"), "rb")
        self._unpacker, self._to_send = Unpacker(), bytearray()
        self._lock, self._pid, self._is_doomed, self._is_open = threading.Lock(), 0, False, True
        self.loop.add_reader(self._socket, self._read)
        setup = Setup(list(sys.path), os.getpid(), theirs.fileno(), self._stack.fileno(), names, limit_seconds)
        self._thread = threading.Thread(target=self._keep, args=(setup, theirs), name="reward-process", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------------------------------------ messages

    def send(self, message: tuple[Any, ...]) -> None:
        """What is sent before the loop comes round goes at once."""
        if not self._to_send:
            self.loop.call_soon(self._write)
        self._to_send += pack(message)

    def _write(self) -> None:
        if not self._is_open:
            return
        try:
            sent = self._socket.send(self._to_send)
            del self._to_send[:sent]
        except BlockingIOError:
            pass
        except ConnectionError:  # its end is told by the thread
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

    # ------------------------------------------------------------------------------------------------ the end

    def kill_with_stack(self) -> None:
        """Kill it a moment later, once it has written down where it stands."""
        self._signal(signal.SIGUSR1)
        self.loop.call_later(STACK_SECONDS, self.kill)

    def kill(self) -> None:
        """From any thread; `on_end` follows."""
        with self._lock:
            self._is_doomed = True
        self._signal(signal.SIGKILL)

    def join(self) -> None:
        """Wait until the process that was killed is gone. From any thread."""
        self._thread.join(JOIN_SECONDS)

    def _signal(self, kind: signal.Signals) -> None:
        with self._lock:
            if self._pid:
                os.kill(self._pid, kind)

    def _end(self, how: str) -> None:
        """The last messages, then the end."""
        if not self._is_open:
            return
        self._read()
        self._is_open = False
        stack = _stack(os.pread(self._stack.fileno(), STACK_BYTES, 0).decode(errors="replace"))
        self.loop.remove_reader(self._socket)
        self.loop.remove_writer(self._socket)
        self._close()
        self.owner.on_end(self, how, stack)

    def _close(self) -> None:
        self._socket.close()
        self._stack.close()

    # ------------------------------------------------------------------------------------------------ the thread

    def _keep(self, setup: Setup, theirs: socket.socket) -> None:
        """Start the process, wait for its end, end what it has started itself, and tell the loop."""
        try:
            with theirs:
                process = subprocess.Popen(
                    [sys.executable, "-u", "-c", PROGRAM, json.dumps(setup)],
                    stdin=subprocess.DEVNULL,
                    env=os.environ | ENVIRONMENT,
                    pass_fds=(setup.socket, setup.stack),
                    start_new_session=True,
                )
        except OSError as error:
            self._tell(f"could not be started: {error}")
            return
        with self._lock:
            self._pid = process.pid
            if self._is_doomed:
                process.kill()
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        with self._lock:
            self._pid = 0
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)  # its id cannot be another's before it is waited for
        self._tell(_how(process.wait()))

    def _tell(self, how: str) -> None:
        try:
            self.loop.call_soon_threadsafe(self._end, how)
        except RuntimeError:  # the loop is closed
            self._close()


def _how(code: int) -> str:
    if code >= 0:
        return f"ended its process with exit code {code}"
    name = signal.Signals(-code).name
    return f"had its process killed by {name}" + (", as the system does when memory runs out" if name == "SIGKILL" else "")


def _stack(written: str) -> str:
    """Of what faulthandler wrote the user's frames, the innermost first."""
    lines = []
    for line in written.splitlines():
        if "rollouts/rewards/program.py" in line:
            break
        lines.append(line)
    return "\n".join(lines[: STACK_FRAMES + 1]).strip()
