"""Shared memory, disks, folders for temporary files, and the clock."""

from __future__ import annotations

import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from bridge.processes import LONGEST_PATH, RAY_PATH
from megasync.config.files import existing, unwritable
from megasync.diagnosis.finding import Finding, error, gib, ok, warning
from megasync.diagnosis.needs import Needs

SCOPE = len("/ms-12345678")  # the folder of a run (launch/scope.py)
LITTLE_BYTES = 2**30  # for logs and sockets
FULL_SHARE = 0.95  # of a disk: Ray then writes nothing to it any more (RAY_local_fs_capacity_threshold)
SKEW_SECONDS = 5.0


def check_shared_memory(free: int, needs: Needs, folder: str = "/dev/shm") -> list[Finding]:  # noqa: S108
    """`free`: bytes; -1 where there is no such folder."""
    size = f"{math.ceil(needs.roomy_shared_memory / 2**30)}g"
    remedy = f"docker: --shm-size={size}, Kubernetes: an emptyDir of medium Memory at {folder}; or a smaller sync.bucket_bytes"
    if free < 0:
        return error(folder, "there is no such folder, through which processes talk", f"mount -t tmpfs tmpfs {folder}")
    if free < needs.shared_memory:
        return error(folder, f"{gib(free)} free, a sync of this config takes {gib(needs.shared_memory)}", remedy)
    if free < needs.roomy_shared_memory:
        seen = (
            f"{gib(free)} free: a run takes {gib(needs.roomy_shared_memory)} with Ray's object store, which goes to the disk else"
        )
        return warning(folder, seen, remedy)
    takes = f", a run of this config takes {gib(needs.roomy_shared_memory)}" if needs.shared_memory else ""
    return ok(folder, f"{gib(free)} free{takes}")


def free_bytes(folder: Path) -> int:
    """Of the file system of the nearest folder that there is; -1 where there is none."""
    with suppress(OSError):
        return shutil.disk_usage(existing(folder)).free
    return -1


def bytes_below(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*") if folder.is_dir() else ():
        with suppress(OSError):
            total += path.lstat().st_size if path.is_file() else 0
    return total


def check_disk(folder: Path, free: int, held: int, needs: Needs) -> list[Finding]:
    """`held`: bytes of both that the run's folder has already, which make room for new ones."""
    if not needs.disk:
        return ok("disk", f"{gib(free)} free for {folder}")
    seen = f"{gib(free)} free for {folder}, its checkpoints and log of versions take {gib(needs.disk)}"
    if free + held < needs.disk:
        remedy = "write run.dir=FOLDER on another disk, a lower checkpoint.keep or sync.log_keep, or delete former runs"
        return error("disk", seen, remedy)
    return ok("disk", seen)


def check_run_folder(folder: Path, holder: str | None) -> list[Finding]:
    """Whether the run's folder can be made or written. `holder`: who has its lock, None for nobody."""
    if holder is not None:
        remedy = "wait for its end, end it, or write run.name=NAME for another run"
        return error("run folder", f"{folder}: a run is going on in it: {holder}", remedy)
    if problem := unwritable(folder):
        seen = f"{existing(folder)} cannot be written: {problem}"
        return error("run folder", seen, "write run.dir=FOLDER for a folder of yours")
    return ok("run folder", f"{folder}{'' if folder.exists() else ', to be made'}")


def check_temporary(requested: str | None, fallback: str = "/tmp") -> list[Finding]:  # noqa: S108
    """`requested`: TMPDIR. Sockets of Ray and vLLM lie there, or in `fallback` where their paths would be too long."""
    name, folder = "temporary files", requested or fallback
    if not _is_usable(folder):
        make = error if not _is_usable(fallback) else warning
        return make(name, f"{folder}: no folder that can be written", "let TMPDIR name one, or unset it")
    found: list[Finding] = []
    if len(folder) + RAY_PATH + SCOPE > LONGEST_PATH:
        if not _is_usable(fallback):
            seen = f"TMPDIR={folder} is too long for sockets, and {fallback} cannot be written"
            return error(name, seen, f"let TMPDIR name a folder of at most {LONGEST_PATH - RAY_PATH - SCOPE} letters")
        folder = fallback
    usage, flags = shutil.disk_usage(folder), os.statvfs(folder).f_flag
    if usage.free < LITTLE_BYTES or usage.free < (1 - FULL_SHARE) * usage.total:
        seen = f"{folder}: {gib(usage.free)} of {gib(usage.total)} free: Ray writes to no disk that is {FULL_SHARE:.0%} full"
        found += warning(name, seen, "make room, or let TMPDIR name a short path on another disk")
    if flags & os.ST_NOEXEC:
        seen = f"{folder} is mounted noexec: kernels that Triton and torch compile cannot be loaded from it"
        found += warning(name, seen, "let TMPDIR, TORCHINDUCTOR_CACHE_DIR and TRITON_CACHE_DIR name folders elsewhere")
    moved = folder != (requested or fallback)
    return found or ok(name, f"{folder}{' for sockets: TMPDIR is too long for them' if moved else ''}")


def _is_usable(folder: str) -> bool:
    return Path(folder).is_dir() and os.access(folder, os.W_OK | os.X_OK)


def newest_file(folder: Path) -> float:
    """When the newest of the Python files in it was written, in seconds since 1970."""
    return max((path.stat().st_mtime for path in folder.glob("*.py")), default=0.0)


def file_system_skew(folder: Path, clock: Callable[[], float] = time.time) -> float | None:
    """Seconds by which the file system's clock is ahead of this machine's; None where the folder cannot be written."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".probe-") as probe:
            begin = clock()
            probe.write(b"probe")
            probe.flush()
            os.fsync(probe.fileno())
            written, end = Path(probe.name).stat().st_mtime, clock()
    except OSError:
        return None
    return min(0.0, written - begin) + max(0.0, written - end)


def check_clock(now: float, newest: float, skew: float | None, rate: float) -> list[Finding]:
    """Seconds since 1970, whatever the time zone. `newest`: of our own files; `rate`: wall over monotonic seconds."""
    set_it = "set the clock: timedatectl set-ntp true, or chronyc makestep"
    if now < newest - SKEW_SECONDS:
        seen = f"{(newest - now) / 3600:.1f} hours behind the newest of the program's own files"
        return warning("clock", seen, f"{set_it}; Ray's tokens and certificates look out of date")
    if skew is not None and abs(skew) > SKEW_SECONDS:
        seen = f"the file system of the run's folder is {skew:+.0f} s off this machine's clock"
        return warning("clock", seen, f"{set_it}, on the file server too: the newest of files may not be")
    if not 0.5 < rate < 2:
        return warning("clock", f"{rate:.2f} times as fast as the monotonic one", f"{set_it}; speeds would be wrong")
    return ok("clock", "later than the program's files, steady" + ("" if skew is None else ", as the file system's"))


def clock_rate(seconds: float = 0.1) -> float:
    """Wall-clock seconds in one of the monotonic clock's."""
    wall, monotonic = time.time(), time.monotonic()
    time.sleep(seconds)
    return (time.time() - wall) / (time.monotonic() - monotonic)
