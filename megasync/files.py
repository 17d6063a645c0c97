"""Writing files so that a reader, or the next start after a crash, sees the former content or the new one, whole.

write_atomically(run_folder / "summary.json", text)
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


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
