"""A Ray that is not the run's, and what former runs left: shared memory, folders, processes.

`snapshot` looks at this machine's processes; the checks judge what they are given.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from bridge.processes import MEMORY_FOLDER, SHARED_MEMORY
from megasync.config.errors import some
from megasync.diagnosis.finding import Finding, error, gib, ok, warning
from megasync.launch.scope import is_of_run, unreachable

SEGMENTS = (*SHARED_MEMORY, "cuda.shm.*", "torch_*")
# of launch/scope.py, launch/ray_cluster.py, bridge/processes.py and serving/replicas.py, as Python's tempfile ends their names
FOLDER = re.compile(r"(ms|ray)-[a-z0-9_]{8}|megasync-(?:vllm|serve)-(\d+)-[a-z0-9_]{8}")
SHOWN = 12
RANK = re.compile(r"megasync\.train\b|megasync\.rewards\.program|ray::(TrainerRank|Replica)\b|VLLM::")
LAUNCHERS = re.compile(r"megasync\.(launch\.torchrun|submit|quickstart|launch\.driver)\b")


@dataclass(frozen=True)
class Process:
    """One of this machine, as far as it can be looked at."""

    pid: int
    parent: int
    command: str
    folder: str = ""  # its TMPDIR


def snapshot() -> list[Process]:
    """All but this one."""
    found = []
    for each in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if each.pid != os.getpid() and each.status() != psutil.STATUS_ZOMBIE:
                folder = ""
                with suppress(psutil.Error, OSError):
                    folder = each.environ().get("TMPDIR", "")
                found.append(Process(each.pid, each.ppid(), " ".join(each.cmdline()), folder))
    return found


def mapped_inodes(folder: Path = MEMORY_FOLDER) -> set[int]:
    """Of files in `folder` that any process has mapped or open."""
    found: set[int] = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):
            lines = (line.split(maxsplit=5) for line in maps.read_text(errors="replace").splitlines())
            found |= {int(words[4]) for words in lines if len(words) == 6 and words[5].startswith(f"{folder}/")}
            for link in (maps.parent / "fd").iterdir():
                with suppress(OSError):
                    if str(link.readlink()).startswith(f"{folder}/"):
                        found.add(link.stat().st_ino)
    return found


def check_ray(environment: Mapping[str, str], processes: Sequence[Process], address: str) -> list[Finding]:
    """`address`: rollout.ray_address. A run with `local` starts a Ray of its own, whatever else there is."""
    found, given = list[Finding](), environment.get("RAY_ADDRESS", "")
    raylets = [each for each in processes if each.command.partition(" ")[0].endswith("/raylet")]
    if address == "local":
        if given:
            seen = f"RAY_ADDRESS={given}: a run with rollout.ray_address=local starts a Ray of its own all the same"
            found += warning("Ray", seen, "unset RAY_ADDRESS, or write rollout.ray_address=auto")
        if raylets:
            who = some([str(each.pid) for each in raylets])
            ours = any("/ms-" in each.command for each in raylets)
            what = "another run is going on" if ours else "a Ray of others"
            seen = f"{what} (raylet, process {who}): both count all cores and GPUs as their own"
            remedy = "wait for its end" if ours else "ray stop, or rollout.ray_address=auto to use it"
            found += warning("Ray", seen, remedy)
        return found or ok("Ray", "none here; a run starts its own")
    target = given or ("" if address == "auto" else address)
    others = [each for each in raylets if not is_of_run(each.command)]
    if not target and not others:
        return error("Ray", f"rollout.ray_address={address}: no Ray runs here", "ray start --head, or rollout.ray_address=local")
    if target and (problem := unreachable(target)):
        remedy = "start that Ray, correct the address, or write rollout.ray_address=local"
        return error("Ray", f"{target} does not answer: {problem}", remedy)
    return ok("Ray", target or f"raylet, process {others[0].pid}")


def check_segments(folder: Path, in_use: Iterable[int]) -> list[Finding]:
    """Shared memory by the names that vLLM, Python and CUDA give, which no process has."""
    used, lost = set(in_use), []
    for path in sorted({path for pattern in SEGMENTS for path in folder.glob(pattern)}):
        with suppress(OSError):
            stat = path.stat()
            if stat.st_ino not in used and stat.st_uid == os.geteuid():
                lost.append((path, stat.st_size))
    if not lost:
        return []
    names, total = some([path.name for path, _ in lost], 3), gib(sum(size for _, size in lost))
    seen = f"{len(lost)} files in {folder} that no process uses, {total}: {names}"
    return warning("leftovers", seen, command("rm", [str(path) for path, _ in lost]))


def check_folders(roots: Iterable[Path], processes: Sequence[Process]) -> list[Finding]:
    """Temporary folders of runs that no process has in its command or for its TMPDIR."""
    found = {path: match for root in roots for path in root.glob("*") if (match := FOLDER.fullmatch(path.name)) and path.is_dir()}
    texts = [f"{each.command} {each.folder}" for each in processes]
    pids = {each.pid for each in processes}
    lost = []
    for path, match in sorted(found.items()):
        is_used = int(match[2]) in pids if match[2] else any(str(path) in text for text in texts)
        with suppress(OSError):
            if not is_used and path.stat().st_uid == os.geteuid():
                lost.append(str(path))
    if not lost:
        return []
    seen = f"{len(lost)} folders of runs that are over: {some(lost, 3)}"
    return warning("leftovers", seen, command("rm -r", lost))


def command(verb: str, paths: Sequence[str]) -> str:
    """For a shell, with the first of the paths."""
    more = f"  # and {len(paths) - SHOWN} more" if len(paths) > SHOWN else ""
    return f"{verb} {shlex.join(paths[:SHOWN])}{more}"


def check_orphans(processes: Sequence[Process]) -> list[Finding]:
    """Ranks, replicas and reward processes whose launcher is gone: they are children of the first process, or of nobody."""
    pids = {each.pid for each in processes}
    lost = [
        each
        for each in processes
        if RANK.search(each.command) and not LAUNCHERS.search(each.command) and (each.parent <= 1 or each.parent not in pids)
    ]
    if not lost:
        return []
    seen = f"processes of a run whose launcher is gone: {some([f'{each.pid} ({each.command[:60]})' for each in lost], 3)}"
    return warning("leftovers", seen, f"kill {' '.join(str(each.pid) for each in lost)}")


def check_leftovers(folder: Path, roots: Iterable[Path], processes: Sequence[Process], in_use: Iterable[int]) -> list[Finding]:
    found = [*check_segments(folder, in_use), *check_folders(roots, processes), *check_orphans(processes)]
    return found or ok("leftovers", "none of former runs")
