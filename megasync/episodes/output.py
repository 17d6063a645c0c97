"""Limits the output of a worker to its first bytes, so that a tool in a loop does not fill the run's log."""

from __future__ import annotations

import contextlib
import os
import signal
import sys


def limit_output(max_bytes: int) -> None:
    """Output of this process goes to the run's stderr, up to that many bytes. Output of its children is dropped."""
    stderr = os.dup(2)
    os.set_inheritable(stderr, False)
    void = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        os.dup2(void, descriptor)
    os.close(void)
    sys.stdout = sys.stderr = _Limited(stderr, max_bytes)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)


class _Limited:
    """A text stream that writes its first bytes and drops the rest."""

    encoding, errors = "utf-8", "replace"

    def __init__(self, descriptor: int, max_bytes: int) -> None:
        self.descriptor, self.left = descriptor, max_bytes

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
