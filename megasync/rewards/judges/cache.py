"""Replies of a judge by content, in a file that is only appended to: a line for each reply, which a kill at any moment leaves
whole but for the last line. No torch in here.

    cache = ReplyCache(run_folder / "judges" / "quality.jsonl")      # None: in memory
    cache.put(key, "Score: 7")
    cache.get(key)
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import BinaryIO


def content_key(*parts: object) -> str:
    """Equal for parts with equal texts."""
    return hashlib.blake2b(repr(parts).encode(errors="surrogatepass"), digest_size=16).hexdigest()


class ReplyCache:
    """Keeps where each reply stands in the file, not the reply."""

    def __init__(self, path: Path | None) -> None:
        self._memory: dict[str, str] = {}
        self._places: dict[str, int] = {}
        self._reader: BinaryIO | None = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._writer = path.open("ab", buffering=0)
            self._reader = path.open("rb")
            self._read_places(self._reader)

    def _read_places(self, reader: BinaryIO) -> None:
        """Read the offsets of whole lines; a broken line is skipped, and a new line begins after it."""
        begin, line = 0, b"\n"
        for line in reader:
            if key := _entry(line).get("key"):
                self._places[key] = begin
            begin += len(line)
        if not line.endswith(b"\n"):
            self._writer.write(b"\n")

    def get(self, key: str) -> str | None:
        if self._reader is None or key not in self._places:
            return self._memory.get(key)
        self._reader.seek(self._places[key])
        entry = _entry(self._reader.readline())
        return entry["reply"] if entry.get("key") == key else None

    def put(self, key: str, reply: str) -> None:
        """With the operating system when this returns, so that the end of this process loses nothing."""
        if self._reader is None:
            self._memory[key] = reply
            return
        place = self._writer.seek(0, os.SEEK_END)
        self._writer.write(json.dumps({"key": key, "reply": reply}).encode() + b"\n")
        self._places[key] = place

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._writer.close()


def _entry(line: bytes) -> dict[str, str]:
    try:
        value = json.loads(line)
    except ValueError:
        return {}
    return value if isinstance(value, dict) and {"key", "reply"} <= value.keys() else {}
