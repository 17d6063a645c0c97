"""Seconds of calls that a run has timed on this machine, for the plans of runs that start within an hour.

    with kept():
        plan_of_rank(...)      # times what no run has timed lately

Timing takes two seconds of every core that a run uses, at each start. Leaves out the timing (together.py), and `megasync plan`,
which times all anew.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from bridge.processes import MALLOC, host_identity
from megasync.config.files import write_atomically
from megasync.planning.cpu import together

KEPT_SECONDS = 3600.0
Entries = dict[str, tuple[float, float]]  # a call's seconds, and when it was timed


@contextmanager
def kept() -> Iterator[None]:
    """Within the block calls that were timed lately are not timed; in the end those that were are written down for others."""
    path, now = _path(), time.time()
    together.LATELY.update({call: seconds for call, (seconds, _) in _read(path, now).items()})
    try:
        yield
        if timed := {call: (seconds, now) for call, seconds in together.known().items() if call not in together.LATELY}:
            with suppress(OSError):  # such as a home that may not be written to: the next one times again
                write_atomically(path, json.dumps(_read(path, now) | timed))
    finally:
        together.LATELY.clear()


def _path() -> Path:
    """Of this machine since it was booted, with these cores, versions and settings."""
    facts = (host_identity(), torch.__version__, together.usable_cores(), os.environ.get(MALLOC, ""))
    name = hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megasync" / f"cpu-{name}.json"


def _read(path: Path, now: float) -> Entries:
    """Those that are young enough."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return {call: (seconds, at) for call, (seconds, at) in content.items() if 0 <= now - at < KEPT_SECONDS}
    except (OSError, ValueError, TypeError, AttributeError):  # none, or not of this program
        return {}
