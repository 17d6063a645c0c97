"""One of two processes that add numbers up over gloo or NCCL, as trainer ranks do. Started by network.py.

python -m megasync.diagnosis.probe gloo 0 29500        # backend, rank, port; prints seconds and GB/s
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

NUM_RANKS, ROUNDS = 2, 5
NUM_BYTES = {"gloo": 2**20, "nccl": 2**28}
SECONDS = 60
DONE = "all-reduce: "  # as network.py looks for it


def main(arguments: Sequence[str]) -> int:
    """Exit code 1 where the sum is wrong; an exception where there is no way to the other process."""
    backend, rank, port = arguments[0], int(arguments[1]), int(arguments[2])
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group(backend, address, timeout=timedelta(seconds=SECONDS), rank=rank, world_size=NUM_RANKS)
    values = torch.full((NUM_BYTES[backend] // 4,), float(rank + 1), device=device)
    dist.all_reduce(values)
    is_right = bool((values == sum(range(1, NUM_RANKS + 1))).all())
    dist.barrier()
    begin = time.monotonic()
    for _ in range(ROUNDS):
        dist.all_reduce(values)
    total = float(values[0])  # waits for the device
    seconds = (time.monotonic() - begin) / ROUNDS
    dist.destroy_process_group()
    print(f"{DONE}{seconds:.6f} {values.nbytes / seconds / 1e9:.2f}" if is_right else f"wrong sum: {total}", flush=True)
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
