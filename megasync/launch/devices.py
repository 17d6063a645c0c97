"""Which of a machine's GPUs the trainer ranks, the vLLM replicas and a Ray of our own get. No torch in here.

GPUs are named as in CUDA_VISIBLE_DEVICES. Trainer rank i of a machine has the i-th GPU that its ranks see. Leaves out
who uses shared GPUs when (placement.py).
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

SMI_SECONDS = 120.0  # a driver that does not stay loaded takes seconds a GPU


def visible_devices() -> tuple[str, ...]:
    """The GPUs that a process started from here sees; none on a machine without GPUs, whatever CUDA_VISIBLE_DEVICES lists."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return tuple(str(index) for index in range(len(gpu_names())))
    names = tuple(name for name in listed.split(",") if name.strip() not in ("", "-1"))
    return names if names and (any(Path("/dev").glob("nvidia[0-9]*")) or gpu_names()) else ()


def gpu_names() -> list[str]:
    """Names that nvidia-smi gives to the GPUs of this machine."""
    lines = [line for line in ask_nvidia_smi("-L").splitlines() if line.startswith("GPU ")]
    return [line.partition(": ")[2].partition(" (")[0] for line in lines]


def compute_capabilities() -> list[float]:
    """Compute capabilities of the visible GPUs; none where nvidia-smi does not say."""
    if not (visible := visible_devices()):
        return []
    listed = ask_nvidia_smi("-i", ",".join(visible), "--query-gpu=compute_cap", "--format=csv,noheader")
    return [float(each) for each in listed.split() if each.replace(".", "", 1).isdigit()]


def ask_nvidia_smi(*arguments: str) -> str:
    """Its output, that of an error too; empty where there is none, or it hangs."""
    if shutil.which("nvidia-smi") is None:
        return ""
    try:
        done = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, check=False, timeout=SMI_SECONDS)
    except subprocess.TimeoutExpired:
        return ""
    return done.stdout  # of several GPUs one may fail


def replica_devices(visible: Sequence[str], num_replicas: int, tensor_parallel: int) -> tuple[str, ...]:
    """CUDA_VISIBLE_DEVICES of each replica: the next `tensor_parallel` of `visible` each; nothing on a machine without GPUs.

    Worker number r of all replicas is on the GPU of the machine's trainer rank r.

    Raises:
        ValueError: there are fewer GPUs than vLLM workers.
    """
    if not visible:
        return ()
    if num_replicas * tensor_parallel > len(visible):
        raise ValueError(
            f"rollout.replicas={num_replicas} times rollout.tensor_parallel={tensor_parallel} needs "
            f"{num_replicas * tensor_parallel} GPUs, the trainer's machine has {len(visible)}; lower one of them"
        )
    starts = range(0, num_replicas * tensor_parallel, tensor_parallel)
    return tuple(",".join(visible[start : start + tensor_parallel]) for start in starts)


def devices_for_ray(visible: Sequence[str], num_local_ranks: int, *, is_colocated: bool) -> tuple[str, ...] | None:
    """GPUs that a Ray started by a trainer rank may give to replicas: those after the trainer ranks' GPUs, where the replicas
    have their own; None: all.
    """
    return None if is_colocated or not visible else tuple(visible[num_local_ranks:])
