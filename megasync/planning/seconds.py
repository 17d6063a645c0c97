"""Seconds of a step and of its parts, from the engine's counts of multiplications (engine/batch/costs.py) and measured shares.

Leaves out rewards, evaluations and checkpoints. Pure functions of a model's config; what speeds are is in hardware.py, and of
CPUs, whose training passes are timed by what was traced of them, in cpu/.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from engine.attention import windows
from engine.batch import costs
from engine.config import DTYPE_BYTES
from engine.wrap.ddp_fields import SHARDS_PARAMETERS
from megasync.config.schema import Config
from megasync.hf.model_shape import ModelShape
from megasync.planning.cpu.decoding import Decoding
from megasync.planning.hardware import Hardware, launches, seconds, share
from megasync.planning.lengths import decode_steps
from megasync.planning.meta.ranks import Counts
from megasync.planning.replicas import WorkerMemory, cache_bytes_per_token, running_at_once
from megasync.planning.shapes import Grid, Work

LORA_PASSES = 2.0  # of frozen weights: forward, and the gradients of inputs
# What an adapter moves, in inputs and outputs of its linear. Inputs: read forward and for the gradient of A; their own gradient
# is written, read again and added to the linear's. Outputs: written and added to the linear's; their gradient is read twice.
ADAPTER_MOVES = 6
# The power in the mean of two times that overlap; the larger it is, the more the longer one counts. In training the host runs far
# ahead of the GPU; in generation each step waits for the one before.
LAUNCH_OVERLAP, DECODE_OVERLAP = 6, 3
ACCUMULATED_BYTES = 10  # a trained parameter and micro-batch: its gradient is read in 16 bits, the sum in float32 and written
BLOCK_TOKENS, CPU_BLOCK_TOKENS = 16, 128  # of vLLM's cache: a group's samples share what is whole blocks of their prompt
HOST_SHARE = 0.8  # of training that the host's launches take where they bind it
ADAM_BYTES = 34  # a parameter: gradient, main weight and both moments are read, three written, and the weight; the norm's read


@dataclass(frozen=True)
class ModelCosts:
    """Multiplications of a token's forward pass by weights, and of attention in units of them."""

    layers: float  # of all layers, by weights
    mlp: float  # of them those of MLPs or experts
    output: float  # of the output layer
    attention_length: float  # tokens of a sequence whose attention costs as much as all else
    windows: tuple[int, ...]
    num_layers: int
    hidden_size: int
    experts_per_token: int  # 0: no experts
    widths: Mapping[str, int]  # inputs and outputs of a token in a layer, by linear

    @staticmethod
    def of(bridge: Any) -> ModelCosts:
        """`bridge`: mbridge's, of the whole model."""
        config, vocabulary = bridge.config, bridge.hf_config.vocab_size
        columns = vocabulary / costs.output_cost(config, vocabulary)
        width = config.moe_router_topk * config.moe_ffn_hidden_size if config.num_moe_experts else config.ffn_hidden_size
        heads, groups = config.num_attention_heads * config.kv_channels, config.num_query_groups * config.kv_channels
        copies = config.moe_router_topk if config.num_moe_experts else 1
        return ModelCosts(
            layers=config.hidden_size * columns * config.num_layers,
            mlp=3.0 * config.hidden_size * width * config.num_layers,
            output=float(config.hidden_size * vocabulary),
            attention_length=costs.attention_length(config, vocabulary),
            windows=tuple(windows.layer_windows(bridge.hf_config.to_dict())),
            num_layers=config.num_layers,
            hidden_size=config.hidden_size,
            experts_per_token=config.moe_router_topk if config.num_moe_experts else 0,
            widths={
                "linear_qkv": config.hidden_size + heads + 2 * groups,
                "linear_proj": heads + config.hidden_size,
                "linear_fc1": copies * config.hidden_size + 2 * width,
                "linear_fc2": width + copies * config.hidden_size,
            },
        )

    def attention_of_token(self, context: float) -> float:
        """Multiplications of one token that attends to so many, in all layers."""
        width = self.widths["linear_proj"] - self.hidden_size
        return 2 * width * sum(min(context, window or context) for window in self.windows)

    def attention(self, lengths: tuple[int, ...]) -> float:
        """Multiplications a token, mean over sequences of these lengths."""
        sizes = np.array(lengths, np.int64)
        whole = self.layers + self.output
        return float(whole * costs.attention_costs(sizes, self.windows).sum() / self.attention_length / sizes.sum())


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


