"""The GPUs of this machine as nvidia-smi lists them: driver, which are visible, memory in use; and processes left by former runs.

Leaves out transfers between GPUs (network.py), and whether a model fits (`megasync plan`). No torch in here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megasync.config.errors import some
from megasync.launch.devices import ask_nvidia_smi
from megasync.launch.machine import Finding

QUERY = "index,name,uuid,memory.total,memory.used,driver_version"
MIN_DRIVER = {11: 450, 12: 525, 13: 580}  # of each CUDA major (CUDA release notes, minor version compatibility)
BUSY_SHARE = 0.05  # of a GPU's memory; the driver itself takes less
WORKER = re.compile(r"megasync\.train\b|megasync\.workers\.fork_server\b|ray::(TrainerRank|Replica|Host)\b|VLLM::")
LAUNCHER = re.compile(r"megasync\.(submit|launch\.torchrun|launch\.driver)\b")  # whose commands name megasync.train, too


class Gpu(NamedTuple):
    """One line of nvidia-smi; memory in MiB."""

    number: int
    name: str
    uuid: str
    total: int
    used: int
    driver: str


@dataclass(frozen=True)
class GpuUse:
    """How a run uses its visible GPUs: the first `num_ranks` for the trainer, the next for replicas."""

    num_ranks: int = 1
    replica_gpus: int = 0
    replica_share: float = 0.0  # rollout.gpu_memory_utilization; 0: no replicas
    is_colocated: bool = False


class Process(NamedTuple):
    """A process of this machine."""

    pid: int
    parent: int
    command: str


def parse_gpus(text: str) -> list[Gpu]:
    """GPUs of the output for the fields QUERY, one GPU a line."""
    rows = [[field.strip() for field in line.split(",")] for line in text.splitlines()]
    numbers = [[int(field) if field.isdigit() else 0 for field in row] for row in rows]
    return [
        Gpu(number[0], row[1], row[2], number[3], number[4], row[5])
        for row, number in zip(rows, numbers, strict=True)
        if len(row) == len(Gpu._fields) and row[0].isdigit()
    ]


def read_gpus() -> list[Gpu]:
    return parse_gpus(ask_nvidia_smi(f"--query-gpu={QUERY}", "--format=csv,noheader,nounits"))


def read_users() -> dict[str, list[str]]:
    """Processes that compute on GPUs, by the GPU's uuid."""
    users: dict[str, list[str]] = {}
    listed = ask_nvidia_smi("--query-compute-apps=gpu_uuid,pid,used_memory,process_name", "--format=csv,noheader,nounits")
    for uuid, pid, mib, name in (map(str.strip, line.split(",", 3)) for line in listed.splitlines() if line.count(",") >= 3):
        users.setdefault(uuid, []).append(f"{pid} ({name.rpartition('/')[2]}, {mib} MiB)")
    return users


def check_driver(gpus: Sequence[Gpu], cuda: str | None, lane: str, *, has_device: bool) -> Finding:
    """`cuda`: torch's, '' for a CPU build, None without torch; `has_device`: whether Linux has a device file of an NVIDIA GPU."""
    name = "CUDA driver"
    if not gpus and has_device:
        remedy = "install or reload the NVIDIA driver until nvidia-smi lists the GPUs; in a container: --gpus all"
        return Finding(name, "error", "there is an NVIDIA GPU, and nvidia-smi does not answer", remedy)
    if not gpus and (lane == "gpu" or cuda):
        return Finding(
            name, "error", "no GPU, and this is lane gpu", "MEGASYNC_LANE=cpu ./launch/setup.sh, or take another machine"
        )
    if not gpus or not cuda:
        seen = f"{len(gpus)} GPUs, " + ("torch is not installed" if cuda is None else "torch is a build for CPUs")
        is_wrong, remedy = bool(gpus) and lane == "gpu", "MEGASYNC_LANE=gpu ./launch/setup.sh installs torch for CUDA"
        return Finding(name, "error", seen, remedy) if is_wrong else Finding(name, "ok", seen)
    driver, least = gpus[0].driver, MIN_DRIVER.get(int(cuda.partition(".")[0]), max(MIN_DRIVER.values()))
    if driver.partition(".")[0].isdigit() and int(driver.partition(".")[0]) < least:
        remedy = f"install driver {least} or newer, or a torch for an older CUDA"
        return Finding(name, "error", f"driver {driver}: torch's CUDA {cuda} needs {least} or newer", remedy)
    return Finding(name, "ok", f"driver {driver}, torch for CUDA {cuda}")


