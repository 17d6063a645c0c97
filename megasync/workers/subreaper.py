"""The parent of a worker: no program that a job has started outlives the worker, in whichever session it is.

The trainer starts this process, which forks the worker (program.py) before it loads anything. Descendants in their own sessions,
and those whose parents are gone, become its children (PR_SET_CHILD_SUBREAPER in man 2 prctl). Once the worker or the trainer has
ended in any way, it kills all its descendants, then ends as the worker did. SIGTERM kills the worker; SIGUSR1 is passed on to it.
Leaves out the end of one job's processes while the worker continues (children.py). No torch in here.
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
from megasync.workers.protocol import Setup

HANDLED = {signal.SIGTERM, signal.SIGUSR1, signal.SIGCHLD}
END_SECONDS = 5.0  # for killed processes to be gone
RETRY_SECONDS = 0.005


def main(fields: list[Any]) -> None:
    """`fields`: those of a Setup."""
    setup = Setup(*fields)
    end_with_parent(signal.SIGTERM)
    if os.getppid() != setup.parent:
        return
    adopt_orphans()
    signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)
    subreaper = os.getpid()
    worker = os.fork()
    if worker == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)
        from megasync.workers import program

        program.main(setup._replace(parent=subreaper))
        return
    for descriptor in (setup.socket, setup.notes):
        os.close(descriptor)
    status = wait_for(worker)
    end_descendants()
    end_as(status)


def wait_for(worker: int) -> int:
    """Its wait status. Orphans that end meanwhile are reaped, too."""
    while (status := reap().get(worker)) is None:
        received = signal.sigwait(HANDLED)
        if received != signal.SIGCHLD:
            os.kill(worker, signal.SIGUSR1 if received == signal.SIGUSR1 else signal.SIGKILL)
    return status


def reap() -> dict[int, int]:
    """Wait statuses of the children that have ended."""
    found: dict[int, int] = {}
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            found[ended[0]] = ended[1]
    return found


def end_descendants() -> None:
    """Kill all descendants, and any that are started meanwhile."""
    deadline = time.monotonic() + END_SECONDS
    while (below := psutil.Process().children(recursive=True)) and time.monotonic() < deadline:
        for each in below:
            with contextlib.suppress(psutil.Error):
                each.kill()
        reap()
        time.sleep(RETRY_SECONDS)


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
