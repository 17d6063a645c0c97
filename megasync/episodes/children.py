"""The processes that an episode starts: they end with it. Leaves out those of the whole process, which end with its session.

Python tells of a start by an audit event, in the context of whoever starts it; the children that are new behind it are that
episode's. What was started in another way, or has left its parent, ends once no episode runs.

    children = Children()
    with children.of(7): ...          # one step of episode 7; started processes are noted
    children.end(7)
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import psutil

STARTS = ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system", "os.exec")
CURRENT: ContextVar[int] = ContextVar("episode", default=-1)


class Children:
    """Of this process. One in a process: an audit hook cannot be taken back."""

    def __init__(self) -> None:
        self._known: set[int] = set()
        self._own: dict[int, list[psutil.Process]] = defaultdict(list)
        self._starters: set[int] = set()
        self._process = psutil.Process()
        sys.addaudithook(self._hear)

    def _hear(self, event: str, _: tuple[Any, ...]) -> None:
        if event in STARTS:
            self._starters.add(CURRENT.get())

    @contextlib.contextmanager
    def of(self, number: int) -> Iterator[None]:
        try:
            yield
        finally:
            if self._starters:
                self._note()

    def _note(self) -> None:
        """New children are those of the only episode that has started some; of several nobody knows whose they are."""
        starters, self._starters = self._starters, set()
        new = [child for child in self._process.children() if child.pid not in self._known]
        self._known |= {child.pid for child in new}
        if len(starters) == 1:
            self._own[starters.pop()] += new

    def end(self, number: int) -> None:
        """What the episode has started, with all below it."""
        self._note()
        for child in self._own.pop(number, []):
            _end(child)

    def end_all(self) -> None:
        """No episode runs."""
        if self._known:
            for child in self._process.children():
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


def limit_output(most_bytes: int) -> None:
    """What this process prints goes on to the run's, up to so many bytes; that of its children is dropped."""
    kept = os.dup(2)
    os.set_inheritable(kept, False)
    void = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        os.dup2(void, descriptor)
    os.close(void)
    sys.stdout = sys.stderr = _Limited(kept, most_bytes)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)


class _Limited:
    """A text stream that passes on its first bytes."""

    encoding, errors = "utf-8", "replace"

    def __init__(self, descriptor: int, most_bytes: int) -> None:
        self.descriptor, self.left = descriptor, most_bytes

    def write(self, text: str) -> int:
        if self.left > 0:
            data = text[: self.left].encode(errors="replace")
            self.left -= len(data)
            with contextlib.suppress(OSError):
                os.write(self.descriptor, data if self.left > 0 else data + b"\n(more is not shown)\n")
        return len(text)

    def writelines(self, lines: list[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None: ...

    def isatty(self) -> bool:
        return False

    def fileno(self) -> int:
        return 2
