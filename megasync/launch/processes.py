"""Child processes that do not outlive this one, and programs that end once they are done.

Linux only: the kernel tells the child that its parent died.

code = run_to_end(torchrun(2, "megasync.train", "configs/quickstart.yaml"))
"""

from __future__ import annotations

import ctypes
import errno
import io
import os
import platform
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from megasync.config.errors import DISK_FULL

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
INTERRUPTED, TERMINATED, HUNG_UP = 130, 143, 129  # the exit codes of shells for Ctrl-C, SIGTERM and SIGHUP
ENDING = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
)  # a user, a batch system, and a terminal that is closed end a run by these
UNREAD = 141  # that for SIGPIPE
STOPPED = 75  # EX_TEMPFAIL: the run was asked to stop, and did; the same command resumes, with checkpoint.resume=auto
REFUSED = 2  # exit code of a rank or command that refused the config with a message, and started nothing
PIDFD_REMEDY = "take Linux 5.3 or later, and a Python that was built on it, such as a distribution's own or uv's"
ORPHAN_SECONDS = 15  # for a rank whose launcher is gone to take its replicas down


def end_with_parent(kind: signal.Signals = signal.SIGTERM) -> None:
    """For `preexec_fn`, or first in a child: it gets `kind` when the thread that started it ends, or its process, in any way."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, kind)


def adopt_orphans() -> None:
    """Descendants whose parents are gone become children of this process."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def end_group(process: subprocess.Popen[bytes], seconds: float) -> None:
    """Terminate a process that leads a session of its own, wait `seconds`, then kill the session."""
    process.terminate()
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def pidfd_problem() -> str:
    """Why a process cannot wait here for the end of one that is not its child, as ranks and replicas do; empty: it can."""
    if not hasattr(os, "pidfd_open"):
        return f"{sys.executable} has no os.pidfd_open: it was built for Linux before 5.3"
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        return f"Linux {platform.release()} has no pidfd_open ({error.strerror}), which 5.3 has"
    return ""


def end_after_launcher() -> None:
    """A rank of torchrun ends when torchrun does, in any way: by SIGTERM, and by SIGALRM where that does not end it in time.

    A main thread that waits in a collective does not handle SIGTERM; SIGALRM has no handler, so that the kernel ends the process.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    launcher = os.pidfd_open(os.getppid())

    def wait() -> None:
        select.select([launcher], [], [])
        signal.alarm(ORPHAN_SECONDS)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="launcher", daemon=True).start()


def ignores_hang_up() -> bool:
    """Whether this process was started by nohup, or goes on like that."""
    return signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def hold_signals() -> None:
    """Block the signals that end a run, also across an `exec`, until `release_signals`."""
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)


def release_signals(handle: Callable[[int, Any], Any]) -> None:
    """Install `handle` for the held signals and deliver those that have arrived. SIGHUP stays ignored under nohup. Does nothing
    unless `hold_signals` was called.
    """
    if not set(ENDING) <= signal.pthread_sigmask(signal.SIG_BLOCK, ()):
        return
    for kind in ENDING[:2] if ignores_hang_up() else ENDING:
        signal.signal(kind, handle)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)


def end_on_sigterm(*, and_on_sigint: bool = False) -> None:
    """SIGTERM, and Ctrl-C if wanted, raise SystemExit from now on, so that Ray and vLLM are taken down.

    Without a traceback, which would hide the launcher's messages. A second signal is ignored.
    """
    kinds = (signal.SIGTERM, signal.SIGINT) if and_on_sigint else (signal.SIGTERM,)

    def leave(number: int, _: object) -> NoReturn:
        for kind in kinds:  # no SIG_IGN: where both have come at once Python says of the other that a race has it ignored
            signal.signal(kind, lambda *_: None)
            signal.siginterrupt(kind, False)
        sys.exit(128 + number)

    for kind in kinds:
        signal.signal(kind, leave)


class Terminated(KeyboardInterrupt):
    """SIGTERM, where it is to end a program as Ctrl-C does, with another exit code."""


def sigterm_as_ctrl_c() -> None:
    """Raise Terminated at SIGTERM from now on."""

    def leave(*_: object) -> NoReturn:
        raise Terminated

    signal.signal(signal.SIGTERM, leave)


def code_of(interrupt: KeyboardInterrupt) -> int:
    """The exit code of a program that was ended by it."""
    return TERMINATED if isinstance(interrupt, Terminated) else INTERRUPTED


def ignore_signals() -> None:
    """Ignore SIGTERM and SIGINT from now on: they must not interrupt the cleanup. torchrun sends SIGKILL after 30 seconds."""
    for kind in (signal.SIGTERM, signal.SIGINT):
        signal.signal(kind, signal.SIG_IGN)


class _Output(io.FileIO):
    """A stream that discards output once nobody reads it: a pipe's other end is closed, or the terminal is (EPIPE, EIO). On
    a full disk it discards what has no room, so that a line of the log does not end the run.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number, "w", closefd=False)
        self._unread = (errno.EPIPE, errno.EIO) if os.isatty(number) else (errno.EPIPE,)  # of a disk EIO is an error

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno in DISK_FULL:
                return len(data)
            if error.errno not in self._unread:
                raise
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())  # also for what C libraries write, and for children
            os.close(nowhere)
            return super().write(data)