class Generation(NamedTuple):
    """Seconds of a batch."""

    in_turns: float  # alone
    beside: float  # beside training, alone
    full: float  # beside training, among other batches, so that replicas are always full


NO_GENERATION = Generation(0.0, 0.0, 0.0)


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
    added = ACCUMULATED_BYTES * counts.trained * work.num_microbatches(grid) * work.num_minibatches / hardware.bandwidth
    train = _overlapped(2 * passes * tokens / split / speed + adapters + added, launch, LAUNCH_OVERLAP) * bubble + sent
    alone = _overlapped(2 * forward * tokens / split / speed + adapters / 3, launch / 3, LAUNCH_OVERLAP) * bubble + sent / 3
    return train, alone


def bound_by_host(config: Config, costs_: ModelCosts, grid: Grid, work: Work, found: StepSeconds) -> tuple[str, ...]:
    """Of a run on GPUs, the phases whose launches take most of the time."""
    launched = _launch_seconds(config, costs_, grid, work) > HOST_SHARE * found.train
    is_eager = config.algorithm.name == "grpo" and config.rollout.enforce_eager
    return ("training",) * launched + ("generation",) * is_eager


def _overlapped(device: float, host: float, power: int) -> float:
    """Seconds of both at once; each waits for the other now and then, so that it takes more than the longer one."""
    return float((device**power + host**power) ** (1 / power))


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


def generation_seconds(
    config: Config,
    shape: ModelShape,
    costs_: ModelCosts,
    num_parameters: int,
    work: Work,
    worker: WorkerMemory,
    hardware: Hardware,
    num_processes: int = 1,
) -> Generation:
    """`num_processes`: that compute at the same time on the cores of a CPU, the replicas' and whichever else."""
    rollout, item, num_active = config.rollout, DTYPE_BYTES[config.model.dtype], costs_.layers + costs_.output
    samples = -(-work.num_samples // rollout.replicas)
    at_once = min(samples, running_at_once(config, worker, work.mean_tokens))
    eager = "decode_layer_eager_experts" if costs_.experts_per_token else "decode_layer_eager"
    base = seconds("decode_step") + costs_.num_layers * (seconds(eager) if rollout.enforce_eager else 0.0)
    graph = 0.0 if rollout.enforce_eager else costs_.num_layers * seconds("decode_layer_graph")
    per_token, context = cache_bytes_per_token(config, shape), work.mean_tokens * 0.75
    weights = num_parameters * item / rollout.tensor_parallel
    active = num_active * item / rollout.tensor_parallel

    if hardware.is_cpu:
        of_cpu = Decoding(
            num_active,
            costs_.hidden_size,
            config.model.dtype,
            num_layers=costs_.num_layers,
            vocabulary=costs_.output / costs_.hidden_size,
            attention=costs_.attention_of_token(context),
            most_rows=at_once,
            num_processes=num_processes,
        )

    def one_step(running: int) -> float:
        if hardware.is_cpu:
            return of_cpu.step(running)
        read = min(weights, active * max(1, running)) + running * context * per_token
        products = 2 * num_active * running / rollout.tensor_parallel / hardware.flops(config.model.dtype)
        device = max(read / hardware.bandwidth, products) + graph
        return _overlapped(device, base + running * seconds("decode_sequence"), DECODE_OVERLAP)

    block = CPU_BLOCK_TOKENS if hardware.is_cpu else BLOCK_TOKENS
    shared = work.prompt_tokens // block * block
    prompts = samples * (work.prompt_tokens - shared + shared / rollout.group_size)
    prefilled = num_active * prompts / rollout.tensor_parallel
    if hardware.is_cpu:
        prefill = of_cpu.prefill(prompts, samples)
    else:
        prefill = 2 * prefilled / hardware.flops(config.model.dtype) + samples * seconds("sample")
    alone = sum(steps * one_step(running) for steps, running in decode_steps(work.lengths, samples, at_once)) + prefill
    full = samples * (work.mean_tokens - work.prompt_tokens) / at_once * one_step(at_once) + prefill
    extra = 0.0 if hardware.is_cpu else samples * (seconds("sample_overlapped") - seconds("sample"))
    return Generation(alone, alone + extra, min(alone, full) + extra)


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
