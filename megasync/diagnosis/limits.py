"""Limits of processes: ulimits, control groups, memory, threads. `read_*` read this machine's, `check_*` judge."""

from __future__ import annotations

import os
import resource
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from megasync.diagnosis.finding import Finding, error, gib, ok, warning
from megasync.diagnosis.needs import Needs

CGROUPS = Path("/sys/fs/cgroup")
FEW_FILES, GOOD_FILES = 1024, 4096  # Ray warns below the second (ray/_private/services.py)
FEW_TASKS, GOOD_TASKS = 512, 2048  # threads of a small run: Ray has some hundred, each rank and vLLM some dozen
SMALL_LOCKED_BYTES = 2**30
NO_LIMIT_BYTES = 2**60  # the first version of control groups has a number for none
TIGHT = 1.2


@dataclass(frozen=True)
class Limits:
    """-1: none."""

    open_files: int = -1
    hard_open_files: int = -1
    processes: int = -1
    locked_bytes: int = -1
    tasks: int = -1  # of the control group, and so the next
    used_tasks: int = 0


def read_limits(cgroups: Path = CGROUPS) -> Limits:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    is_root = os.geteuid() == 0  # to whom the limit of processes does not apply
    processes = -1 if is_root else resource.getrlimit(resource.RLIMIT_NPROC)[0]
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    tasks = read_number(cgroups / "pids.max", cgroups / "pids/pids.max")
    used = read_number(cgroups / "pids.current", cgroups / "pids/pids.current")
    return Limits(soft, hard, processes, locked, tasks, max(0, used))


def read_number(*paths: Path) -> int:
    """Of the first file that there is; -1 where there is none, or it says `max`."""
    for path in paths:
        with suppress(OSError):
            text = path.read_text().strip()
            return int(text) if text.isdigit() and int(text) < NO_LIMIT_BYTES else -1
    return -1


def read_memory(cgroups: Path = CGROUPS) -> tuple[int, int]:
    """Bytes that can still be had, and the limit of the control group, -1 where there is none."""
    limit = read_number(cgroups / "memory.max", cgroups / "memory/memory.limit_in_bytes")
    used = read_number(cgroups / "memory.current", cgroups / "memory/memory.usage_in_bytes")
    free = int(psutil.virtual_memory().available)
    return (free, -1) if limit < 0 else (min(free, limit - max(0, used) + _cached(cgroups)), limit)


def _cached(cgroups: Path) -> int:
    """What counts as used and goes when memory is wanted: files in the page cache."""
    for path in (cgroups / "memory.stat", cgroups / "memory/memory.stat"):
        with suppress(OSError):
            fields = dict(line.split(maxsplit=1) for line in path.read_text().splitlines())
            return int(fields.get("inactive_file") or fields.get("total_inactive_file") or 0)
    return 0


def check_limits(limits: Limits, *, has_infiniband: bool) -> list[Finding]:
    """Open files, processes and threads, locked memory."""
    return [*_check_files(limits), *_check_tasks(limits), *_check_locked(limits, has_infiniband=has_infiniband)]


def _check_files(limits: Limits) -> list[Finding]:
    soft, hard = limits.open_files, limits.hard_open_files
    if 0 <= soft < FEW_FILES:
        reachable = f"ulimit -n {hard if 0 <= hard < 2**16 else 2**16}"
        remedy = reachable if hard < 0 or hard >= GOOD_FILES else "raise nofile in limits.conf (docker: --ulimit nofile=65536)"
        return error("open files", f"at most {soft}: Ray and vLLM run out of sockets", remedy)
    if 0 <= soft < GOOD_FILES:
        return warning("open files", f"at most {soft}: few for several replicas or hosts", "ulimit -n 65536")
    return ok("open files", f"at most {soft}" if soft >= 0 else "no limit")


def _check_tasks(limits: Limits) -> list[Finding]:
    left = {"ulimit -u": limits.processes, "pids.max": limits.tasks - limits.used_tasks if limits.tasks >= 0 else -1}
    name, number = min(
        ((name, number) for name, number in left.items() if number >= 0), key=lambda item: item[1], default=("", -1)
    )
    remedy = "ulimit -u unlimited" if name == "ulimit -u" else "docker: --pids-limit=-1; Kubernetes: podPidsLimit"
    if 0 <= number < FEW_TASKS:
        return error("processes", f"{number} threads and processes are left ({name}): `can't start new thread`", remedy)
    if 0 <= number < GOOD_TASKS:
        return warning("processes", f"{number} threads and processes are left ({name})", remedy)
    return ok("processes", f"{number} left ({name})" if number >= 0 else "no limit")


def _check_locked(limits: Limits, *, has_infiniband: bool) -> list[Finding]:
    """NCCL registers memory with InfiniBand's cards, which counts as locked."""
    locked = limits.locked_bytes
    if has_infiniband and 0 <= locked < SMALL_LOCKED_BYTES:
        seen = f"at most {gib(locked)}: too little for NCCL over InfiniBand, between hosts"
        return warning("locked memory", seen, "ulimit -l unlimited (docker: --ulimit memlock=-1)")
    return ok("locked memory", f"at most {gib(locked)}; nothing here needs more" if locked >= 0 else "no limit")


def check_memory(free: int, limit: int, needs: Needs) -> list[Finding]:
    """Host memory against the least that the config takes."""
    of = f", of a control group's limit of {gib(limit)}" if limit >= 0 else ""
    seen = f"{gib(free)} free{of}; the config takes {gib(needs.host_memory)} or more"
    if not needs.host_memory:
        return ok("memory", f"{gib(free)} free{of}")
    remedy = "a higher limit (docker: --memory), fewer ranks or replicas, or a smaller rollout.kv_cache_bytes"
    if free < needs.host_memory:
        return error("memory", seen, remedy)
    if free < TIGHT * needs.host_memory:
        return warning("memory", seen, remedy)
    return ok("memory", seen)


def check_threads(environment: Mapping[str, str], cores: int, num_ranks: int, *, has_gpus: bool) -> list[Finding]:
    """OMP_NUM_THREADS, of which each rank has its own."""
    name = "OMP_NUM_THREADS"
    given = environment.get(name)
    good = max(1, cores // max(1, num_ranks))
    if given is None:
        if has_gpus:
            return ok(name, "not set: torchrun and the scripts in launch/ write 1")
        seen = f"not set: by itself each of {num_ranks} ranks takes all {cores} cores; the scripts in launch/ write 1"
        return ok(name, seen) if num_ranks == 1 or cores == 1 else warning(name, seen, f"export {name}={good}")
    if not given.strip().isdigit() or int(given) == 0:
        return warning(name, f"{name}={given}: no number of threads", f"export {name}={good}")
    if int(given) * num_ranks > cores and int(given) > 1:
        seen = f"{name}={given}: {num_ranks} ranks have {int(given) * num_ranks} threads on {cores} cores"
        return warning(name, seen, f"export {name}={good}")
    return ok(name, given)
