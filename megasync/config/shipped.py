"""Files that come with megasync: configs, locks, templates of job files; in a clone or within the installed package.

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
    """The path of a shipped file; `name`: its path in the repository."""
    return (INSTALLED if INSTALLED.is_dir() else CLONE) / name


def clone(what: str) -> Path:
    """The clone's folder. `what`: the command that needs files that an installed package does not have.

    Raises:
        ConfigError: megasync is installed and does not run from a clone.
    """
    message = f"{what} needs a clone of the repository, and {CLONE} is not one"
    refuse_if(INSTALLED.is_dir(), message, remedy="clone the repository, and start it there as python -m megasync")
    return CLONE


def how_to_install(lane: str = "") -> str:
    """The command that installs the packages for training. `lane`: cpu or gpu; empty: chosen for this machine."""
    lane = lane or os.environ.get("MEGASYNC_LANE") or ("gpu" if Path("/dev/nvidia0").exists() else "cpu")
    return f"pip install '.[{lane}]' --constraint locks/{lane}.txt in a clone of the repository, or ./launch/setup.sh there"
