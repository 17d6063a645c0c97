"""A folder for what a command makes on its way, such as an adapter merged with its base model. No torch in here.

with scratch_folder() as folder:
    source = find_source(Path("runs/rl"), folder, step=None, overrides=[])
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megasync.launch.processes import end_on_sigterm


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """It goes with the block, also where SIGTERM ends that; what SIGKILL leaves `megasync doctor` knows by its name."""
    end_on_sigterm()
    with tempfile.TemporaryDirectory(prefix=f"megasync-serve-{os.getpid()}-") as folder:
        yield Path(folder)
