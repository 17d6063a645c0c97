"""Bytes of one trainer rank by part: weights, gradients and optimizer state by wrap, activations, buckets, CUDA.

A rank's peak is the larger one of its passes and of its optimizer step. Pure functions of counted parameters (meta/ranks.py)
and activations (meta/activations.py). Leaves out vLLM's workers (replicas.py), and whether all of it fits (make.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from engine.checkpoint.hf_folder import FILE_BYTES
from engine.checkpoint.state import MAX_FILE_BYTES
from engine.config import DTYPE_BYTES, EngineConfig
from engine.wrap.ddp_fields import SHARDS_PARAMETERS
from megasync.config.schema import Config
from megasync.config.teacher_section import START
from megasync.tools.plan.hardware import num_bytes
from megasync.tools.plan.layout import Grid, Work
from megasync.tools.plan.meta.activations import Activations
from megasync.tools.plan.meta.ranks import Counts

COMMUNICATION_UNIT = 1_000_000_000  # elements of gradients that wait for their reduction; half as many are gathered ahead
RESERVED_SHARE = 0.02  # of allocated bytes, that torch's allocator reserves beside them
OPTIMIZER_BYTES = {"float32": 8, "bfloat16": 12, "float16": 12}  # Adam's moments, and main weights in float32
OFFLOADED = {  # parts by the values of rollout.offload_trainer
    "parameters": ("weights", "embeddings, gathered", "reference", "teacher"),
    "gradients": ("gradients",),
    "optimizer": ("optimizer",),
}


@dataclass(frozen=True)
class RankMemory:
    """Memory of a rank in bytes. `parts` are those of the passes' peak; `step` is the optimizer step's peak."""

    parts: dict[str, int]
    passes: int
    step: int
    outside: int  # of torch's allocator: CUDA's context, NCCL
    host: int

    @property
    def tensors_peak(self) -> int:
        """torch.cuda.max_memory_allocated."""
        return max(self.passes, self.step)

    @property
    def device(self) -> int:
        """Bytes of the process on its device."""
        return round(self.tensors_peak * (1 + RESERVED_SHARE)) + self.outside


class Stage(NamedTuple):
    """One pipeline stage's ranks, all alike."""

    number: int
    counts: Counts
    memory: RankMemory


def stage_parameters(counts: Counts, grid: Grid) -> int:
    """Number of parameters of a stage, summed over its ranks, each counted once."""
    return counts.dense * grid.tensor + counts.experts * grid.tensor * grid.expert


def sent_bytes(config: Config, counts: Counts, grid: Grid) -> int:
    """Bytes that one stage sends in a sync: whole weights, or adapters alone."""
    lora = config.engine.lora
    is_adapter = lora.rank and lora.sync == "adapter"
    sent = counts.trained * grid.tensor if is_adapter else stage_parameters(counts, grid)
    return sent * DTYPE_BYTES[config.model.dtype]


def state_bytes(counts: Counts, engine: EngineConfig, dtype: str, grid: Grid) -> dict[str, int]:
    """Weights, gradients and optimizer state of a rank, on whichever memory they lie."""
    own = _shared(counts.dense, grid.shards) + _shared(counts.experts, grid.expert_shards)
    own_trained = _shared(counts.dense_trained, grid.shards) + _shared(counts.experts_trained, grid.expert_shards)
    is_sharded = SHARDS_PARAMETERS[engine.wrap]
    return {
        "weights": (own if is_sharded else counts.whole) * DTYPE_BYTES[dtype],
        "gradients": (own_trained if is_sharded else counts.trained) * _gradient_bytes(engine, dtype),
        "optimizer": own_trained * OPTIMIZER_BYTES[dtype],
    }


