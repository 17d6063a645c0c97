"""Replicas start beside the trainer: Ray and vLLM come up on rank 0 while every rank builds its model.

Leaves out how an actor starts (bridge/replicas/launched.py), and what the replicas are used for (weights.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import fields, replace
from pathlib import Path

import psutil
import torch

from bridge.config import ReplicaConfig
from bridge.replicas.pool import ReplicaPool
from engine.config import DTYPE_BYTES
from megasync.config.replica_keys import ReplicaKeys
from megasync.config.schema import Config, RolloutConfig
from megasync.data.lengths import teacher_context
from megasync.launch.devices import devices_for_ray, replica_devices, visible_devices
from megasync.launch.num_ranks import num_replica_gpus, num_teacher_gpus
from megasync.launch.ray_cluster import start_ray
from megasync.launch.scope import ray_address
from megasync.models.folder import most_parameters
from megasync.rollouts.teachers import Teachers
from megasync.served.endpoint import Endpoint, EndpointSettings, urls_of
from megasync.served.pool import ServedPool
from megasync.served.protocol import ServedModel

STATE_BYTES = 24  # of the trainer for each parameter, at most: weights, gradients, float32 copy, moments
TRAINER_BYTES = 2 * 2**30  # beside them once its model is built: CUDA's context
WORKER_BYTES = 8 * 2**30  # of a vLLM worker beside weights and KV cache: activations, CUDA graphs, workspaces, CUDA's context
FREE_SHARE = 0.9
PROMPT_TOKENS = 2048  # of one forward pass of a teacher: 3 GB of logits with a vocabulary of 150,000


class ReplicaStart:
    """Rank 0's. `close` in any case."""

    def __init__(self, config: Config, *, detokenizes: bool = False, adapter_slots: int | None = None) -> None:
        """`detokenizes`: requests may have stop texts, whatever the config's. `adapter_slots`: instead of a run's."""
        self.config, self._detokenizes, self._adapter_slots = config, detokenizes, adapter_slots
        self._ends = ExitStack()  # calls all, the last first, whatever one of them raises
        self._pool: ReplicaPool | None = None
        self._teachers: dict[str, ReplicaPool] = {}  # by the key of their folder
        self._judges: dict[str, ReplicaPool] = {}  # by name

    def begin(self) -> None:
        """Does not wait for replicas. Errors are kept: `finish` retries and raises on all ranks.

        To be called once this process has the environment of the replicas.
        """
        with suppress(Exception):  # such as GPUs that a former start still holds
            self._begin()

    def _begin(self) -> None:
        rollout = self.config.rollout
        num_local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        num_own = num_replica_gpus(self.config) + num_teacher_gpus(self.config)
        gpus = devices_for_ray(visible_devices(), num_local_ranks, is_colocated=num_own == 0)
        if gpus is not None and ray_address(self.config) == "local" and len(gpus) < num_own:
            teachers = num_teacher_gpus(self.config)
            problem = (
                f"the replicas need {num_own} GPUs beside the trainer's, {teachers} of them for teachers: there are {len(gpus)}"
            )
            raise ValueError(f"{problem}; lower rollout.replicas or teacher.replicas, or use teacher.place=trainer")
        if (stop_ray := start_ray(ray_address(self.config), gpus)) is not None:
            self._ends.callback(stop_ray)
        on_cpu = psutil.virtual_memory().available // num_local_ranks
        is_roomy = has_room(self.config, torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else on_cpu)
        wanted = replica_config(self.config)
        detokenizes, slots = wanted.detokenizes or self._detokenizes, self._adapter_slots or wanted.adapter_slots
        wanted = replace(wanted, has_room=is_roomy, detokenizes=detokenizes, adapter_slots=slots)
        self._pool = ReplicaPool.begin_start(wanted, rollout.replicas)
        self._ends.callback(self._pool.close)
        for key, path in self.config.teacher.paths.items() if self.config.teacher.is_served else ():
            self._teachers[key] = ReplicaPool.begin_start(teacher_replica_config(self.config, path), self.config.teacher.replicas)
            self._ends.callback(self._teachers[key].close)
        for name, judge in self.config.pooled_judges.items():
            self._judges[name] = ReplicaPool.begin_start(judge_replica_config(self.config, name), judge.replicas)
            self._ends.callback(self._judges[name].close)

    def finish(self) -> ReplicaPool:
        """The replicas, once all have started. On devices that they share the trainer has given its memory up before."""
        if self._pool is None:
            self._begin()
        assert self._pool is not None
        self._pool.finish_start()
        return self._pool

    def finish_teachers(self, note: Callable[[str], None]) -> Teachers | None:
        """The teachers that are asked in the rollout, once all have started; after `finish`."""
        teacher = self.config.teacher
        if not teacher.is_served:
            return None
        if teacher.endpoint:
            settings = EndpointSettings("teacher.endpoint", urls_of(teacher.endpoint))
            return Teachers(teacher, {"": Endpoint(settings)})
        models = dict[str, ServedModel]()
        for key, pool in self._teachers.items():
            pool.finish_start()
            models[key.removeprefix("teacher.path").removeprefix(".")] = ServedPool(pool, key, note)
        return Teachers(teacher, models)

    def finish_judges(self, note: Callable[[str], None]) -> dict[str, ServedModel]:
        """Replicas of judges by name, once all have started; after `finish`."""
        for pool in self._judges.values():
            pool.finish_start()
        return {name: ServedPool(pool, f"judges.{name}.path", note) for name, pool in self._judges.items()}

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
    num_parameters, draft = most_parameters(folder), rollout.speculation.draft_path
    served = num_parameters + (most_parameters(Path(draft)) if draft else 0)
    weights = served * DTYPE_BYTES[config.model.dtype] // rollout.tensor_parallel
    replica = max(weights + rollout.kv_cache_bytes + WORKER_BYTES, int(rollout.gpu_memory_utilization * free_bytes))
    return replica + num_parameters * STATE_BYTES + TRAINER_BYTES < FREE_SHARE * free_bytes


