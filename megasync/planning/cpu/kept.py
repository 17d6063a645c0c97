"""Seconds of calls that a run has timed, for the plans of other runs: of a suite of tests, whose plans nobody looks at.

    MEGASYNC_TIMED_CALLS=FILE      # environment variable; without it nothing is kept
    with kept():
        plan_of_rank(...)          # times what no run before has timed

Timing takes two seconds of every core that a run uses, at each start. Leaves out the timing (together.py), and `megasync plan`,
which times all anew.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megasync.config.files import write_atomically
from megasync.planning.cpu import together

FILE = "MEGASYNC_TIMED_CALLS"


@contextmanager
def kept() -> Iterator[None]:
    """Within the block calls that a run before has timed are not timed; those that were are written down for others."""
    if not (given := os.environ.get(FILE)):
        yield
        return
    path = Path(given)
    together.LATELY.update(_read(path))
    try:
        yield
        if timed := {call: seconds for call, seconds in together.known().items() if call not in together.LATELY}:
            write_atomically(path, json.dumps(_read(path) | timed))
    finally:
        together.LATELY.clear()


def _read(path: Path) -> dict[str, float]:
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}
