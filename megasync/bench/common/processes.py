"""Ranks in processes of their own, whose output goes to a log and which never outlive a limit."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from pathlib import Path

from megasync.launch.processes import end_with_parent, torchrun


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
        _end_session(process)
    return f"exit code {code}" if code else ""


def _end_session(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM to all of its processes, then SIGKILL to those that are left."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