def stage_memory(config: Config, grid: Grid, work: Work, number: int, counts: Counts, found: Activations) -> RankMemory:
    """Memory of each rank of stage `number`, whose micro-batches have the activations `found`."""
    engine, dtype, is_grpo = config.engine, config.model.dtype, config.algorithm.name == "grpo"
    gathers = SHARDS_PARAMETERS[engine.wrap] and grid.shards > 1
    state = state_bytes(counts, engine, dtype, grid)
    if gathers:  # parameters outside of the layers stay gathered between steps
        state["embeddings, gathered"] = counts.output * DTYPE_BYTES[dtype]
    if is_grpo and config.algorithm.kl_coefficient > 0 and not engine.lora.rank:
        state["reference"] = state["weights"] + state.get("embeddings, gathered", 0)
    if config.teacher.is_frozen_model and not (config.teacher.version == START and (engine.lora.rank or "reference" in state)):
        state["teacher"] = state["weights"] + state.get("embeddings, gathered", 0)
    passes = {"activations": found.held, "logits and temporaries": found.peak - found.held}
    if gathers:
        passes = sharded_passes(counts, found, engine, dtype)
    passes["activations"] += round(found.held * (grid.in_flight(number, work.num_microbatches(grid)) - 1))
    fixed = {
        "sync buckets": 2 * min(config.sync.bucket_bytes, sent_bytes(config, counts, grid)) if is_grpo else 0,
        "workspaces": num_bytes("workspaces"),
    }
    parts = {name: size for name, size in {**state, **passes, **fixed}.items() if size}
    step = sum(state.values()) + sum(fixed.values())
    in_passes = step + sum(passes.values()) - (state["optimizer"] if engine.optimizer.offload else 0)
    if engine.gradient_dtype == dtype == "bfloat16":  # copies of gradients in float32
        step += state["optimizer"] // 3
    outside = num_bytes("trainer")
    if is_grpo:
        outside += num_bytes("trainer_rollouts") + (0 if config.rollout.is_colocated else num_bytes("nccl"))
    host = num_bytes("host_rank") + offloaded_bytes(parts, config) + _checkpoint_bytes(state, config, grid)
    if is_grpo:  # the log of versions and the transport each compare with a copy of the previous version
        copies = (config.sync.log == "deltas") + (config.sync.transport == "delta")
        host += copies * stage_parameters(counts, grid) * DTYPE_BYTES[dtype]
    loading = num_bytes("host_loading") + counts.whole * DTYPE_BYTES[dtype]
    return RankMemory(parts, in_passes, step, outside, max(loading, host))


def sharded_passes(counts: Counts, found: Activations, engine: EngineConfig, dtype: str) -> dict[str, int]:
    """Parts of the passes' peak with Megatron-FSDP over several ranks (megatron-fsdp 0.6.1).

    Layers are gathered ahead, half a communication unit. A layer's whole gradients come while its own activations are there, and
    wait for their reduction until more than a unit waits (param_and_grad_buffer.py:3917). Embeddings, final norm and output layer
    are one bucket, whose whole gradients stay from the output layer's backward pass to the embeddings'.
    """
    unit = engine.overrides.get("suggested_communication_unit_size", max(COMMUNICATION_UNIT, 2 * counts.largest_layer))
    layer, num_layers = max(1, counts.largest_layer), max(1, counts.num_layers)
    gathered = min(num_layers, math.ceil(unit / 2 / layer) + 1) * layer * DTYPE_BYTES[dtype]
    trained = (counts.trained - counts.output_trained) // num_layers
    gradient = _gradient_bytes(engine, dtype)
    moments = [(found.head_peak, 0)]
    for done in range(num_layers):  # layers whose backward pass is over
        waiting = min(done + 1, unit // max(1, trained) + 2) * trained + counts.output_trained
        moments.append((found.layer_peak - found.head_end * done // num_layers, waiting * gradient))
    activations, waiting = max(moments, key=sum)
    return {
        "activations": min(found.held, activations),
        "logits and temporaries": max(0, activations - found.held),
        "layers, gathered": gathered,
        "gradients before reduction": waiting,
    }


def offloaded_bytes(parts: Mapping[str, int], config: Config) -> int:
    """Bytes of `parts` that are on the host for some of the time; gradients are dropped and not copied."""
    colocated = config.algorithm.name == "grpo" and config.rollout.is_colocated
    kinds = set(config.rollout.offload_trainer) if colocated else set()
    kinds |= {"optimizer"} if config.engine.optimizer.offload else set()
    names = [name for kind in kinds - {"gradients"} for name in OFFLOADED[kind]]
    return sum(parts.get(name, 0) for name in names)


def _checkpoint_bytes(state: Mapping[str, int], config: Config, grid: Grid) -> int:
    """Copies in host memory while a checkpoint is written: file by file, or all at once beside the training."""
    if not config.checkpoint.every_steps:
        return 0
    weights = state["weights"] if SHARDS_PARAMETERS[config.engine.wrap] else _shared(state["weights"], grid.shards)
    weights = 0 if config.engine.lora.rank else weights
    if config.checkpoint.asynchronous:
        return weights + state["optimizer"]
    return min(weights, FILE_BYTES) + min(state["optimizer"], MAX_FILE_BYTES)


def _gradient_bytes(engine: EngineConfig, dtype: str) -> int:
    return 4 if dtype == "float32" else DTYPE_BYTES[engine.gradient_dtype]


def _shared(count: int, ranks: int) -> int:
    return -(-count // ranks)
