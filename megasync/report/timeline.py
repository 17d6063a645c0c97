"""The run's events as a Chrome trace: open `timeline.json` in https://ui.perfetto.dev or chrome://tracing.

Leaves out counters and GPU kernels. No torch in here.

    timeline = Timeline(run_folder / "timeline.json")
    with timeline.span("train", track="trainer", step=3):
        ...
    timeline.add("generate", "replica 0/requests", start_seconds, end_seconds, {"version": 2})
    timeline.write()
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megasync.config.files import write_atomically


class Timeline:
    """Complete events on tracks; a track is "process/thread", or "process" for its only thread.

    Times are time.time() seconds, so that spans of other processes can be added; in the file they are microseconds. The
    file is rewritten at most every `write_every_seconds`, and by `write`. Beyond `max_events` the oldest events are
    dropped. With `resume` the events of an existing file are kept. Thread-safe. With `path` None, for ranks that write no
    files, all calls do nothing.
    """

    def __init__(
        self, path: Path | None, *, resume: bool = False, write_every_seconds: float = 30.0, max_events: int = 100_000
    ) -> None:
        self.path = path
        self._write_every_seconds = write_every_seconds
        self._lock = threading.Lock()
        self._events: deque[dict[str, Any]] = deque(maxlen=max_events)
        self._tracks: dict[str, tuple[int, int]] = {}  # track -> (pid, tid)
        if resume and path is not None and path.is_file():
            self._read(path)
        self._written_seconds = time.monotonic()

    @contextmanager
    def span(self, name: str, track: str, **args: object) -> Iterator[None]:
        """Adds an event for the block, even if it raises; `args` are shown with the event."""
        start_seconds = time.time()
        try:
            yield
        finally:
            self.add(name, track, start_seconds, time.time(), args)

    def add(
        self, name: str, track: str, start_seconds: float, end_seconds: float, args: Mapping[str, object] | None = None
    ) -> None:
        """Adds one event from `start_seconds` to `end_seconds`, both of time.time()."""
        if self.path is None:
            return
        with self._lock:
            pid, tid = self._place(track)
            self._events.append(
                {
                    "name": name,
                    "ph": "X",
                    "pid": pid,
                    "tid": tid,
                    "ts": round(start_seconds * 1e6),
                    "dur": max(0, round((end_seconds - start_seconds) * 1e6)),
                    "args": dict(args or {}),
                }
            )
            if time.monotonic() - self._written_seconds >= self._write_every_seconds:
                self._write(self.path)

    def write(self) -> None:
        """Writes all events so far to the file."""
        if self.path is not None:
            with self._lock:
                self._write(self.path)

    def _place(self, track: str) -> tuple[int, int]:
        """(pid, tid) of a track. Tracks of one process share its pid; both count from 1 in the order of first use."""
        if track not in self._tracks:
            process = track.partition("/")[0]
            pids = {known.partition("/")[0]: pid for known, (pid, _) in self._tracks.items()}
            pid = pids.setdefault(process, len(pids) + 1)
            threads = sum(known_pid == pid for known_pid, _ in self._tracks.values())
            self._tracks[track] = (pid, threads + 1)
        return self._tracks[track]

    def _write(self, path: Path) -> None:
        names: list[dict[str, Any]] = []
        for track, (pid, tid) in self._tracks.items():
            process, _, thread = track.partition("/")
            common = {"ph": "M", "pid": pid, "tid": tid}
            names.append({"name": "process_name", **common, "args": {"name": process}})
            names.append({"name": "thread_name", **common, "args": {"name": thread or process}})
        trace = {"displayTimeUnit": "ms", "tracks": self._tracks, "traceEvents": [*names, *self._events]}
        write_atomically(path, json.dumps(trace, default=str))
        self._written_seconds = time.monotonic()

    def _read(self, path: Path) -> None:
        trace = json.loads(path.read_text(encoding="utf-8"))
        self._tracks = {track: (pid, tid) for track, (pid, tid) in trace["tracks"].items()}
        self._events.extend(event for event in trace["traceEvents"] if event["ph"] == "X")