def visible(gpus: Sequence[Gpu], listed: str | None) -> tuple[list[Gpu], list[str]]:
    """The GPUs that CUDA_VISIBLE_DEVICES lists, in its order, and the names in it that no GPU has. `listed` None: all."""
    if listed is None:
        return list(gpus), []
    names = [name.strip() for name in listed.split(",") if name.strip() not in ("", "-1")]
    found = {name: [gpu for gpu in gpus if name in (str(gpu.number), gpu.uuid[: max(5, len(name))])] for name in names}
    unknown = [name for name, of_name in found.items() if not of_name and not name.startswith("MIG-")]
    return [gpu for name in names for gpu in found[name]], unknown


def check_visible(gpus: Sequence[Gpu], listed: str | None, use: GpuUse) -> Finding:
    """Whether as many GPUs are visible as the run needs. `gpus`: all of the machine, at least one."""
    there, unknown = visible(gpus, listed)
    if unknown:
        remedy = f"list some of {','.join(str(gpu.number) for gpu in gpus)}: CUDA ignores all from the first unknown name on"
        return Finding("GPUs", "error", f"CUDA_VISIBLE_DEVICES={listed}: there is no GPU {some(unknown)}", remedy)
    if not there:
        seen = f"CUDA_VISIBLE_DEVICES={listed!r} hides all {len(gpus)} GPUs: the run would use the CPU"
        return Finding("GPUs", "warning", seen, "unset CUDA_VISIBLE_DEVICES")
    if use.num_ranks + use.replica_gpus > len(there):
        seen = f"{len(there)} visible, {use.num_ranks} trainer ranks and {use.replica_gpus} for replicas are needed"
        return Finding("GPUs", "error", seen, "start fewer ranks or rollout.replicas, or write rollout.placement=colocated")
    return Finding("GPUs", "ok", f"{len(there)} visible: {some(sorted({gpu.name for gpu in there}))}")


def check_multicast(*, is_available: bool) -> Finding:
    """Whether GPUs of this machine have multicast; without it replicas of several workers reduce a little more slowly."""
    without = "not available: vLLM's fused all-reduce is switched off in replicas of several workers"
    return Finding("NVLink multicast", "ok", "available" if is_available else without)


def check_gpu_memory(gpus: Sequence[Gpu], users: dict[str, list[str]], use: GpuUse) -> Iterator[Finding]:
    """Memory of visible GPUs that other processes hold: vLLM does not start where its share is not free."""
    first = 0 if use.is_colocated else use.num_ranks
    replicas = gpus[first : use.num_ranks + use.replica_gpus] if use.replica_share else ()
    for gpu in gpus:
        who = f" by {some(users[gpu.uuid], 3)}" if users.get(gpu.uuid) else ""
        seen = f"GPU {gpu.number}: {gpu.used} of {gpu.total} MiB are in use{who}"
        remedy = "end these processes, or choose other GPUs by CUDA_VISIBLE_DEVICES"
        if gpu in replicas and gpu.used + use.replica_share * gpu.total > gpu.total:
            share = int((1 - gpu.used / gpu.total) * 100) / 100
            remedy += f", or write rollout.gpu_memory_utilization={share:g} or less"
            yield Finding("GPU memory", "error", f"{seen}, vLLM needs {use.replica_share:g} of it", remedy)
        elif gpu.used > BUSY_SHARE * gpu.total:
            yield Finding("GPU memory", "warning", seen, remedy)


def check_leftovers(processes: Sequence[Process]) -> Finding:
    """Ranks, replicas and workers of user code whose launcher has ended: they are children of process 1, or of none."""
    pids = {each.pid for each in processes}
    ours = [each for each in processes if WORKER.search(each.command) and not LAUNCHER.search(each.command)]
    orphans = [each for each in ours if each.parent <= 1 or each.parent not in pids]
    if not orphans:
        return Finding("leftovers", "ok", "no processes of former runs")
    seen = f"processes of a run whose launcher has ended: {some([f'{each.pid} ({each.command[:60]})' for each in orphans], 3)}"
    return Finding("leftovers", "warning", seen, f"kill {' '.join(str(each.pid) for each in orphans)}")
