"""Stands in for the trainer in test_submit.py: joins the ranks over gloo, then does what `run.name` says."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from megasync.config.load import load_config

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(argv: Sequence[str]) -> int:
    what = load_config(argv[0], argv[1:]).run.name
    dist.init_process_group("gloo")
    rank, total = dist.get_rank(), torch.ones(1)
    dist.all_reduce(total)
    print(f"rank {rank} counts {total.item():.0f} ranks, local {os.environ['LOCAL_RANK']}", flush=True)
    if rank == 1 and what == "raise":
        raise ValueError("broken on purpose")
    if rank == 1 and what == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1 and what == "code":
        print("rank 1 says why", flush=True)
        return 7
    if what != "succeed":
        dist.all_reduce(total)  # the other ranks wait for the one that failed
        time.sleep(600)
    return 0
