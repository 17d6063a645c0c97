"""A plan: memory per process, misfits and step time. Reads config.json and no weights.

    plan = make_plan(config, Request(num_ranks=2, hardware=hardware("h100"), mean_response_tokens=256.0))

Leaves out how it is shown (text.py).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine.config import DTYPE_BYTES
from megasync.checks.settings import check_layout, check_settings
from megasync.config.schema import Config
from megasync.launch.machine import gib
from megasync.launch.num_ranks import num_teacher_gpus
from megasync.models.folder import model_shape
from megasync.models.model_shape import ModelShape
from megasync.report.log import TRAINING_DEVICE, WORKER_DEVICE
from megasync.tools.plan import seconds as times
from megasync.tools.plan.hardware import constant
from megasync.tools.plan.layout import Grid, Request, Work
from megasync.tools.plan.memory import (
    OFFLOADED,
    RankMemory,
    Stage,
    offloaded_bytes,
    sent_bytes,
    stage_memory,
    stage_parameters,
)
from megasync.tools.plan.meta.activations import Activations, multiple_of_tokens, trace
from megasync.tools.plan.meta.ranks import Counts, build_rank, world
from megasync.tools.plan.replicas import WorkerMemory, served_item, worker_memory

MAX_STAGES = 4  # of a pipeline that are traced: the first, the last and those beside them
RESERVED_BESIDE = 1.5  # times the trainer's buckets and workspaces stay reserved while vLLM is awake


@dataclass(frozen=True)
class Plan:
    """The plan of one config on some ranks. `problems`: processes that do not fit, with the parts of each; empty: it fits."""

    config: Config
    request: Request
    grid: Grid
    work: Work
    stages: tuple[Stage, ...]
    worker: WorkerMemory | None
    num_parameters: int
    seconds: times.StepSeconds

    @property
    def problems(self) -> dict[str, dict[str, int]]:
        """Parts of the memory of each process that does not fit, by a sentence about it."""
        found, room, worker, config = dict[str, dict[str, int]](), self.request.hardware.memory_bytes, self.worker, self.config
        asleep = worker.asleep if worker is not None and config.rollout.is_colocated else 0
        for stage in self.stages:
            taken = stage.memory.device + asleep
            if taken > room:
                which = f"a trainer rank of stage {stage.number}" if len(self.stages) > 1 else "a trainer rank"
                beside = " with vLLM asleep beside it" if asleep else ""
                found[f"{which}{beside} takes {gib(taken)} of {gib(room)}"] = stage.memory.parts
        if worker is None:
            return found
        stays = stays_bytes(config, self.largest.memory) if config.rollout.is_colocated else 0
        if worker.total + stays > room:
            beside = f" beside {gib(stays)} of the trainer" if stays else ""
            found[f"a vLLM worker takes {gib(worker.total)}{beside}, of {gib(room)}"] = worker.parts
        longest = config.rollout.max_model_len or config.rollout.max_new_tokens
        if worker.cache_tokens < longest:
            tokens = max(0, worker.cache_tokens)
            found[f"vLLM's KV cache holds {tokens} tokens, and a sequence has up to {longest}"] = worker.parts
        return found

    @property
    def largest(self) -> Stage:
        return max(self.stages, key=lambda stage: stage.memory.device)

    @property
    def num_devices(self) -> int:
        rollout = self.config.rollout
        own = 0 if self.worker is None or rollout.is_colocated else rollout.replicas * rollout.tensor_parallel
        return self.request.num_ranks + own + num_teacher_gpus(self.config)

    @property
    def predicted(self) -> dict[str, float]:
        """Values of the first rank, a worker and a step, by their names in metrics.jsonl and summary.json."""
        first, worker, rollout = self.stages[0].memory, self.worker, self.config.rollout
        found: dict[str, float] = {
            "memory/host_peak_bytes": first.host,
            "memory/tensors_peak_bytes": first.tensors_peak,
            "memory/device_bytes": first.device,
            "step/seconds": self.seconds.step,
            "train": self.seconds.train + self.seconds.optimizer,
        }
        if worker is None:
            return found
        found |= {WORKER_DEVICE: worker.total, "sync/seconds": self.seconds.sync}
        if not rollout.max_staleness:  # else a batch's generation has waits in it
            found["rollout/seconds"] = self.seconds.generation
        if rollout.is_colocated:
            awake = worker.total + stays_bytes(self.config, first)
            found |= {"memory/device_bytes": awake, WORKER_DEVICE: awake, TRAINING_DEVICE: first.device + worker.asleep}
        return found

    def as_dict(self) -> dict[str, Any]:
        """The object that --json prints."""
        return {
            "hardware": self.request.hardware.kind,
            "ranks": dataclasses.asdict(self.grid),
            "prompt_tokens": self.request.prompt_tokens,
            "mean_response_tokens": self.request.mean_response_tokens,
            "response_lengths": list(self.request.lengths),
            "parameters": self.num_parameters,
            "trainer": [{"stage": stage.number, **dataclasses.asdict(stage.memory)} for stage in self.stages],
            "replica": None if self.worker is None else {"parts": self.worker.parts, "device_bytes": self.worker.total},
            "seconds": self.seconds._asdict(),
            "problems": list(self.problems),
            "predicted": self.predicted,
        }


def check(config: Config, num_ranks: int) -> ModelShape:
    """Checks sizes and layout by training's own rules. Weights and data need not be there.

    Raises:
        ConfigError: the first problem.
    """
    check_settings(config, num_ranks)
    shape = model_shape(config.model.path)
    check_layout(config, shape, num_ranks, on_gpus=True)
    return shape


def make_plan(config: Config, request: Request) -> Plan:
    """Traces each stage in a world of its own, with one rank for each shard.

    Raises:
        ConfigError: see `check`.
    """
    shape = check(config, request.num_ranks)
    grid, work = Grid.of(config, request.num_ranks), Work.of(config, request)
    lengths = work.sequences(
        work.microbatch_tokens(grid), multiple_of_tokens(config.engine, shape.num_experts, shape.num_experts_per_tok)
    )
    last = grid.pipeline - 1
    numbers = range(grid.pipeline) if grid.pipeline <= MAX_STAGES else (0, 1, last - 1, last)
    traced = [_trace(config, number, lengths) for number in numbers]
    stages = tuple(
        Stage(number, counts, stage_memory(config, grid, work, number, counts, found))
        for number, (counts, found, _) in zip(numbers, traced, strict=True)
    )
    num_parameters = _of_all(grid, [stage_parameters(stage.counts, grid) for stage in stages])
    worker = None
    if config.algorithm.name == "grpo":
        sent = max(_sent(config, shape, stage.counts, grid, num_parameters) for stage in stages)
        worker = worker_memory(config, shape, num_parameters, request.hardware, sent)
    on = times.Machine(config, request.hardware, grid, work, traced[0][2])
    seconds = _seconds(on, shape, stages, num_parameters, worker)
    return Plan(config, request, grid, work, stages, worker, num_parameters, seconds)


def _trace(config: Config, number: int, lengths: tuple[int, ...]) -> tuple[Counts, Activations, Any]:
    """One stage's parameters and the activations of a micro-batch, and the multiplications of the whole model."""
    parallel = config.engine.parallel
    alone = Grid.of(config, parallel.tensor * parallel.pipeline * math.lcm(parallel.context, parallel.expert))
    fusions = "none" if config.engine.fusions == "none" else "all"  # no device is asked
    engine = config.engine.model_copy(update={"fusions": fusions})
    has_entropy = config.algorithm.name == "grpo" and config.algorithm.log_entropy
    with world(alone.num_ranks, alone.stage_rank(number), parallel):
        rank = build_rank(config.model, engine)
        found = trace(rank, engine, lengths, has_entropy=has_entropy)
        return rank.counts, found, times.Multiplications.of(rank.bridge)


