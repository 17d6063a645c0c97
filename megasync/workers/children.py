"""The processes that a job starts: they end with it. Leaves out those of the whole worker (fork_server.py).

Python reports the start of a process by an audit event, in the context of the job that starts it; the children that are new after
it are that job's. Processes that were started in another way, or have left their parent, end once no job runs.

    children = Children()
    with children.of(7): ...          # one step of job 7; started processes are noted
    children.end(7)
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import psutil

STARTS = ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system", "os.exec")
CURRENT_JOB: ContextVar[int] = ContextVar("job", default=0)


class Children:
    """At most one in a process: an audit hook cannot be removed."""

    def __init__(self) -> None:
        self._known: set[int] = set()
        self._own: dict[int, list[psutil.Process]] = defaultdict(list)
        self._starters: set[int] = set()
        self._process = psutil.Process()
        sys.addaudithook(self._on_event)

    def _on_event(self, event: str, _: tuple[Any, ...]) -> None:
        if event in STARTS:
            self._starters.add(CURRENT_JOB.get())

    @contextlib.contextmanager
    def of(self, number: int) -> Iterator[None]:
        try:
            yield
        finally:
            if self._starters:
                self._note()

    def _note(self) -> None:
        """New children belong to the job that has started some. Where several have, the owner is unknown."""
        starters, self._starters = self._starters, set()
        new = [child for child in self._children() if child.pid not in self._known]
        self._known |= {child.pid for child in new}
        if len(starters) == 1:
            self._own[starters.pop()] += new

    def _children(self) -> list[psutil.Process]:
        """The children of this process. Asks the kernel first, since psutil reads /proc of all processes."""
        try:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # there are none
            return []
        return list(self._process.children())

    def end(self, number: int) -> None:
        """Kill the processes that the job has started, and their descendants."""
        self._note()
        for child in self._own.pop(number, []):
            _end(child)

    def end_all(self) -> None:
        """Kill all children; for when no job runs."""
        if self._known:
            for child in self._children():
                _end(child)
            self._known.clear()
            self._own.clear()


def _end(child: psutil.Process) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        below = child.children(recursive=True)
        for each in (*below, child):
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        with contextlib.suppress(ChildProcessError):
            os.waitpid(child.pid, os.WNOHANG)
