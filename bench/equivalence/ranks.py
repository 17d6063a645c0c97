"""Ranks that run one case after another in one start, and the next start where a case ends them. Also the program of each rank.

A case that raises, dies or takes too long has failed, and its ranks are ended; the cases after it go on in new ones.

    python -m megasync.launch.torchrun --nproc-per-node 2 -m bench.equivalence.ranks JOBS.json
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.common.processes import run_ranks
from bench.common.results import read_results
from megasync.config.files import write_atomically
from megasync.launch.processes import run_and_leave

CASES_PER_START = 15  # former engines leave some memory and time behind
START_SECONDS = 120.0  # until the ranks have imported everything


@dataclass(frozen=True)
class Job:
    """Arguments of measure.py's `measure`. `result`: the file for its result; `folder`: for the trained model."""

    config: dict[str, Any]
    result: str
    folder: str
    micro_batches: int
    case_seconds: float


def run_jobs(jobs: Sequence[Job], num_ranks: int, place: Path) -> Iterator[dict[str, Any]]:
    """For each job what was measured, or a mapping with `error` alone: one line."""
    jobs_path, log = place / f"jobs_{num_ranks}.json", place / f"ranks_{num_ranks}.log"
    left = list(jobs)
    while left:
        started = left[:CASES_PER_START]
        for job in started:
            Path(job.result).unlink(missing_ok=True)
        write_atomically(jobs_path, json.dumps([asdict(job) for job in started]))
        limit = START_SECONDS + sum(job.case_seconds for job in started)
        problem = run_ranks(num_ranks, "bench.equivalence.ranks", str(jobs_path), log=log, limit_seconds=limit)
        for job in started:
            found = read_results(Path(job.result)) or {"error": f"{problem}: see {log}"}
            left.pop(0)
            yield found
            if "error" in found:
                break


def main(arguments: Sequence[str]) -> int:
    """Run job after job on each rank, until one fails. A rank that waits for others longer than a case may take raises."""
    from bench.equivalence.measure import measure

    (path,) = arguments
    for fields in json.loads(Path(path).read_text(encoding="utf-8")):
        job = Job(**fields)
        try:
            measured = measure(job.config, job.folder, job.micro_batches, job.case_seconds)
        except Exception as error:
            if not Path(job.result).exists():  # the first rank's error, which may make the others fail
                first_line = (str(error).strip().splitlines() or [""])[0]
                write_atomically(Path(job.result), json.dumps({"error": f"{type(error).__name__}: {first_line}"}))
            raise
        if int(os.environ["RANK"]) == 0:
            write_atomically(Path(job.result), json.dumps(measured))
    return 0


if __name__ == "__main__":
    run_and_leave(main)
