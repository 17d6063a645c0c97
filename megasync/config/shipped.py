"""Files that come with the program, beside it in a clone, within an installed package: configs, locks, templates of job files.

path = shipped("configs/quickstart.yaml")
"""

from __future__ import annotations

import os
from pathlib import Path

from megasync.config.errors import refuse_if

FOLDERS = ("configs", "locks", "launch/templates")  # as in setup.py
CLONE = Path(__file__).resolve().parents[2]
INSTALLED = Path(__file__).resolve().parents[1] / "shipped"  # where setup.py puts them; a clone has no such folder


def shipped(name: str) -> Path:
    """`name`: the path in the repository."""
    return (INSTALLED if INSTALLED.is_dir() else CLONE) / name


def clone(what: str) -> Path:
    """The clone's folder, for `what`, which takes more from there than an installed package has.

    Raises:
        ConfigError: there is none.
    """
    message = f"{what} takes the program from a clone, and {CLONE} is none"
    refuse_if(INSTALLED.is_dir(), message, remedy="clone the repository, and start it there as python -m megasync")
    return CLONE


def how_to_install(lane: str = "") -> str:
    """The line for an environment that lacks what trains; `lane`: cpu or gpu, empty for this machine's."""
    lane = lane or os.environ.get("MEGASYNC_LANE") or ("gpu" if Path("/dev/nvidia0").exists() else "cpu")
    return f"pip install '.[{lane}]' --constraint locks/{lane}.txt in a clone of the repository, or ./launch/setup.sh there"
