"""The output of a replica's processes, kept in a file without a name for the error where vLLM fails.

Leaves out what vLLM logs where it does not fail.

    output = Output()
    with output.capture():  # this process's stdout and stderr, and those of children that it starts meanwhile
        engine = start()
    output.summary()
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

TAIL_LINES = 25
TAIL_BYTES = 2**17
PREFIX = re.compile(r"^\(.*? pid=\d+\) \w+ [\d-]+ [\d:]+ \[.*?\] ")  # vLLM's
ERROR_LINE = re.compile(r"^[\w.]*(Error|Exception|Interrupt)(: .*)?$")
MAX_ERRORS = 5


class Output:
    """Grows as long as the processes live."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 # has no name to leave behind; children write to it, too

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Stdout and stderr go here. Children keep them so."""
        saved = [os.dup(1), os.dup(2)]
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            for descriptor in (1, 2):
                os.dup2(self._file.fileno(), descriptor)
            yield
        finally:
            for descriptor, copy in zip((1, 2), saved, strict=True):
                os.dup2(copy, descriptor)
                os.close(copy)

    def text(self) -> str:
        """The last of it."""
        size = os.fstat(self._file.fileno()).st_size
        return os.pread(self._file.fileno(), TAIL_BYTES, max(0, size - TAIL_BYTES)).decode(errors="replace")

    def summary(self) -> str:
        """The errors, then the last lines."""
        text = self.text()
        return "\n".join([*find_errors(text), "last lines of vLLM's log:", *text.splitlines()[-TAIL_LINES:]])


def find_errors(text: str) -> list[str]:
    """Lines that name an exception, without vLLM's prefix, each once, the cause before what follows."""
    lines = (PREFIX.sub("", line).strip() for line in text.splitlines())
    return list(dict.fromkeys(line for line in lines if ERROR_LINE.match(line)))[:MAX_ERRORS]
