"""Packages, shared memory and disk of this machine, and the findings of checks of it. No torch in here.

    check_shared_memory(free_bytes(MEMORY_FOLDER), segment_bytes(config, has_gpus=False))

Leaves out GPUs (devices.py) and most checks (tools/doctor).
"""

from __future__ import annotations

import math
import os
import re
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path
from typing import Literal

from bridge.processes import MEMORY_FOLDER
from megasync.config.errors import refuse_if
from megasync.config.files import existing, unwritable
from megasync.config.schema import Config

SKEW_SECONDS = 5.0  # between the clocks of two hosts
SEGMENT_BUFFERS = 2  # of a sender (bridge/transport/segment.py)
TEMPORARY_BYTES = 16 * 2**20  # logs of Ray and vLLM, compiled kernels; 4 MiB are enough for a few steps of a small run
RAY_BYTES = 200 * 2**20 + 16 * 2**20  # the object store of a run's own Ray (ray_cluster.py), vLLM's queues
Level = Literal["ok", "warning", "error"]


@dataclass(frozen=True)
class Finding:
    """The outcome of a check. error: training would fail; warning: it would be slow or differ from what the config says."""

    check: str
    level: Level
    seen: str
    remedy: str = ""


def gib(num_bytes: float) -> str:
    """A size with its unit: GiB, or MiB below one GiB."""
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.0f} MiB"


def installed(paths: Sequence[str] | None = None) -> dict[str, str]:
    """Versions of packages by normalised name. `paths`: folders to search instead of sys.path."""
    found = distributions(path=list(paths)) if paths is not None else distributions()
    return {normalised(each.name): each.version for each in reversed(list(found)) if each.name}


def normalised(name: str) -> str:
    """The name of a package as locks write it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def free_bytes(folder: Path) -> int:
    """Free bytes of the file system that holds `folder`, which need not exist yet; -1 where it cannot be read."""
    with suppress(OSError):
        return shutil.disk_usage(existing(folder)).free
    return -1


def check_temporary_folder() -> None:
    """ConfigError where TMPDIR cannot be written or is nearly full: Python would take /tmp or the working folder instead, without
    a word, and Ray and vLLM would end in errors that name no folder.
    """
    given = os.environ.get("TMPDIR", "")
    folder, name = Path(given or "/tmp"), f"TMPDIR = {given}" if given else "/tmp"  # noqa: S108
    remedy = "make the folder or free room in it, or set TMPDIR to another one on a disk of this machine"
    problem = unwritable(folder) if folder.exists() else "there is no such folder"
    refuse_if(problem, f"{name}: cannot hold temporary files: {problem}", remedy=remedy)
    free = free_bytes(folder)
    message = f"{name}: has {gib(free)} free, temporary files need {gib(TEMPORARY_BYTES)}"
    refuse_if(free < TEMPORARY_BYTES, message, remedy=remedy)


def segment_bytes(config: Config, *, has_gpus: bool) -> int:
    """Shared memory that a sync by `shm` needs: two buckets for each stage's sender."""
    transport = config.sync.transport
    is_shm = transport == "shm" or (transport == "auto" and not has_gpus)
    if config.algorithm.name != "grpo" or not is_shm:
        return 0
    return config.engine.parallel.pipeline * SEGMENT_BUFFERS * config.sync.bucket_bytes


def check_shared_memory(free: int, needed: int = 0) -> Finding:
    """`free`: bytes, -1 where there is no such folder; `needed`: `segment_bytes`."""
    name, wanted = str(MEMORY_FOLDER), needed + RAY_BYTES
    if free < 0:
        return Finding(name, "error", "there is no such folder", f"mount -t tmpfs tmpfs {name}")
    size = f"{math.ceil(wanted / 2**30)}g"
    remedy = f"docker: --shm-size={size}, Kubernetes: an emptyDir of medium Memory at {name}; or a smaller sync.bucket_bytes"
    if free < needed:
        return Finding(name, "error", f"{gib(free)} free, a sync needs {gib(needed)}", remedy)
    if free < wanted:
        return Finding(name, "warning", f"{gib(free)} free, a run needs {gib(wanted)}; Ray would use the disk", remedy)
    return Finding(name, "ok", f"{gib(free)} free")
