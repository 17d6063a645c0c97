"""Two processes that all-reduce over gloo or NCCL, as trainer ranks do. Started by network.py.

python -m megasync.tools.doctor.probe nccl        # prints seconds and GB/s of an all-reduce
"""

from __future__ import annotations

import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

NUM_RANKS, ROUNDS = 2, 5
NUM_BYTES = {"gloo": 2**20, "nccl": 2**28}
SECONDS = 60


def run_rank(rank: int, backend: str, rendezvous: str) -> None:
    """RuntimeError where the sum is wrong, or the other process cannot be reached."""
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, rendezvous, timeout=timedelta(seconds=SECONDS), rank=rank, world_size=NUM_RANKS)
    values = torch.full((NUM_BYTES[backend] // 4,), float(rank + 1), device=device)
    dist.all_reduce(values)
    if bool((values != sum(range(1, NUM_RANKS + 1))).any()):
        raise RuntimeError(f"wrong sum: {values[:4].tolist()}")
    begin = time.monotonic()
    for _ in range(ROUNDS):
        dist.all_reduce(values)
    values.sum().item()  # waits for the device
    seconds = (time.monotonic() - begin) / ROUNDS
    dist.destroy_process_group()
    if rank == 0:
        print(f"{seconds:.6f} {values.nbytes / seconds / 1e9:.2f}", flush=True)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        spawn(run_rank, (sys.argv[1], f"file://{Path(folder) / 'store'}"), NUM_RANKS)  # type: ignore[no-untyped-call]
