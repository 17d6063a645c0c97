"""Files of a run: written so that a reader, or the next start after a crash, sees the former content or the new one, whole.

write_atomically(run_folder / "summary.json", text)
former = set_aside(run_folder)      # runs/NAME becomes runs/NAME.1 if it holds the results of a former run
"""

from __future__ import annotations

import itertools
import os
import tempfile
from pathlib import Path

CHECKPOINTS = "checkpoints"
METRICS_FILE = "metrics.jsonl"
EVALUATIONS_FILE = "evaluations.jsonl"
SAMPLES_FILE = "samples.jsonl"


def has_results(run_folder: Path) -> bool:
    """Whether a run left steps, evaluations or checkpoints in it."""
    records = (run_folder / name for name in (METRICS_FILE, EVALUATIONS_FILE))
    return any(path.is_file() and path.stat().st_size for path in records) or any((run_folder / CHECKPOINTS).glob("step_*"))


def set_aside(run_folder: Path) -> Path | None:
    """Renames a folder with results to the first name of FOLDER.1, FOLDER.2, ... that is free; returns it. No results: None."""
    if not has_results(run_folder):
        return None
    names = (run_folder.with_name(f"{run_folder.name}.{number}") for number in itertools.count(1))
    free = next(path for path in names if not path.exists())
    return run_folder.rename(free)


def write_atomically(path: Path, text: str) -> None:
    """Replaces `path` by `text` (UTF-8) in one step; makes its folder if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, draft = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(draft).chmod(0o644)
        Path(draft).replace(path)
    except BaseException:
        Path(draft).unlink(missing_ok=True)
        raise


def flush(path: Path) -> None:
    """Waits until the file is on the disk, not only in the page cache."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
