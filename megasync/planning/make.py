"""A plan: what every process of a run takes, what does not fit, and seconds of a step. Reads config.json and no weights.

    plan = make_plan(config, Request(num_ranks=2, hardware=hardware("h100")))

Leaves out what would fit instead (remedies.py) and how it is shown (text.py).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from engine.config import EngineConfig
from megasync.checks.settings import check_layout, check_settings
from megasync.config.schema import Config
from megasync.hf.folder import model_shape
from megasync.hf.model_shape import ModelShape
from megasync.planning import seconds as times
from megasync.planning import version_log
from megasync.planning.cpu import passes as cpu
from megasync.planning.cpu.together import rank_threads
from megasync.planning.generation import NO_GENERATION, Generation, generation_seconds
from megasync.planning.hardware import Hardware, seconds, units
from megasync.planning.memory import RankMemory
from megasync.planning.meta.activations import Activations, multiple_of_tokens, trace
from megasync.planning.meta.ranks import Counts, build_rank, world
from megasync.planning.model_costs import ModelCosts
from megasync.planning.replicas import TRAINING_DEVICE, WORKER_DEVICE, WORKER_PEAK, WorkerMemory, worker_memory
from megasync.planning.shapes import Busy, Grid, Request, Work
from megasync.planning.stages import (
    STAYS_AWAY,
    Stage,
    all_sent_bytes,
    count_parameters,
    problems_of,
    sent_bytes,
    stage_of,
    stays_bytes,
)

MOST_STAGES = 4  # of a pipeline that are looked at one by one: the first, the last and those beside them


@dataclass(frozen=True)
class Plan:
    """Of one config on some ranks. `problems`: what does not fit, by process; empty: it fits. `bound_by_host`: phases in which
    GPUs wait for launches of kernels.
    """

    config: Config
    request: Request
    grid: Grid
    work: Work
    stages: tuple[Stage, ...]
    worker: WorkerMemory | None
    seconds: times.StepSeconds
    num_parameters: int
    problems: tuple[str, ...]
    bound_by_host: tuple[str, ...]

    @property
    def fits(self) -> bool:
        return not self.problems

    @property
    def largest(self) -> Stage:
        return max(self.stages, key=lambda stage: stage.memory.device)

    @property
    def num_devices(self) -> int:
        rollout = self.config.rollout
        own = 0 if self.worker is None or rollout.is_colocated else rollout.replicas * rollout.tensor_parallel
        return self.request.num_ranks + own

    @property
    def version_log_bytes(self) -> int:
        """On the disk, by the end."""
        return version_log.disk_bytes(self.config, self.num_parameters)

    @property
    def tokens_per_day(self) -> float:
        """Of prompts and responses that are trained on."""
        return self.work.tokens / self.seconds.step * 86400

    def as_dict(self) -> dict[str, Any]:
        """plan.json."""
        first, rollout = self.stages[0].memory, self.config.rollout
        return {
            "hardware": self.request.hardware.kind,
            "ranks": dataclasses.asdict(self.grid),
            "placement": rollout.placement,
            "max_staleness": rollout.max_staleness,
            "num_ranks": self.request.num_ranks,
            "mean_response_tokens": self.request.mean_response_tokens,
            "prompt_tokens": self.request.prompt_tokens,
            "response_lengths": list(self.request.lengths),
            "parameters": self.num_parameters,
            "trainer": [{"stage": stage.number, **_memory(stage.memory)} for stage in self.stages],
            "replica": None if self.worker is None else {"parts": self.worker.parts, "device_bytes": self.worker.total},
            "version_log": {"host_bytes": first.version_log, "disk_bytes": self.version_log_bytes},
            "seconds": dataclasses.asdict(self.seconds),
            "tokens_per_day": self.tokens_per_day,
            "problems": list(self.problems),
            "predicted": {
                **self._predicted_memory(),
                "step/seconds": self.seconds.step,
                "train": self.seconds.train + self.seconds.optimizer,
                "rollout/seconds": self.seconds.generation if self.worker and not rollout.max_staleness else None,
                "sync/seconds": self.seconds.sync if self.worker else None,
            },
        }

    def _predicted_memory(self) -> dict[str, int | None]:
        """Of the first rank and a worker, in the words of metrics.jsonl and summary.json."""
        first, worker = self.stages[0].memory, self.worker
        if self.request.hardware.is_cpu:
            return {"memory/host_peak_bytes": first.host, WORKER_PEAK: worker.host if worker else None}
        found: dict[str, int | None] = {"memory/host_peak_bytes": first.host, "memory/tensors_peak_bytes": first.tensors_peak}
        if worker is None or not self.config.rollout.is_colocated:
            return found | {"memory/device_bytes": first.device, WORKER_DEVICE: worker.total if worker else None}
        awake = worker.total + stays_bytes(self.config, self.stages[:1])
        return found | {
            "memory/device_bytes": awake,
            WORKER_DEVICE: awake,
            TRAINING_DEVICE: first.device + worker.asleep,
        }


def _memory(memory: RankMemory) -> dict[str, Any]:
    sizes = {"tensors_peak_bytes": memory.tensors_peak, "device_bytes": memory.device, "host_bytes": memory.host}
    return {"parts": memory.parts, **sizes}


def check(config: Config, num_ranks: int, *, on_gpus: bool) -> ModelShape:
    """What training would refuse of sizes and layout, by its own rules. Weights and data need not be there.

    Raises:
        ConfigError: the first thing that cannot work.
    """
    check_settings(config, num_ranks)
    shape = model_shape(config.model.path)
    check_layout(config, shape, num_ranks, on_gpus=on_gpus)
    return shape


def make_plan(config: Config, request: Request) -> Plan:
    """For a run that has not begun: every stage in a world of its own, with one rank for each shard.

    Raises:
        ConfigError: see `check`.
    """
    parallel = config.engine.parallel
    alone = Grid.of(config, parallel.tensor * parallel.pipeline * math.lcm(parallel.context, parallel.expert))
    last = alone.pipeline - 1
    looked_at = range(alone.pipeline) if alone.pipeline <= MOST_STAGES else (0, 1, last - 1, last)

    def trace_stage(number: int, lengths: tuple[int, ...]) -> Traced:
        engine = meta_engine(config.engine, request.hardware)
        key = config.model.model_dump_json() + engine.model_copy(update={"wrap": "ddp"}).model_dump_json()
        key += f"{number} {lengths} {_has_entropy(config)} {request.hardware.is_cpu}"
        if key not in _TRACED:
            with world(alone.num_ranks, alone.stage_rank(number), parallel):
                _TRACED[key] = _trace(config, engine, lengths, on_cpu=request.hardware.is_cpu)
        return _TRACED[key]

    return _plan(config, request, tuple(looked_at), trace_stage)


def plan_of_rank(config: Config, request: Request, stage: int) -> Plan:
    """For a run whose process groups are there: of this rank's own stage."""
    engine = meta_engine(config.engine, request.hardware)
    return _plan(config, request, (stage,), lambda _, lengths: _trace(config, engine, lengths, on_cpu=request.hardware.is_cpu))


