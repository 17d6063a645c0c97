"""The log of a service: what was asked and what came of it, a JSON line each, on the disk before anybody is answered.

    {"request": "17-0123456789ab", "kind": "optim_step", "key": "...", "body": base64}
    {"result": "17-0123456789ab", "form": "json", "body": base64}

A line that a kill has cut off was never acknowledged, and is dropped. Lines are read again where they are needed, so that
requests and results that wait take no memory. Leaves out what the lines mean (desk.py).
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

LOG_FILE = "log.jsonl"  # in the run's folder, below service/
PIECE_BYTES = 2**16  # of base64, a multiple of 4
HEAD_BYTES, MARK = 1024, b'"body": "'
Line = dict[str, Any]


class Place(NamedTuple):
    """Of a line in the file."""

    offset: int
    num_bytes: int


class Journal:
    """Append-only. One process at a time: the run's folder is locked. Threads may call at once, but for `append`."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path, self._file = path, path.open("a+b")
        self._end = path.stat().st_size
        folder = os.open(path.parent, os.O_RDONLY)
        os.fsync(folder)  # the file's name
        os.close(folder)

    def replay(self) -> Iterator[tuple[Place, Line]]:
        """All whole lines, in order; call it once, before the first `append`. What is cut off behind them is removed.

        Raises:
            ValueError: a line before the last is damaged.
        """
        whole_bytes = 0
        with self._path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                if not raw.endswith(b"\n"):
                    break
                try:
                    line = json.loads(raw)
                except ValueError as error:
                    raise ValueError(
                        f"{self._path}: line {number} is damaged; move the file aside to start without it"
                    ) from error
                yield Place(whole_bytes, len(raw)), line
                whole_bytes += len(raw)
        self._cut(whole_bytes)

    def append(self, line: Line) -> Place:
        """On the disk when it returns. OSError where it cannot be; then it is not in the log."""
        raw = json.dumps(line).encode() + b"\n"
        place = Place(self._end, len(raw))
        try:
            self._file.write(raw)
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError:  # such as a full disk: half a line must not be followed by another
            self._cut(self._end)
            raise
        self._end += len(raw)
        return place

    def read(self, place: Place) -> Line:
        """A line that was appended or replayed."""
        line: Line = json.loads(os.pread(self._file.fileno(), place.num_bytes, place.offset))
        return line

    def body(self, place: Place) -> tuple[Line, int, Iterator[bytes]]:
        """A line without its `body`, which is the last in it; how many bytes that has, and these piece by piece."""
        head = os.pread(self._file.fileno(), min(HEAD_BYTES, place.num_bytes), place.offset)
        start = head.index(MARK) + len(MARK)
        end = place.num_bytes - len(b'"}\n')
        padding = os.pread(self._file.fileno(), 2, place.offset + end - 2).count(b"=") if end > start else 0
        line: Line = json.loads(head[:start] + b'"}')
        return line, (end - start) // 4 * 3 - padding, self._pieces(place.offset + start, place.offset + end)

    def _pieces(self, start: int, end: int) -> Iterator[bytes]:
        for offset in range(start, end, PIECE_BYTES):
            yield base64.b64decode(os.pread(self._file.fileno(), min(PIECE_BYTES, end - offset), offset))

    def close(self) -> None:
        self._file.close()

    def _cut(self, num_bytes: int) -> None:
        os.ftruncate(self._file.fileno(), num_bytes)
        self._end = num_bytes
