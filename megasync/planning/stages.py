"""A pipeline stage of a plan: its ranks' memory, and what of it and of vLLM's workers does not fit a device. Pure functions.

Leaves out what parts a rank's and a worker's memory have (memory.py, replicas.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from engine.config import DTYPE_BYTES
from megasync.config.schema import Config
from megasync.planning import version_log
from megasync.planning.hardware import GIB, Hardware, num_bytes
from megasync.planning.memory import RankMemory, checkpoint_bytes, rank_memory
from megasync.planning.meta.activations import Activations
from megasync.planning.meta.ranks import Counts
from megasync.planning.replicas import WorkerMemory
from megasync.planning.shapes import Grid, Request, Work

RESERVED_BESIDE = 1.5  # of a trainer's tensors that stay while vLLM is awake: what torch's allocator keeps reserved for them
STAYS_AWAY = {"parameters": "weights", "gradients": "gradients", "optimizer": "optimizer"}  # offload kinds in memory.py's words


@dataclass(frozen=True)
class Stage:
    """One pipeline stage's ranks, all alike."""

    number: int
    counts: Counts
    activations: Activations
    memory: RankMemory


def stage_of(config: Config, request: Request, grid: Grid, work: Work, number: int, counts: Counts, found: Activations) -> Stage:
    is_grpo = config.algorithm.name == "grpo"
    memory = rank_memory(
        counts,
        found,
        engine=config.engine,
        dtype=config.model.dtype,
        grid=grid,
        in_flight=grid.in_flight(number, work.num_microbatches(grid)),
        has_reference=is_grpo and config.algorithm.kl_coefficient > 0,
        bucket_bytes=min(config.sync.bucket_bytes, sent_bytes(config, grid, counts)) if is_grpo else 0,
        is_cpu=request.hardware.is_cpu,
        is_colocated=is_grpo and config.rollout.is_colocated,
        sends_over_nccl=is_grpo and not config.rollout.is_colocated,
    )
    copy = version_log.copy_bytes(config, stage_parameters(grid, counts))
    written = 0 if request.hardware.is_cpu else checkpoint_bytes(memory.parts, config, grid)
    host = max(memory.loading, memory.host + copy + written)
    return Stage(number, counts, found, dataclasses.replace(memory, host=host, version_log=copy))


def sent_bytes(config: Config, grid: Grid, counts: Counts) -> int:
    """Of a sync, from one stage: whole weights, or adapters alone."""
    lora = config.engine.lora
    is_adapter = lora.rank and lora.sync == "adapter"
    sent = counts.trained * grid.tensor if is_adapter else stage_parameters(grid, counts)
    return sent * DTYPE_BYTES[config.model.dtype]


def stage_parameters(grid: Grid, counts: Counts) -> int:
    """Of all ranks of a stage together, each once."""
    return counts.dense * grid.tensor + counts.experts * grid.tensor * grid.expert


def count_parameters(grid: Grid, stages: list[Stage]) -> int:
    """Of the whole model."""
    return _of_all(grid, [stage_parameters(grid, stage.counts) for stage in stages])


def all_sent_bytes(config: Config, grid: Grid, stages: list[Stage]) -> int:
    """Of a sync, from all stages together."""
    return _of_all(grid, [sent_bytes(config, grid, stage.counts) for stage in stages])


def _of_all(grid: Grid, sizes: list[int]) -> int:
    """The sum over all stages, from those that were looked at; those in the middle are alike."""
    return sum(sizes) + sizes[len(sizes) // 2] * (grid.pipeline - len(sizes))


def problems_of(
    config: Config, hardware: Hardware, stages: list[Stage], worker: WorkerMemory | None, grid: Grid
) -> tuple[str, ...]:
    """What does not fit, with the numbers."""
    found, room = list[str](), hardware.memory_bytes
    if hardware.is_cpu:
        workers = config.rollout.replicas * config.rollout.tensor_parallel if worker else 0
        total = max(stage.memory.host - stage.memory.version_log for stage in stages) * grid.num_ranks
        total += max(stage.memory.version_log for stage in stages) * grid.pipeline  # one rank of each stage has one
        total += (num_bytes("host_ray") + num_bytes("host_replica") * config.rollout.replicas) if worker else 0
        total += (worker.host if worker else 0) * workers + version_log.workers_bytes(config, count_parameters(grid, stages))
        return (f"all processes take {gib(total)} GiB of this machine's {gib(room)} GiB",) if total > room else ()
    shares = worker is not None and config.rollout.is_colocated
    for stage in stages:
        taken = stage.memory.device + (worker.asleep if worker is not None and shares else 0)
        if taken > room:
            which = f"a trainer rank of stage {stage.number}" if len(stages) > 1 else "a trainer rank"
            beside = " with vLLM asleep beside it" if shares else ""
            found.append(f"{which}{beside} takes {gib(taken)} GiB of {gib(room)} GiB")
    if worker is not None:
        stays = stays_bytes(config, stages) if shares else 0
        if worker.total + stays > room:
            beside = f" and what stays of the trainer, {gib(stays)}" if stays else ""
            found.append(f"a vLLM worker takes {gib(worker.total)} GiB{beside}, of {gib(room)} GiB")
        longest = config.rollout.max_model_len or config.rollout.max_new_tokens
        if worker.cache_tokens < longest:
            found.append(f"vLLM's KV cache holds {max(0, worker.cache_tokens)} tokens, a sequence has up to {longest}")
    return tuple(found)


def stays_bytes(config: Config, stages: Sequence[Stage]) -> int:
    """Of a trainer rank on its GPU while vLLM generates there."""
    memory = max((stage.memory for stage in stages), key=lambda each: each.device)
    away = {STAYS_AWAY[kind] for kind in config.rollout.offload_trainer}
    away |= {"reference"} if "weights" in away else set()  # engine/offload.py: it goes with the parameters
    kept = sum(memory.parts.get(name, 0) for name in ("weights", "gradients", "optimizer", "reference") if name not in away)
    beside = memory.parts.get("sync buckets", 0) + memory.parts.get("workspaces", 0)
    return memory.outside + kept + round(RESERVED_BESIDE * beside)


def gib(size: float) -> str:
    return f"{size / GIB:.1f}"