Traced = tuple[Counts, Activations, ModelCosts]
_TRACED: dict[str, Traced] = {}  # what was traced in this process: layouts that are tried share much of it


def _trace(config: Config, engine: EngineConfig, lengths: tuple[int, ...], *, on_cpu: bool) -> Traced:
    rank = build_rank(config.model, engine)
    found = trace(rank, engine, lengths, has_entropy=_has_entropy(config), on_cpu=on_cpu)
    return rank.counts, found, ModelCosts.of(rank.bridge)


def _has_entropy(config: Config) -> bool:
    return config.algorithm.name == "grpo" and config.algorithm.log_entropy


def _plan(
    config: Config, request: Request, looked_at: tuple[int, ...], trace_stage: Callable[[int, tuple[int, ...]], Traced]
) -> Plan:
    shape = check(config, request.num_ranks, on_gpus=not request.hardware.is_cpu)
    grid = Grid.of(config, request.num_ranks)
    work = Work.of(config, request)
    multiple = multiple_of_tokens(config.engine, shape.num_experts, shape.num_experts_per_tok)
    lengths = work.sequences(work.microbatch_tokens(grid), multiple)
    traced = {number: trace_stage(number, lengths) for number in looked_at}
    stages = [stage_of(config, request, grid, work, number, *found[:2]) for number, found in traced.items()]
    *_, model_costs = traced[looked_at[0]]
    num_parameters = count_parameters(grid, stages)
    hardware, is_grpo = request.hardware, config.algorithm.name == "grpo"
    sent = max(sent_bytes(config, grid, stage.counts) for stage in stages)
    worker = worker_memory(config, shape, num_parameters, hardware, sent) if is_grpo else None
    generation = NO_GENERATION
    if worker is not None:
        facts = config, shape, model_costs, num_parameters, work, worker, hardware
        generation = generation_seconds(*facts, num_processes=Busy.of(config, grid).generation)
    found_seconds = _seconds(config, request.hardware, grid, work, stages, model_costs, generation)
    bound = () if hardware.is_cpu else times.bound_by_host(config, model_costs, grid, work, found_seconds.train, generation)
    problems = problems_of(config, hardware, stages, worker, grid)
    return Plan(config, request, grid, work, tuple(stages), worker, found_seconds, num_parameters, problems, bound)


