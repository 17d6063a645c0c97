"""The log of a service: what was asked and what came of it, a JSON line each, on the disk before anybody is answered.

    {"request": "17-0123456789ab", "kind": "optim_step", "key": "...", "body": base64}
    {"result": "17-0123456789ab", "form": "json", "body": base64}

A line that a kill has cut off was never acknowledged, and is dropped. Leaves out what the lines mean (desk.py).
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

Line = dict[str, Any]


class Journal:
    """Append-only. One process at a time: the run's folder is locked."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.lines, whole_bytes = _read(path) if path.exists() else ([], 0)
        self._file = path.open("ab")
        self._file.truncate(whole_bytes)
        folder = os.open(path.parent, os.O_RDONLY)
        os.fsync(folder)  # the file's name
        os.close(folder)

    def append(self, line: Line) -> None:
        """On the disk when it returns. OSError where it cannot be."""
        self._file.write(json.dumps(line).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def _read(path: Path) -> tuple[list[Line], int]:
    """The whole lines, and their bytes.

    Raises:
        ValueError: a line before the last is damaged.
    """
    lines, whole_bytes = [], 0
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            if not raw.endswith(b"\n"):
                break
            try:
                lines.append(json.loads(raw))
            except ValueError as error:
                raise ValueError(f"{path}: line {number} is damaged; move the file aside to start without it") from error
            whole_bytes += len(raw)
    return lines, whole_bytes