def teacher_replica_config(config: Config, path: str) -> ReplicaConfig:
    """For each replica of a teacher's folder, which scores prompts and makes no token that anybody reads."""
    rollout, teacher, cuda = config.rollout, config.teacher, torch.cuda.is_available()
    arguments: dict[str, object] = {"enable_prefix_caching": False}  # a cached prefix has no log-probs
    if teacher.objective == "top_k":
        arguments["max_logprobs"] = teacher.top_k
    if cuda:  # vLLM keeps no memory for the logits of a prompt's tokens
        arguments["max_num_batched_tokens"] = PROMPT_TOKENS
    return replace(
        _beside_config(config, "teacher", path, teacher),
        max_model_len=teacher_context(config, path) or None,
        max_num_seqs=rollout.max_num_seqs,
        enforce_eager=True,  # graphs are for tokens one by one
        engine_arguments=arguments | teacher.engine_arguments,
    )


def judge_replica_config(config: Config, name: str) -> ReplicaConfig:
    """For each replica of a judge's folder."""
    judge = config.judges[name]
    return replace(_beside_config(config, f"judges.{name}", judge.path, judge), max_num_seqs=judge.concurrency)


def _beside_config(config: Config, key: str, path: str, own: ReplicaKeys) -> ReplicaConfig:
    """For each replica of a folder that never syncs; `key`: of the config, for errors."""
    return ReplicaConfig(
        model_path=str(Path(path).resolve()),
        key=key,
        gpus_beside=num_replica_gpus(config) + num_teacher_gpus(config) - own.num_gpus,
        dtype=config.model.dtype,
        tensor_parallel=own.tensor_parallel,
        gpu_memory_utilization=own.gpu_memory_utilization,
        seed=config.run.seed,
        start_timeout_seconds=config.rollout.start_timeout_seconds,
        answer_timeout_seconds=config.rollout.answer_timeout_seconds,
        never_syncs=True,
        engine_arguments=own.engine_arguments,
    )


def replica_config(config: Config) -> ReplicaConfig:
    """For each replica: keys of `rollout` by their own names, and what other sections decide."""
    rollout, lora, draft = config.rollout, config.engine.lora, config.rollout.speculation.draft_path
    names = {field.name for field in fields(ReplicaConfig)} & RolloutConfig.model_fields.keys() - {"dtype", "speculation"}
    return ReplicaConfig(
        **{name: getattr(rollout, name) for name in names},
        model_path=str(Path(config.model.path).resolve()),
        speculation=rollout.speculation.model_copy(update={"path": draft and str(Path(draft).resolve())}),
        gpus_beside=num_teacher_gpus(config),
        dtype=config.model.dtype,
        head_dtype="" if config.engine.head_dtype == "model" else config.engine.head_dtype,
        is_fp8=rollout.dtype == "fp8",
        is_deterministic=config.run.deterministic,
        is_exact=config.model.exact,
        recomputes_cache=rollout.cache_on_update == "recompute",
        seed=config.run.seed,
        adapter_rank=lora.rank if lora.sync == "adapter" else 0,
        adapter_slots=config.adapter_slots,
        shares_devices=rollout.is_colocated,
        devices=replica_devices(visible_devices(), rollout.replicas, rollout.tensor_parallel) if rollout.is_colocated else (),
        detokenizes=bool(rollout.stop or rollout.episode),
        returns_experts=config.algorithm.router_replay == "rollout",
        returns_support=config.algorithm.support_replay,
    )
