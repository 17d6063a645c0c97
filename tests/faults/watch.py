"""Starts a case's run, signals its ranks from outside, restarts it after that, and looks for what is left behind. Linux only.

Leaves out whether what it recorded is right (judge.py).
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil

from bridge.processes import shared_memory_below
from tests.faults import orders
from tests.faults.cases import Case
from megasync.config.files import METRICS_FILE, write_atomically
from megasync.launch.processes import end_with_parent, torchrun

PROGRAM = "tests.faults.program"
MARKER = "MEGASYNC_BENCH_MARKER"  # environment variable by which all processes of a run are found
LOOK_SECONDS, POLL_SECONDS = 0.5, 0.02
LEFT_SECONDS = 10.0  # for what ends a moment after the launcher
MAX_STARTS = 3


@dataclass
class Watched:
    """What was seen of one case. `left`: processes, shared memory and files in TMPDIR that outlived the run."""

    exit_codes: list[int | None] = field(default_factory=list)  # None: it had to be ended
    seconds: float = 0.0
    start_seconds: float = 0.0  # until the first step was done
    step_seconds: float = 0.0  # median
    signalled_seconds: float | None = None  # from the start
    end_seconds: float | None = None  # from the signal to the end of that start
    left: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Settings:
    """Of all cases. `config`: a run's, whose folder is `run_folder`."""

    config: Path
    run_folder: Path
    num_ranks: int
    limit_seconds: float  # of one start


def run_case(case: Case, folder: Path, settings: Settings, usual: Watched | None) -> Watched:
    """Run it to its end; after a rank was signalled, again until it is done. `usual`: of the undisturbed run."""
    seen, begin = Watched(), time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / orders.CASE_FILE, case.to_json())
    with (folder / "said.txt").open("wb") as output, tempfile.TemporaryDirectory(prefix="mf-", dir="/tmp") as temporary:
        for _ in range(MAX_STARTS):
            run = _Run(settings, folder, Path(temporary), output)
            try:
                run.watch(case, settings.limit_seconds, usual, seen)
            finally:
                run.end()
            seen.exit_codes.append(run.process.returncode if not run.is_late else None)
            seen.left += run.left()
            if seen.exit_codes[-1] == 0:
                break
        seen.left += [str(path) for path in Path(temporary).rglob("*")][:20]
    seen.seconds = time.monotonic() - begin
    seen.step_seconds = _step_seconds(settings.run_folder / METRICS_FILE)
    return seen


def _step_seconds(metrics: Path) -> float:
    lines = metrics.read_text(encoding="utf-8").splitlines() if metrics.is_file() else []
    return statistics.median(json.loads(line)["step/seconds"] for line in lines) if lines else 0.0


class _Run:
    """One start of the training program."""

    def __init__(self, settings: Settings, folder: Path, temporary: Path, output: Any) -> None:
        self.marker, self.folder = uuid4().hex, folder
        self.metrics = settings.run_folder / METRICS_FILE
        self.is_late = False
        self.memory: set[str] = set()
        self.begin = time.monotonic()
        own = {MARKER: self.marker, "TMPDIR": str(temporary), orders.FOLDER: str(folder)}
        self.process = subprocess.Popen(
            torchrun(settings.num_ranks, PROGRAM, str(settings.config)),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=end_with_parent,  # noqa: PLW1509  (no threads of ours run)
            env={"OMP_NUM_THREADS": "1", **os.environ, **own},
        )

    def watch(self, case: Case, limit_seconds: float, usual: Watched | None, seen: Watched) -> None:
        point: float | None = None
        next_look = 0.0
        was_signalled = (self.folder / orders.SIGNALLED_FILE).exists()
        while self.process.poll() is None:
            now = time.monotonic()
            if now > self.begin + limit_seconds:
                self.is_late = True
                return
            if now > next_look:
                self.memory |= shared_memory_below(self.process.pid)
                next_look = time.monotonic() + LOOK_SECONDS
            if not seen.start_seconds and self.num_steps:
                seen.start_seconds = now - self.begin
            if case.kind == "rank" and not was_signalled and usual is not None:
                point = point or self._point(case, usual, now)
                if point is not None and now >= point and self._signal_rank(case):
                    case, seen.signalled_seconds = Case(case.name, "none"), now - self.begin
            time.sleep(POLL_SECONDS)
        if seen.signalled_seconds is not None and seen.end_seconds is None:
            seen.end_seconds = time.monotonic() - self.begin - seen.signalled_seconds

    def _point(self, case: Case, usual: Watched, now: float) -> float | None:
        """When the rank gets its signal, once that is known."""
        if case.step < 0:
            return self.begin + case.offset * usual.start_seconds
        return now + case.offset * usual.step_seconds if self.num_steps > case.step else None

    def _signal_rank(self, case: Case) -> bool:
        for process in self.family():
            with suppress(psutil.Error):
                if PROGRAM in process.cmdline() and process.environ().get("RANK") == str(case.number):
                    os.environ[orders.FOLDER] = str(self.folder)
                    orders.send(process.pid, case.signal)
                    return True
        return False

    @property
    def num_steps(self) -> int:
        return self.metrics.read_bytes().count(b"\n") if self.metrics.is_file() else 0

    def family(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get(MARKER) == self.marker and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def left(self) -> list[str]:
        """Of processes and shared memory, a while after the end; ended and removed then."""
        deadline = time.monotonic() + LEFT_SECONDS
        while (found := self.family()) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        found_left = []
        for process in found:
            with suppress(psutil.Error):
                found_left.append(f"process {process.pid}: {' '.join(process.cmdline())[:100]}")
                process.kill()
        for path in map(Path, sorted(self.memory)):
            if path.exists():
                found_left.append(str(path))
                path.unlink(missing_ok=True)
        return found_left

    def end(self) -> None:
        """Where it goes on: all of it."""
        if self.process.poll() is None:
            for process in self.family():
                with suppress(psutil.Error):
                    process.send_signal(signal.SIGKILL)
            self.process.wait()
