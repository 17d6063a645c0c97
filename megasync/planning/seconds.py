"""Seconds of a step and of its parts, from counts of multiplications (model_costs.py) and measured shares.

Leaves out rewards, evaluations and checkpoints. Pure functions of a model's config; what speeds are is in hardware.py, and of
CPUs, whose training passes are timed by what was traced of them, in cpu/.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from engine.config import DTYPE_BYTES
from engine.wrap.ddp_fields import SHARDS_PARAMETERS
from megasync.config.schema import Config
from megasync.planning.generation import NO_GENERATION, Generation
from megasync.planning.hardware import Hardware, launches, overlapped, seconds, share
from megasync.planning.meta.ranks import Counts
from megasync.planning.model_costs import ModelCosts
from megasync.planning.shapes import Grid, Work

LORA_PASSES = 2.0  # of frozen weights: forward, and the gradients of inputs
# What an adapter moves, in inputs and outputs of its linear. Inputs: read forward and for the gradient of A; their own gradient
# is written, read again and added to the linear's. Outputs: written and added to the linear's; their gradient is read twice.
ADAPTER_MOVES = 6
OVERLAP = 6  # of overlapped(): the host runs far ahead of the GPU
HOST_SHARE = 0.8  # of training that the host's launches take where they bind it
ADAM_BYTES = 34  # a parameter: gradient, main weight and both moments are read, three written, and the weight; the norm's read


@dataclass(frozen=True)
class StepSeconds:
    """Of one step, each where it happens; `step` is what they come to together."""

    train: float
    optimizer: float
    log_probs: float
    generation: float
    sync: float
    moving: float  # colocated: the trainer's state away and back, and vLLM's sleep
    step: float
    binding: str
    staleness: float  # expected, in versions
    synchronous: float  # the step without asynchrony, on the same devices


def train_seconds(
    config: Config, costs_: ModelCosts, counts: Counts, grid: Grid, work: Work, hardware: Hardware
) -> tuple[float, float]:
    """Forward and backward passes of all optimizer steps of a batch; and one forward pass over it, as for log-probs."""
    engine = config.engine
    lengths = tuple(work.prompt_tokens + length for length in work.lengths)
    tokens = work.tokens / grid.data
    attention = costs_.attention(lengths)
    forward = costs_.layers + costs_.output + attention
    passes = (LORA_PASSES if engine.lora.rank else 3.0) * (costs_.layers + costs_.output) + 3 * attention
    if engine.lora.rank and costs_.experts_per_token:  # what is no product takes as long as without adapters
        passes += (1 - share("experts") / share("dense")) * (3.0 - LORA_PASSES) * costs_.layers
    if engine.recompute == "full":
        passes += costs_.layers + attention
    elif engine.recompute == "selective":
        passes += attention if "core_attn" in engine.recompute_modules else 0
        passes += costs_.mlp if {"mlp", "moe"} & set(engine.recompute_modules) else 0
    if work.microbatch_tokens(grid) > engine.logits_chunk_tokens:
        passes += costs_.output
    split = grid.tensor * grid.pipeline * grid.context
    speed = _speed(config, costs_, grid, hardware)
    bubble = 1 + (grid.pipeline - 1) / (grid.virtual * max(1, work.num_microbatches(grid)))
    launch = _launch_seconds(config, costs_, grid, work)
    sent = _communication_seconds(config, grid, tokens, costs_, hardware)
    adapters = _adapter_seconds(config, costs_, tokens / split, hardware)
    # a trained parameter and micro-batch: its gradient is read, and the sum of those before read and written
    accumulated = DTYPE_BYTES[config.model.dtype] + 2 * DTYPE_BYTES[engine.gradient_dtype]
    added = accumulated * counts.trained * work.num_microbatches(grid) * work.num_minibatches / hardware.bandwidth
    train = overlapped(2 * passes * tokens / split / speed + adapters + added, launch, OVERLAP) * bubble + sent
    alone = overlapped(2 * forward * tokens / split / speed + adapters / 3, launch / 3, OVERLAP) * bubble + sent / 3
    return train, alone


def bound_by_host(
    config: Config, costs_: ModelCosts, grid: Grid, work: Work, train: float, generation: Generation
) -> tuple[str, ...]:
    """Of a run on GPUs, the phases in which they wait for the host most of the time."""
    launched = _launch_seconds(config, costs_, grid, work) * config.algorithm.num_passes > HOST_SHARE * train
    return ("training",) * launched + ("generation",) * generation.is_bound_by_host


def _launch_seconds(config: Config, costs_: ModelCosts, grid: Grid, work: Work) -> float:
    """Of all micro-batches of a batch, forward and backward, on the host of a GPU."""
    engine = config.engine
    is_there = {
        "megatron_fsdp": SHARDS_PARAMETERS[engine.wrap],
        "lora": engine.lora.rank > 0,
        "float32": config.model.dtype == "float32",
        f"recompute_{engine.recompute}": engine.recompute != "none",
    }
    layer = seconds("layer_launch") * math.prod(launches(name) for name, is_so in is_there.items() if is_so)
    return layer * costs_.num_layers / grid.pipeline * work.num_microbatches(grid) * work.num_minibatches


def _adapter_seconds(config: Config, costs_: ModelCosts, tokens: float, hardware: Hardware) -> float:
    """Their products are so narrow that they take the time of what they read and write."""
    lora = config.engine.lora
    width = sum(costs_.widths.get(name, 0) for name in lora.targets) if lora.rank else 0
    return ADAPTER_MOVES * width * costs_.num_layers * tokens * DTYPE_BYTES[config.model.dtype] / hardware.bandwidth


def _speed(config: Config, costs_: ModelCosts, grid: Grid, hardware: Hardware) -> float:
    """FLOP/s of passes."""
    engine = config.engine
    found = hardware.flops(config.model.dtype, "experts" if costs_.experts_per_token else "dense")
    if engine.fusions == "none":
        found *= share("no_fusions") / share("dense")
    is_sharded = SHARDS_PARAMETERS[engine.wrap] and grid.shards > 1
    return found * (share("fsdp") if is_sharded else 1.0)


def _communication_seconds(config: Config, grid: Grid, tokens: float, costs_: ModelCosts, hardware: Hardware) -> float:
    """Of tensor and expert parallelism, which nothing hides."""
    item, moved = DTYPE_BYTES[config.model.dtype], 0.0
    moved += 12 * (grid.tensor - 1) / grid.tensor  # gathers and reductions of a layer, forward and backward, some of them twice
    moved += 4 * costs_.experts_per_token * (grid.expert - 1) / grid.expert  # copies of a token to its experts and back
    layers = costs_.num_layers / grid.pipeline
    return moved * tokens / grid.context * costs_.hidden_size * item * layers / hardware.link


def optimizer_seconds(config: Config, counts: Counts, grid: Grid, work: Work, hardware: Hardware) -> float:
    own = counts.dense_trained / grid.shards + counts.experts_trained / grid.expert_shards
    found = ADAM_BYTES * own / hardware.bandwidth
    if config.engine.optimizer.offload:
        found += 2 * 12 * own / hardware.host_link
    return found * work.num_minibatches


def sync_seconds(config: Config, num_bytes: float, grid: Grid, hardware: Hardware) -> float:
    if hardware.is_cpu:
        return num_bytes / hardware.link + 0.05
    is_sharded = SHARDS_PARAMETERS[config.engine.wrap] and grid.shards > 1
    name = ("sync_ipc" if config.rollout.is_colocated else "sync_nccl") + ("_fsdp" if is_sharded else "")
    return num_bytes / grid.pipeline / (hardware.link * share(name)) + seconds("sync_messages")


def step_seconds(config: Config, known: dict[str, float], generation: Generation = NO_GENERATION) -> StepSeconds:
    """`known`: of StepSeconds all others that are not made of others."""
    rollout, parts = config.rollout, {**known, "generation": generation.in_turns}
    trainer = parts["train"] + parts["optimizer"] + parts["log_probs"]
    synchronous = trainer + parts["generation"] + parts["sync"] + parts["moving"]
    if not rollout.max_staleness or config.algorithm.name == "sft":
        at = {"generation": parts["generation"], "training": trainer, "moving state between host and device": parts["moving"]}
        return StepSeconds(**parts, step=synchronous, binding=max(at, key=at.__getitem__), staleness=0.0, synchronous=synchronous)
    pause = parts["sync"] + (seconds("pause") if rollout.on_update == "continue" else 0.0)
    # A sync that drains waits for all that runs, unless replicas are as far ahead as they may be and have nothing to do.
    is_emptied = rollout.on_update == "drain" and (rollout.max_staleness == 1 or generation.full > trainer)
    parts["generation"] = generation.beside if is_emptied else generation.full
    at = {"training": trainer + parts["sync"], "generation": parts["generation"] + pause}
    binding = max(at, key=at.__getitem__)
    busiest = at[binding]
    ahead = min(rollout.max_staleness, parts["generation"] / busiest + (1 if trainer >= parts["generation"] else 0))
    return StepSeconds(**parts, step=busiest, binding=binding, staleness=ahead, synchronous=synchronous)
