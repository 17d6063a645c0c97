"""The fork server of workers, their parent: no program that a job has started outlives the worker, in whichever session it is.

The trainer starts this process, which imports the target's module, forks a worker (program.py) and reports its end. It forks the
next one when it is asked, in milliseconds. The user's modules are imported in each worker.

Descendants in their own sessions, and those whose parents are gone, become children of this process (PR_SET_CHILD_SUBREAPER in
man 2 prctl). Once the worker or the trainer has ended in any way, it kills all its descendants. SIGTERM ends both. Leaves out the
end of one job's processes while the worker continues (children.py). No torch in here.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import socket
import sys
import time
from typing import Any

import psutil

from megasync.launch.processes import adopt_orphans, end_with_parent
from megasync.workers import program
from megasync.workers.protocol import MAX_TARGET_BYTES, STATUS, Setup

HANDLED = {signal.SIGTERM, signal.SIGCHLD}
END_SECONDS = 5.0  # for killed processes to be gone
RETRY_SECONDS = 0.005


def main(fields: list[Any]) -> None:
    """`fields`: those of a Setup."""
    setup = Setup(*fields)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the trainer's parent may have had it ignored
    end_with_parent(signal.SIGTERM)
    if os.getppid() != setup.parent:
        return
    adopt_orphans()
    control = socket.socket(fileno=setup.control)
    control.set_inheritable(False)
    while True:
        target, descriptors, *_ = socket.recv_fds(control, MAX_TARGET_BYTES, 2)
        if len(descriptors) < 2:  # the trainer has hung up, or this process may open no more files
            return
        with contextlib.suppress(Exception):  # the worker will report it
            importlib.import_module(target.decode().partition(":")[0])
        signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)
        server, worker = os.getpid(), os.fork()
        if worker == 0:
            control.close()
            run_worker(server, *descriptors)
            return
        own = os.pidfd_open(worker)
        for descriptor in descriptors:
            os.close(descriptor)
        with contextlib.suppress(ConnectionError):
            socket.send_fds(control, [STATUS.pack(False, 0)], [own])
        os.close(own)
        status, is_over = wait_for(worker)
        end_descendants()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)
        if is_over:
            signal.raise_signal(signal.SIGTERM)
        with contextlib.suppress(ConnectionError):
            control.sendall(STATUS.pack(True, os.waitstatus_to_exitcode(status)))


def run_worker(server: int, connection: int, notes: int) -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)
    if (random := sys.modules.get("numpy.random")) is not None:  # else all workers would draw the same numbers
        random.seed()
    program.main(server, connection, notes)


def wait_for(worker: int) -> tuple[int, bool]:
    """Its wait status, and whether SIGTERM came. Orphans that end meanwhile are reaped, too."""
    is_over = False
    while (status := reap().get(worker)) is None:
        if signal.sigwait(HANDLED) == signal.SIGTERM:
            is_over = True
            os.kill(worker, signal.SIGKILL)
    return status, is_over


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
