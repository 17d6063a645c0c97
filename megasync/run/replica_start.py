"""Replicas start beside the trainer: Ray and vLLM come up on rank 0 while every rank builds its model.

Leaves out how an actor starts (bridge/replicas/launched.py), and what the replicas are used for (weights.py).
"""

from __future__ import annotations

import os
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

import psutil
import torch

from bridge.config import ReplicaConfig
from bridge.replicas.pool import ReplicaPool
from megasync.config.schema import Config
from megasync.hf.folder import model_shape, most_parameters
from megasync.launch.devices import devices_for_ray, replica_devices, visible_devices
from megasync.launch.ray_cluster import start_ray
from megasync.launch.scope import ray_address
from megasync.planning.hardware import GIB, hardware
from megasync.planning.replicas import worker_memory

STATE_BYTES = 24  # of the trainer for each parameter, at most: weights, gradients, float32 copy, moments
TRAINER_BYTES = 2 * GIB  # beside them once its model is built: CUDA's context
FREE_SHARE = 0.9


class ReplicaStart:
    """Rank 0's. `close` in any case."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self._ends = ExitStack()  # calls all, the last first, whatever one of them raises
        self._pool: ReplicaPool | None = None

    def begin(self) -> None:
        """Does not wait for replicas. What goes wrong `finish` tries again, and raises it where the other ranks hear of it.

        To be called once this process has the environment that the replicas are to have, too.
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
    """Whether a replica and a rank of the trainer on one device, with so many bytes free, have all of their memory at once. Pure
    but for sizes in the model folder.

    Only where `rollout.kv_cache_bytes` says what the KV cache takes, which vLLM otherwise finds by what is free while it starts.
    """
    rollout, folder = config.rollout, Path(config.model.path)
    if not rollout.is_colocated or rollout.kv_cache_bytes is None:
        return False
    num_parameters = most_parameters(folder)
    worker = worker_memory(config, model_shape(folder), num_parameters, hardware("h100"))  # any GPU: the cache's size is given
    replica = max(worker.total, int(rollout.gpu_memory_utilization * free_bytes))
    return replica + num_parameters * STATE_BYTES + TRAINER_BYTES < FREE_SHARE * free_bytes


def replica_config(config: Config) -> ReplicaConfig:
    """What each replica is started with."""
    rollout, lora = config.rollout, config.engine.lora
    return ReplicaConfig(
        model_path=str(Path(config.model.path).resolve()),
        dtype=config.model.dtype,
        head_dtype="" if config.engine.head_dtype == "model" else config.engine.head_dtype,
        is_deterministic=config.run.deterministic,
        is_exact=config.model.exact,
        tensor_parallel=rollout.tensor_parallel,
        max_model_len=rollout.max_model_len,
        max_num_seqs=rollout.max_num_seqs,
        kv_cache_bytes=rollout.kv_cache_bytes,
        gpu_memory_utilization=rollout.gpu_memory_utilization,
        enforce_eager=rollout.enforce_eager,
        on_update=rollout.on_update,
        recomputes_cache=rollout.cache_on_update == "recompute",
        seed=config.run.seed,
        start_timeout_seconds=rollout.start_timeout_seconds,
        answer_timeout_seconds=rollout.answer_timeout_seconds,
        adapter_rank=lora.rank if lora.sync == "adapter" else 0,
        shares_devices=rollout.is_colocated,
        devices=replica_devices(visible_devices(), rollout.replicas, rollout.tensor_parallel) if rollout.is_colocated else (),
        detokenizes=bool(rollout.stop or rollout.episode),
        returns_experts=config.algorithm.router_replay == "rollout",
        engine_arguments=rollout.engine_arguments,
    )
