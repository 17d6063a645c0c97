"""Ranks and programs in processes of their own. Leaves out what they do."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

from bench.common.results import Results, read_results
from bench.config import BenchRoot
from megasync.config.load import save_config
from megasync.launch.processes import end_group, end_with_parent, run_to_end, torchrun
from megasync.launch.scope import listen_on_loopback

WORKER = "bench.worker"
END_SECONDS = 10.0


def run_program(program: str, config: BenchRoot, folder: Path, name: str, num_ranks: int = 0) -> tuple[int, Results | None]:
    """Run one of worker.py, on so many ranks, 0: in one process that is none; its exit code, and its measurements so far.

    `name`: of the files in `folder` that config and results go through.
    """
    config_path, results_path = folder / f"{name}.yaml", folder / f"{name}.json"
    save_config(config, config_path)
    results_path.unlink(missing_ok=True)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    listen_on_loopback()
    command = torchrun(num_ranks, WORKER) if num_ranks else [sys.executable, "-m", WORKER]
    code = run_to_end([*command, program, str(config_path), str(results_path)])
    return code, read_results(results_path)


def run_logged(program: str, config: BenchRoot, place: Path, num_ranks: int, limit_seconds: float) -> tuple[Results, Path]:
    """Run one of worker.py on so many ranks, with its files at `place` and a suffix each; its measurements so far, and its log.

    Where it does not come to its end the results have `problem` in place of `is_complete`.
    """
    config_path, results_path, log = (place.with_name(f"{place.name}.{kind}") for kind in ("yaml", "json", "log"))
    save_config(config, config_path)
    results_path.unlink(missing_ok=True)
    problem = run_ranks(num_ranks, WORKER, program, str(config_path), str(results_path), log=log, limit_seconds=limit_seconds)
    found = read_results(results_path) or {}
    is_complete = found.pop("is_complete", False)
    return found | ({} if is_complete and not problem else {"problem": problem}), log


def run_ranks(num_ranks: int, module: str, *arguments: str, log: Path, limit_seconds: float) -> str:
    """Run `python -m module arguments` on so many ranks; why that failed, or an empty text. All its processes have ended then."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        process = subprocess.Popen(
            torchrun(num_ranks, module, *arguments),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=end_with_parent,  # noqa: PLW1509  (no threads of ours run)
            env={"OMP_NUM_THREADS": "1", **os.environ},
        )
    try:
        code = process.wait(limit_seconds)
    except subprocess.TimeoutExpired:
        return f"not done after {limit_seconds:g} s"
    finally:
        end_group(process, END_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # the rest of its session
    return f"exit code {code}" if code else ""
