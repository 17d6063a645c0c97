"""What a launcher says last of a run that did not come to its end: report, newest checkpoint, the command that goes on."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

from megasync.config.files import METRICS_FILE, STOP_FILE, newest_checkpoint
from megasync.config.schema import Config
from megasync.launch.processes import INTERRUPTED, TERMINATED

COMMAND = "MEGASYNC_COMMAND"  # environment variable of the scripts in launch/: what the user typed


def last_words(config: Config, command: str, code: int = 1) -> str:
    """`command`: the launcher's own, where the user typed no script's. `code`: its exit code."""
    newest, again = newest_checkpoint(config.run.folder), os.environ.get(COMMAND, command).strip()
    report = latest_report(config.run.folder)
    told = [f"report: {report}"] if report else []
    if code in (INTERRUPTED, TERMINATED):
        asked = shlex.join(["touch", str(config.run.folder / STOP_FILE)])
        told = [f"no checkpoint was written now; to stop a run after its step with a checkpoint: {asked}", *told]
    if newest is None:
        return "\n".join([*told, f"newest checkpoint: none in {config.run.folder}", f"begin again: {again}"])
    if not config.checkpoint.resumes:
        again += " checkpoint.resume=auto"
    return "\n".join([*told, f"newest checkpoint: {newest}", f"go on from it: {again}"])


def latest_report(folder: Path) -> Path | None:
    """The run's, written now where rank 0 could not; None where there are no steps, or it cannot be written."""
    metrics, report = folder / METRICS_FILE, folder / "report.html"
    if not (metrics.is_file() and metrics.stat().st_size):
        return None
    if not report.is_file() or report.stat().st_mtime < metrics.stat().st_mtime:
        subprocess.run([sys.executable, "-m", "megasync.report", str(folder)], capture_output=True, check=False)
    return report if report.is_file() else None
