"""Whether a `stop` file in a run's folder is meant for this run: a launcher deletes, once, one that a former run left.

Every later one counts, also while nodes are waited for and while ranks start or restart. Times are compared only without one of
our launchers, as under plain torchrun, and for a job that waited for a cluster. Leaves out how a run stops (run/ending.py).

    forget_former_stop(run_folder)         # a launcher
    forget_stop_before_launch(run_folder)  # rank 0, under any launcher
"""

from __future__ import annotations

import math
import os
import time
from contextlib import suppress
from pathlib import Path

from megasync.config.files import STOP_FILE, forget_stop, lock

LAUNCHED = "MEGASYNC_LAUNCHED"  # environment variable: the folder of the run whose launcher has forgotten a former run's `stop`


def launched(run_folder: Path) -> dict[str, str]:
    """The environment of the ranks whose launcher has called `forget_former_stop`."""
    return {LAUNCHED: str(run_folder.resolve())}


def is_launched(run_folder: Path) -> bool:
    """Whether a launcher has started this process for this run, by the environment. One of another run does not count."""
    return os.environ.get(LAUNCHED) == launched(run_folder)[LAUNCHED]


def forget_former_stop(run_folder: Path, begin: float = math.inf) -> None:
    """For a launcher. Processes that it starts in its own environment inherit that this was done; it is done once.

    `begin`: seconds since the epoch; a `stop` that is newer stays, where the run was asked for before its launcher began.

    Raises:
        ConfigError: a run is going on in the folder; the `stop` there may be a request to it.
    """
    if is_launched(run_folder):
        return
    held = lock(run_folder)
    _forget_older(run_folder, begin)
    os.environ |= launched(run_folder)
    if held is not None:
        os.close(held)


def forget_stop_before_launch(run_folder: Path) -> None:
    """For rank 0, which has locked the folder. Without a launcher of ours a `stop` older than `launch_time` is a former run's."""
    if not is_launched(run_folder):
        _forget_older(run_folder, launch_time())


def _forget_older(run_folder: Path, begin: float) -> None:
    with suppress(FileNotFoundError):
        if (run_folder / STOP_FILE).stat().st_mtime < begin:
            forget_stop(run_folder)


def launch_time() -> float:
    """Seconds since the epoch: when torchrun began, whose process stays in all of its rounds; without it when this rank began."""
    process = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else os.getpid()
    # man 5 proc_pid_stat: the 22nd field, in ticks since the boot. The name, in brackets, may hold blanks.
    ticks = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[19]
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(ticks) / os.sysconf("SC_CLK_TCK")
    return time.time() - age
