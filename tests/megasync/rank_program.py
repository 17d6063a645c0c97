"""Stands in for the trainer in test_submit.py: joins the ranks over gloo, then does what `run.name` says."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from megasync.config.load import load_config
from megasync.rewards.functions import RewardInput
from megasync.rewards.resolve import resolve_rewards

if TYPE_CHECKING:
    from collections.abc import Sequence

    from megasync.config.schema import Config


def main(argv: Sequence[str]) -> int:
    config = load_config(argv[0], argv[1:])
    what = config.run.name
    dist.init_process_group("gloo")
    rank, total = dist.get_rank(), torch.ones(1)
    dist.all_reduce(total)
    print(f"rank {rank} counts {total.item():.0f} ranks, local {os.environ['LOCAL_RANK']}", flush=True)
    if what == "devices":
        say_devices(config, rank)
    elif rank == 1 and what == "raise":
        raise ValueError("broken on purpose")
    if rank == 1 and what == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1 and what == "code":
        (reward,) = resolve_rewards(config.rollout.reward)  # of a package that travelled with the job
        value = reward.function(RewardInput(prompt="1+1=", response="2", answer="2", num_tokens=1, max_tokens=1))
        print(f"rank 1 says why: its reward is {value}", flush=True)
        return 7
    if what not in ("succeed", "devices"):
        dist.all_reduce(total)  # the other ranks wait for the one that failed
        time.sleep(600)
    return 0


def say_devices(config: Config, rank: int) -> None:
    """The GPU that this rank would take; on rank 0 how many are left, and those of actors which are placed as replicas are."""
    seen = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
    print(f"rank {rank} is on {seen[int(os.environ['LOCAL_RANK'])]}", flush=True)
    if rank:
        return
    import ray

    from bridge.replicas.launched import placement_options
    from bridge.replicas.places import free_resources
    from megasync.run.replica_start import replica_config

    num_free = sum(free_resources("GPU").values())
    print(f"{num_free} GPUs of {ray.cluster_resources()['GPU']:.0f} are for replicas of their own", flush=True)

    class Replica:
        def devices(self) -> str:
            return os.environ["CUDA_VISIBLE_DEVICES"]

    for replica in range(config.rollout.replicas):
        actor = ray.remote(Replica).options(**placement_options(replica_config(config), replica, cuda=True)).remote()
        print(f"replica {replica} is on {ray.get(actor.devices.remote())}", flush=True)
