"""Limits and disks of this machine. Leaves out shared memory (launch/machine.py). No torch in here."""

from __future__ import annotations

import math
from contextlib import suppress
from pathlib import Path

from engine.config import DTYPE_BYTES
from megasync.config.schema import Config
from megasync.launch.machine import Finding, gib

MIN_OPEN_FILES, GOOD_OPEN_FILES = 1024, 4096  # Ray warns below the second (ray/_private/services.py)
# of a version's bytes, at small learning rates (docs/verify.md): larger ones, or new optimizers, change more weights
DELTA_SHARE = {"bfloat16": 0.005, "float16": 0.005, "float32": 0.6}
SAVED_BYTES = 12  # of a parameter, in a checkpoint beside the weights: Adam's two moments and the main weight, float32


def check_open_files(soft: int, hard: int) -> Finding:
    """RLIMIT_NOFILE; -1: no limit."""
    seen = f"at most {soft}: Ray and vLLM need more sockets for several replicas"
    can_raise = hard < 0 or hard >= GOOD_OPEN_FILES
    remedy = f"ulimit -n {min(hard, 2**16) if hard >= 0 else 2**16}" if can_raise else "docker: --ulimit nofile=65536"
    if 0 <= soft < GOOD_OPEN_FILES:
        return Finding("open files", "error" if soft < MIN_OPEN_FILES else "warning", seen, remedy)
    return Finding("open files", "ok", f"at most {soft}" if soft >= 0 else "no limit")


def disk_bytes(config: Config, parameters: int) -> int:
    """Checkpoints that are kept and one that is being written, the exported folder, the log of versions.

    `parameters`: of the model. Checkpoints of adapters are small and not counted.
    """
    weights, every = parameters * DTYPE_BYTES[config.model.dtype], config.checkpoint.every_steps
    needed = weights if config.run.export_hf else 0
    if not config.engine.lora.rank:
        kept = min(config.checkpoint.keep + 1, -(-config.run.steps // every)) if every else 0
        needed += kept * (weights + parameters * SAVED_BYTES)
        needed += weights if config.checkpoint.resume == "newest_weights" else 0  # rebuilt at the start (run/checkpoints.py)
    return needed + log_bytes(config, parameters)


def log_bytes(config: Config, parameters: int) -> int:
    """Bytes of the log of versions, at the end of an uninterrupted run: each resumed process begins with a whole version."""
    if config.algorithm.name != "grpo" or config.sync.log != "deltas":
        return 0
    every, versions = config.sync.log_full_every, config.run.steps + 1
    if config.sync.log_keep is not None:
        versions = min(versions, config.sync.log_keep + every)  # the oldest kept version is made of up to `every` before it
    whole = math.ceil(versions / every)
    weights = parameters * DTYPE_BYTES[config.model.dtype]
    return round(weights * (whole + (versions - whole) * DELTA_SHARE[config.model.dtype]))


def bytes_below(folder: Path) -> int:
    """Bytes of all files in a folder and its folders."""
    total = 0
    for path in folder.rglob("*"):
        with suppress(OSError):
            total += path.lstat().st_size if path.is_file() else 0
    return total


def check_disk(folder: Path, free: int, needed: int) -> Finding:
    """`needed`: bytes that the run will add to its folder."""
    seen = f"{gib(free)} free for {folder}, a run needs {gib(max(0, needed))}"
    remedy = "write run.dir=FOLDER on another disk, a lower checkpoint.keep or sync.log_keep, or delete former runs"
    return Finding("disk", "error", seen, remedy) if free < needed else Finding("disk", "ok", seen)


def check_run_folder(folder: Path, holder: str | None) -> Finding:
    """`holder` of its lock, or None. The config's check finds out whether it can be written."""
    if holder is None:
        return Finding("run folder", "ok", f"{folder}, which no run uses")
    remedy = "wait for its end, end it, or write run.name=NAME for another run"
    return Finding("run folder", "error", f"{folder}: used by a run: {holder}", remedy)
