"""The parent of a process of episodes: no program that an episode has started outlives it, wherever that has gone.

It is all that the trainer starts, and forks the process (program.py) before it has loaded anything. Programs in sessions of
their own, and those whose parents are gone, become its children (PR_SET_CHILD_SUBREAPER in man 2 prctl). Once the process has
ended in any way, or the trainer has, it kills all that is below it, then ends as the process did. SIGTERM: end the process;
SIGUSR1 is handed on to it. Leaves out the end of one episode in a process that goes on (children.py). No torch in here.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import time
from typing import Any

import psutil

from megasync.launch.processes import adopt_orphans, end_with_parent
from megasync.rewards.wire import Setup

HEARD = {signal.SIGTERM, signal.SIGUSR1, signal.SIGCHLD}
END_SECONDS = 5.0  # for what was killed to be gone
AGAIN_SECONDS = 0.005


def main(fields: list[Any]) -> None:
    """`fields` are those of a Setup."""
    setup = Setup(*fields)
    end_with_parent(signal.SIGTERM)
    if os.getppid() != setup.parent:
        return
    adopt_orphans()
    signal.pthread_sigmask(signal.SIG_BLOCK, HEARD)
    keeper = os.getpid()
    process = os.fork()
    if process == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HEARD)
        from megasync.episodes import program

        program.main([*setup._replace(parent=keeper)])
        return
    for descriptor in (setup.socket, setup.notes):
        os.close(descriptor)
    status = keep(process)
    end_all()
    end_as(status)


def keep(process: int) -> int:
    """Its wait status, once it has ended; all others that end meanwhile are reaped, too."""
    while (status := reap().get(process)) is None:
        heard = signal.sigwait(HEARD)
        if heard != signal.SIGCHLD:
            os.kill(process, signal.SIGUSR1 if heard == signal.SIGUSR1 else signal.SIGKILL)
    return status


def reap() -> dict[int, int]:
    """Wait statuses of the children that have ended."""
    found: dict[int, int] = {}
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            found[ended[0]] = ended[1]
    return found


def end_all() -> None:
    """Those below, and what they start meanwhile."""
    end = time.monotonic() + END_SECONDS
    while (below := psutil.Process().children(recursive=True)) and time.monotonic() < end:
        for each in below:
            with contextlib.suppress(psutil.Error):
                each.kill()
        reap()
        time.sleep(AGAIN_SECONDS)


def end_as(status: int) -> None:
    """End this process with the exit code, or by the signal, of that wait status."""
    if os.WIFSIGNALED(status):
        kind = os.WTERMSIG(status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(kind, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {kind})
        os.kill(os.getpid(), kind)
    os._exit(os.waitstatus_to_exitcode(status))