def _sent(config: Config, shape: ModelShape, counts: Counts, grid: Grid, num_parameters: int) -> int:
    """sent_bytes of a stage that is quantised as the model is on average."""
    share = served_item(config, shape, num_parameters) / DTYPE_BYTES[config.model.dtype]
    return int(sent_bytes(config, counts, grid) * share)


def _of_all(grid: Grid, sizes: list[int]) -> int:
    """The sum over all stages; those in the middle that were not traced are alike."""
    return sum(sizes) + sizes[len(sizes) // 2] * (grid.pipeline - len(sizes))


def _seconds(
    on: times.Machine, shape: ModelShape, stages: Sequence[Stage], num_parameters: int, worker: WorkerMemory | None
) -> times.StepSeconds:
    config, algorithm = on.config, on.config.algorithm
    counts = max((stage.counts for stage in stages), key=lambda each: each.trained)
    train, alone = times.train_seconds(on, counts)
    is_grpo = algorithm.name == "grpo"
    passes = int(is_grpo and (algorithm.steps_per_batch > 1 or algorithm.old_log_probs == "separate"))
    passes += (is_grpo and algorithm.kl_coefficient > 0) + algorithm.log_router_gap + config.teacher.is_in_trainer
    parts = {
        "train": train * algorithm.num_passes,
        "optimizer": times.optimizer_seconds(on, counts) * algorithm.num_passes,
        "log_probs": alone * passes,
        "sync": 0.0,
        "moving": 0.0,
    }
    generation = times.Generation(0.0, 0.0)
    if worker is not None:
        sent = _of_all(on.grid, [_sent(config, shape, stage.counts, on.grid, num_parameters) for stage in stages])
        parts["sync"] = times.sync_seconds(on, sent)
        generation = times.generation_seconds(on, shape, num_parameters, worker)
        if config.rollout.is_colocated:
            away = offloaded_bytes(stages[0].memory.parts, config)
            parts["moving"] = 2 * away / on.hardware.host_link + constant("sleep")
    return times.step_seconds(config, parts, generation)


def stays_bytes(config: Config, memory: RankMemory) -> int:
    """Bytes that a trainer rank keeps on its GPU while vLLM generates there."""
    state = ("weights", "embeddings, gathered", "gradients", "optimizer", "reference")
    away = {name for kind in config.rollout.offload_trainer for name in OFFLOADED[kind]}
    kept = sum(memory.parts.get(name, 0) for name in state if name not in away)
    beside = memory.parts.get("sync buckets", 0) + memory.parts.get("workspaces", 0)
    return memory.outside + kept + round(RESERVED_BESIDE * beside)
