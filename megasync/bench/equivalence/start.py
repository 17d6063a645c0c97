"""Ranks that run one case after another in one start, and the next start where a case ends them.

A case that raises, dies or takes too long has failed, and its ranks are ended, since they may wait for each other for ever; the
cases after it go on in new ones. This file is also the program of each rank:

    python -m megasync.launch.torchrun --nproc-per-node 2 -m megasync.bench.equivalence.start JOBS.json
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megasync.bench.train import end_session
from megasync.files import write_atomically
from megasync.launch.processes import end_with_parent, run_and_leave, torchrun

CASES_A_START = 30  # former engines leave some memory and time behind
START_SECONDS = 120.0  # until the ranks have imported everything
POLL_SECONDS = 0.1


@dataclass(frozen=True)
class Job:
    """What measure.py's `measure` is called with. `result`: the file for what it returns; `folder`: for the trained model."""

    config: dict[str, Any]
    result: str
    folder: str
    micro_batches: int
    case_seconds: float


def run_jobs(jobs: Sequence[Job], num_ranks: int, place: Path) -> Iterator[dict[str, Any]]:
    """For each job what was measured, or a mapping with `error` alone: one line."""
    left = list(jobs)
    while left:
        for found in _one_start(left[:CASES_A_START], num_ranks, place):
            left.pop(0)
            yield found


def _one_start(jobs: Sequence[Job], num_ranks: int, place: Path) -> Iterator[dict[str, Any]]:
    """Those of the jobs until one fails, with this one."""
    path, log = place / f"jobs_{num_ranks}.json", place / f"ranks_{num_ranks}.log"
    for job in jobs:
        for file in (Path(job.result), _error_path(job)):
            file.unlink(missing_ok=True)
    write_atomically(path, json.dumps([asdict(job) for job in jobs]))
    process = start(torchrun(num_ranks, "megasync.bench.equivalence.start", str(path)), log)
    try:
        for number, job in enumerate(jobs):
            seconds = job.case_seconds + (0.0 if number else START_SECONDS)
            problem = _wait(process, job, seconds)
            if not problem:
                yield json.loads(Path(job.result).read_text(encoding="utf-8"))
                continue
            said = _error_path(job)
            yield {"error": said.read_text(encoding="utf-8") if said.exists() else f"{problem}: see {log}"}
            return
    finally:
        end_session(process)


def start(command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    """In a session of its own, which ends with this process; `log` gets its output."""
    with log.open("ab") as output:
        return subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=end_with_parent,  # noqa: PLW1509  (no threads of ours run)
            env={"OMP_NUM_THREADS": "1", **os.environ},
        )


def _wait(process: subprocess.Popen[bytes], job: Job, seconds: float) -> str:
    """Until the result is there; else why it will not be."""
    deadline = time.monotonic() + seconds
    while not Path(job.result).exists():
        if _error_path(job).exists():
            return "failed"
        if process.poll() is not None and not Path(job.result).exists():
            return f"the ranks ended with exit code {process.returncode}"
        if time.monotonic() > deadline:
            return f"not done after {seconds:g} s"
        time.sleep(POLL_SECONDS)
    return ""


def _error_path(job: Job) -> Path:
    return Path(f"{job.result}.error")


def main(arguments: Sequence[str]) -> int:
    """What each rank does: job after job, until one fails."""
    from megasync.bench.equivalence.measure import measure

    (path,) = arguments
    for fields in json.loads(Path(path).read_text(encoding="utf-8")):
        job = Job(**fields)
        try:
            measured = measure(job.config, job.folder, job.micro_batches, job.case_seconds)
        except Exception as error:
            lines = str(error).strip().splitlines() or [""]
            if not _error_path(job).exists():
                write_atomically(_error_path(job), f"{type(error).__name__}: {lines[0]}")
            raise
        if int(os.environ["RANK"]) == 0:
            write_atomically(Path(job.result), json.dumps(measured))
    return 0


if __name__ == "__main__":
    run_and_leave(main)
