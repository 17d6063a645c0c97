"""Replicas start beside the trainer: Ray and vLLM come up on rank 0 while every rank builds its model.

Leaves out how an actor starts (bridge/replicas/launched.py), and what the replicas are used for (weights.py).
"""

from __future__ import annotations

import os
from contextlib import ExitStack, suppress
from dataclasses import fields, replace
from pathlib import Path

import psutil
import torch

from bridge.config import ReplicaConfig
from bridge.replicas.pool import ReplicaPool
from engine.config import DTYPE_BYTES
from megasync.config.schema import Config, RolloutConfig
from megasync.launch.devices import devices_for_ray, replica_devices, visible_devices
from megasync.launch.ray_cluster import start_ray
from megasync.launch.scope import ray_address
from megasync.models.folder import most_parameters

STATE_BYTES = 24  # of the trainer for each parameter, at most: weights, gradients, float32 copy, moments
TRAINER_BYTES = 2 * 2**30  # beside them once its model is built: CUDA's context
WORKER_BYTES = 8 * 2**30  # of a vLLM worker beside weights and KV cache: activations, CUDA graphs, workspaces, CUDA's context
FREE_SHARE = 0.9


class ReplicaStart:
    """Rank 0's. `close` in any case."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self._ends = ExitStack()  # calls all, the last first, whatever one of them raises
        self._pool: ReplicaPool | None = None

    def begin(self) -> None:
        """Does not wait for replicas. Errors are kept: `finish` retries and raises on all ranks.

        To be called once this process has the environment of the replicas.
        """
        with suppress(Exception):  # such as GPUs that a former start still holds
            self._begin()

    def _begin(self) -> None:
        rollout = self.config.rollout
        num_local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        gpus = devices_for_ray(visible_devices(), num_local_ranks, is_colocated=rollout.is_colocated)
        if (stop_ray := start_ray(ray_address(self.config), gpus)) is not None:
            self._ends.callback(stop_ray)
        on_cpu = psutil.virtual_memory().available // num_local_ranks
        is_roomy = has_room(self.config, torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else on_cpu)
        self._pool = ReplicaPool.begin_start(replace(replica_config(self.config), has_room=is_roomy), rollout.replicas)
        self._ends.callback(self._pool.close)

    def finish(self) -> ReplicaPool:
        """The replicas, once all have started. On devices that they share the trainer has given its memory up before."""
        if self._pool is None:
            self._begin()
        assert self._pool is not None
        self._pool.finish_start()
        return self._pool

    def close(self) -> None:
        """End the replicas, whether they have started or not, and a Ray of our own. Safe to repeat."""
        self._ends.close()


def has_room(config: Config, free_bytes: int) -> bool:
    """Whether a replica and a trainer rank on one device fit into `free_bytes` at the same time. Reads sizes in the model folder.

    Only with `rollout.kv_cache_bytes`: without it vLLM sizes the KV cache by the memory that is free while it starts.
    """
    rollout, folder = config.rollout, Path(config.model.path)
    if not rollout.is_colocated or rollout.kv_cache_bytes is None:
        return False
    num_parameters = most_parameters(folder)
    weights = num_parameters * DTYPE_BYTES[config.model.dtype] // rollout.tensor_parallel
    replica = max(weights + rollout.kv_cache_bytes + WORKER_BYTES, int(rollout.gpu_memory_utilization * free_bytes))
    return replica + num_parameters * STATE_BYTES + TRAINER_BYTES < FREE_SHARE * free_bytes


def replica_config(config: Config) -> ReplicaConfig:
    """For each replica: keys of `rollout` by their own names, and what other sections decide."""
    rollout, lora = config.rollout, config.engine.lora
    names = {field.name for field in fields(ReplicaConfig)} & RolloutConfig.model_fields.keys()
    return ReplicaConfig(
        **{name: getattr(rollout, name) for name in names},
        model_path=str(Path(config.model.path).resolve()),
        dtype=config.model.dtype,
        head_dtype="" if config.engine.head_dtype == "model" else config.engine.head_dtype,
        is_deterministic=config.run.deterministic,
        is_exact=config.model.exact,
        recomputes_cache=rollout.cache_on_update == "recompute",
        seed=config.run.seed,
        adapter_rank=lora.rank if lora.sync == "adapter" else 0,
        shares_devices=rollout.is_colocated,
        devices=replica_devices(visible_devices(), rollout.replicas, rollout.tensor_parallel) if rollout.is_colocated else (),
        detokenizes=bool(rollout.stop or rollout.episode),
        returns_experts=config.algorithm.router_replay == "rollout",
    )
