"""The last lines of a launcher whose run did not finish: report, newest checkpoint, the command that resumes it."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

from megasync.config.files import METRICS_FILE, STOP_FILE, newest_checkpoint
from megasync.config.schema import Config
from megasync.launch.processes import HUNG_UP, INTERRUPTED, TERMINATED

COMMAND = "MEGASYNC_COMMAND"  # environment variable of the scripts in launch/: the command line that the user typed


def exit_summary(config: Config, command: str, code: int = 1) -> str:
    """`command`: the launcher's own, where the user called no script. `code`: its exit code."""
    folder = config.run.folder
    newest, again = newest_checkpoint(folder), os.environ.get(COMMAND, command).strip()
    report = latest_report(folder)
    lines = [f"report: {report}"] if report else []
    if code in (INTERRUPTED, TERMINATED, HUNG_UP):
        request = shlex.join(["touch", str(folder / STOP_FILE)])
        lines = [f"no checkpoint was written now; to stop a run after its step with a checkpoint: {request}", *lines]
    if newest is None:
        return "\n".join([*lines, f"newest checkpoint: none in {folder}", f"begin again: {again}"])
    resume = "" if config.checkpoint.resumes else " checkpoint.resume=auto"
    return "\n".join([*lines, f"newest checkpoint: {newest}", f"go on from it: {again}{resume}"])


def latest_report(folder: Path) -> Path | None:
    """The run's, written now where rank 0 could not; None where there are no steps, or it cannot be written."""
    metrics, report = folder / METRICS_FILE, folder / "report.html"
    if not (metrics.is_file() and metrics.stat().st_size):
        return None
    if not report.is_file() or report.stat().st_mtime < metrics.stat().st_mtime:
        subprocess.run([sys.executable, "-m", "megasync", "report", str(folder)], capture_output=True, check=False)
    return report if report.is_file() else None