def meta_engine(engine: EngineConfig, hardware: Hardware) -> EngineConfig:
    """With the fusions that there will be on that hardware: here no device is asked."""
    is_fused = engine.fusions == "all" or (engine.fusions == "auto" and not hardware.is_cpu)
    return engine.model_copy(update={"fusions": "all" if is_fused else "none"})


def _seconds(
    config: Config,
    hardware: Hardware,
    grid: Grid,
    work: Work,
    stages: list[Stage],
    model_costs: ModelCosts,
    generation: Generation,
) -> times.StepSeconds:
    algorithm = config.algorithm
    busy, threads = Busy.of(config, grid), rank_threads(grid.num_ranks)
    counts = max((stage.counts for stage in stages), key=lambda each: each.trained)
    if hardware.is_cpu:
        traced = [(stage.counts, stage.activations) for stage in stages]
        train, alone = cpu.train_seconds(traced, config.engine, grid, work, busy.training, threads)
        optimizer = cpu.optimizer_seconds(counts, config.engine, grid, work, busy.training, threads)
    else:
        train, alone = times.train_seconds(config, model_costs, counts, grid, work, hardware)
        optimizer = times.optimizer_seconds(config, counts, grid, work, hardware)
    train *= algorithm.num_passes
    separate = algorithm.name == "grpo" and (algorithm.steps_per_batch > 1 or algorithm.old_log_probs == "separate")
    passes = separate + (algorithm.name == "grpo" and algorithm.kl_coefficient > 0) + algorithm.log_router_gap
    parts = {
        "train": train,
        "optimizer": optimizer * algorithm.num_passes,
        "log_probs": alone * passes,
        "sync": 0.0,
        "moving": 0.0,
    }
    if hardware.is_cpu:
        has_canary = algorithm.name == "grpo" and config.sync.canary_tolerance
        canary = cpu.canary_seconds(alone, work.tokens / grid.data) if has_canary else 0.0
        parts["log_probs"] += cpu.samples_seconds(work.num_samples, busy.training) + canary
    if algorithm.name != "grpo":
        return times.step_seconds(config, parts)
    parts["sync"] = times.sync_seconds(config, all_sent_bytes(config, grid, stages), grid, hardware)
    if config.rollout.is_colocated and not hardware.is_cpu:
        state = stages[0].memory.parts
        away = sum(state.get(STAYS_AWAY[kind], 0) for kind in config.rollout.offload_trainer if kind != "gradients")
        away += state.get("reference", 0) if "parameters" in config.rollout.offload_trainer else 0
        parts["moving"] = 2 * away / hardware.host_link + seconds("sleep")
    if hardware.is_cpu and cpu.is_cold(stage.counts for stage in stages):
        rest = parts["sync"] + canary + (0.0 if config.rollout.max_staleness else generation.in_turns)
        rested = cpu.rested_seconds(max(stage.activations.peak for stage in stages), rest)
        parts["train"] = max(train, train / units("in_step") + rested)  # which has memory that comes anew, too
    return times.step_seconds(config, parts, generation)