def survive_closed_output(*names: str) -> None:
    """Discard output from now on once its reader is gone: `| head -1`, a `tee` that has ended, the closed terminal of a run in
    the background. `names`: of stdout and stderr; none: both.
    """
    repair_output()
    for name in names or ("stdout", "stderr"):
        own = getattr(sys, name)
        own.flush()
        output = io.BufferedWriter(_Output(own.fileno()))
        by_lines = own.line_buffering or own.write_through
        setattr(sys, name, io.TextIOWrapper(output, own.encoding, own.errors, line_buffering=by_lines))


def repair_output() -> None:
    """Open a stream that was closed before the start, as by `>&-`, on /dev/null: no later file may get its descriptor. Letters
    that the terminal or file cannot show are written as escapes, here and in Pythons that this process starts.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8", closefd=False))  # noqa: SIM115
        own: Any = getattr(sys, name)
        if isinstance(own, io.TextIOWrapper):
            own.reconfigure(errors="backslashreplace")
    os.environ["PYTHONIOENCODING"] = f"{sys.stdout.encoding}:backslashreplace"


def run_and_leave(main: Callable[[Sequence[str]], int]) -> NoReturn:
    """Run `main` on the command's arguments and end this process with its code, once all that was written is out; or, where it is
    a rank of torchrun, with the launcher.

    Nothing is freed on the way: threads of torch, gloo, Ray and Triton that still run while Python and then C++ take themselves
    down can wait for each other without end, and a rank that is done would block its launcher.
    """
    end_after_launcher()
    repair_output()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        survive_closed_output()
    try:
        code = main(sys.argv[1:])
    except SystemExit as leaving:
        if not isinstance(leaving.code, int):
            raise
        code = leaving.code
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def torchrun(num_ranks: int, module: str, *arguments: str) -> list[str]:
    """The command that runs `python -m module arguments` on so many ranks of this machine."""
    launcher = [sys.executable, "-m", "megasync.launch.torchrun", "--nproc-per-node", str(num_ranks)]
    return [*launcher, "-m", module, *arguments]


def run_to_end(command: Sequence[str]) -> int:
    """The command's exit code, or that of the first signal: SIGINT and SIGTERM are forwarded as one SIGTERM, then the command's
    end is awaited; later signals are ignored.

    The command has a session of its own: Ctrl-C would else reach a launcher and its ranks at once, and once more from
    here, and a launcher that is interrupted while it ends its ranks leaves some behind.
    """
    code = 0
    process = subprocess.Popen(
        command,
        start_new_session=True,
        preexec_fn=end_with_parent,  # noqa: PLW1509  (no threads of ours run)
    )

    def forward(number: int, _: object) -> None:
        nonlocal code
        if not code:
            code = 128 + number
            process.terminate()

    kinds = (signal.SIGINT, signal.SIGTERM)
    former = [signal.signal(kind, forward) for kind in kinds]
    try:
        own = process.wait()
    finally:
        for kind, handler in zip(kinds, former, strict=True):
            if not code:
                signal.signal(kind, handler)
    return code or own
