"""The log of a service: requests and results, a JSON line each, on the disk before anybody is answered.

    {"request": "17-0123456789ab", "kind": "optim_step", "key": "...", "body": base64}
    {"result": "17-0123456789ab", "form": "json", "body": base64}

A line that a kill has cut off was never acknowledged, and is dropped. Lines are read again where they are needed, so that
requests and results that wait take no memory. Leaves out what the lines mean (desk.py).
"""

from __future__ import annotations

import base64
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

LOG_FILE = "log.jsonl"  # in the run's folder, below service/
PIECE_BYTES = 2**16  # of base64, a multiple of 4
HEAD_BYTES, MARK = 1024, b'"body": "'
Line = dict[str, Any]


class Place(NamedTuple):
    """The place of a line in the file."""

    offset: int
    num_bytes: int


class Journal:
    """Append-only. One process at a time: the run's folder is locked. Threads may call at once, but for `append`."""

    _num_synced = 0  # bytes that are on the disk

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path, self._file = path, path.open("a+b", buffering=0)
        self._end, self._syncing = path.stat().st_size, threading.Lock()
        folder = os.open(path.parent, os.O_RDONLY)
        os.fsync(folder)  # the file's name
        os.close(folder)

    def replay(self) -> Iterator[tuple[Place, Line]]:
        """All whole lines, in order; call it once, before the first `append`. An incomplete last line is removed.

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
        """On the disk after `sync`. OSError where the file takes no more; then it is not in the log."""
        raw = json.dumps(line).encode() + b"\n"
        place = Place(self._end, len(raw))
        try:
            rest = memoryview(raw)
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError:  # such as a full disk: half a line must not be followed by another
            self._cut(self._end)
            raise
        self._end += len(raw)
        return place

    def sync(self, place: Place) -> None:
        """Wait until a line is on the disk, with all before it. Threads that wait at the same time share one write. OSError."""
        with self._syncing:
            if self._num_synced < place.offset + place.num_bytes:
                end = self._end
                os.fsync(self._file.fileno())
                self._num_synced = end

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
