"""Seconds of a step on GPUs: multiplications, bytes and launches, at the speeds of hardware.py.

Leaves out rewards, evaluations and checkpoints, lengths
(lengths.py), and the samples that run at once (replicas.py). Pure functions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from engine.attention import windows
from engine.batch import costs
from engine.config import DTYPE_BYTES
from engine.wrap.ddp_fields import SHARDS_PARAMETERS
from megasync.checks.served_sizes import cache_bytes_per_token
from megasync.config.schema import Config
from megasync.models.model_shape import ModelShape
from megasync.tools.plan.hardware import Hardware, constant
from megasync.tools.plan.layout import Grid, Work
from megasync.tools.plan.lengths import decode_steps
from megasync.tools.plan.meta.ranks import Counts
from megasync.tools.plan.replicas import WorkerMemory, running_at_once, served_item

ADAPTER_MOVES = 7  # by LoRA's narrow products: numbers read and written, a token, over a layer's weights / hidden size
ADAM_BYTES = 34  # a parameter: gradient, main weight and both moments are read, three written, and the weight; the norm's read
BLOCK_TOKENS = 16  # of vLLM's cache: the samples of a group share whole blocks of their prompt
SAMPLE_BESIDE_TRAINING = 3  # times as long as in turns with training


@dataclass(frozen=True)
class Multiplications:
    """Multiplications of one token's forward pass through the whole model."""

    layers: float  # by weights
    output: float  # by the output layer
    attention_length: float  # tokens of a sequence whose attention costs as much as both
    windows: tuple[int, ...]
    num_layers: int
    hidden_size: int
    experts_per_token: int  # 0: no experts

    @staticmethod
    def of(bridge: Any) -> Multiplications:
        """`bridge`: mbridge's, of the whole model."""
        config, vocabulary = bridge.config, bridge.hf_config.vocab_size
        output = float(config.hidden_size * vocabulary)
        return Multiplications(
            layers=output / costs.output_cost(config, vocabulary) * config.num_layers,
            output=output,
            attention_length=costs.attention_length(config, vocabulary),
            windows=tuple(windows.layer_windows(bridge.hf_config.to_dict())),
            num_layers=config.num_layers,
            hidden_size=config.hidden_size,
            experts_per_token=config.moe_router_topk if config.num_moe_experts else 0,
        )

    def attention(self, lengths: tuple[int, ...]) -> float:
        """Multiplications of attention, the mean over the tokens of sequences of these lengths."""
        sizes = np.array(lengths, np.int64)
        matrices = costs.attention_costs(sizes, self.windows).sum() / sizes.sum()
        return float((self.layers + self.output) * matrices / self.attention_length)


class StepSeconds(NamedTuple):
    """Seconds of the parts of one step."""

    train: float
    optimizer: float
    log_probs: float
    generation: float
    sync: float
    moving: float  # colocated: the trainer's state to the host and back, and vLLM's sleep
    step: float
    binding: str  # the part that the step waits for


class Machine(NamedTuple):
    """A config on its hardware."""

    config: Config
    hardware: Hardware
    grid: Grid
    work: Work
    model: Multiplications

    @property
    def flops(self) -> float:
        """FLOP/s of a model's passes on one device."""
        if self.config.model.dtype == "float32":
            return self.hardware.float32_flops * constant("float32")
        return self.hardware.flops * constant("experts" if self.model.experts_per_token else "dense")

    @property
    def item(self) -> int:
        return DTYPE_BYTES[self.config.model.dtype]


def train_seconds(on: Machine, counts: Counts) -> tuple[float, float]:
    """Forward and backward passes over a batch, once; and one forward pass over it, as for log-probs."""
    engine, grid, work, model = on.config.engine, on.grid, on.work, on.model
    tokens = work.tokens / grid.data
    attention = model.attention(tuple(work.prompt_tokens + length for length in work.lengths))
    forward = model.layers + model.output + attention
    passes = (2 if engine.lora.rank else 3) * (model.layers + model.output) + 3 * attention
    if engine.recompute == "full":
        passes += model.layers + attention
    elif engine.recompute == "selective" and {"mlp", "moe"} & set(engine.recompute_modules):
        passes += model.layers  # mostly MLPs
    if work.microbatch_tokens(grid) > engine.logits_chunk_tokens:
        passes += model.output
    adapters = ADAPTER_MOVES * model.layers / model.hidden_size * on.item / on.hardware.bandwidth if engine.lora.rank else 0.0
    num_microbatches = work.num_microbatches(grid) * work.num_minibatches
    # a trained parameter and micro-batch: its gradient is read, and the sum of former ones read and written
    accumulated = (on.item + 2 * DTYPE_BYTES[engine.gradient_dtype]) * counts.trained * num_microbatches / on.hardware.bandwidth
    launched = launch_seconds(on)
    bubble = 1 + (grid.pipeline - 1) / (grid.virtual * max(1, work.num_microbatches(grid)))
    sent = _communication_seconds(on, tokens)
    train = max((2 * passes / on.flops + adapters) * tokens / grid.split + accumulated, launched) * bubble + sent
    alone = max((2 * forward / on.flops + adapters / 3) * tokens / grid.split, launched / 3) * bubble + sent / 3
    return train, alone


def launch_seconds(on: Machine) -> float:
    """The host's seconds in a batch's passes: a layer of a micro-batch is launched in the same time, whatever its tokens."""
    engine = on.config.engine
    more = SHARDS_PARAMETERS[engine.wrap], engine.lora.rank > 0, on.config.model.dtype == "float32", engine.recompute != "none"
    layer = constant("layer_launch") * constant("more_launches") ** sum(more)
    return layer * on.model.num_layers / on.grid.pipeline * on.work.num_microbatches(on.grid) * on.work.num_minibatches


def _communication_seconds(on: Machine, tokens: float) -> float:
    """Seconds of the communication of tensor and expert parallelism, which no computation hides."""
    grid, copies = on.grid, on.model.experts_per_token
    moved = 12 * (grid.tensor - 1) / grid.tensor  # gathers and reductions of a layer, forward and backward, some of them twice
    moved += 4 * copies * (grid.expert - 1) / grid.expert  # a token to its experts and back
    layers = on.model.num_layers / grid.pipeline
    return moved * tokens / grid.context * on.model.hidden_size * on.item * layers / on.hardware.link


def optimizer_seconds(on: Machine, counts: Counts) -> float:
    """Seconds of a batch's optimizer steps."""
    own = counts.dense_trained / on.grid.shards + counts.experts_trained / on.grid.expert_shards
    found = ADAM_BYTES * own / on.hardware.bandwidth
    if on.config.engine.optimizer.offload:
        found += 2 * 12 * own / on.hardware.host_link
    return found * on.work.num_minibatches


def sync_seconds(on: Machine, num_bytes: float) -> float:
    is_sharded = SHARDS_PARAMETERS[on.config.engine.wrap] and on.grid.shards > 1
    speed = on.hardware.link * constant("sync_fsdp" if is_sharded else "sync")
    return num_bytes / on.grid.pipeline / speed + constant("sync_messages")


class Generation(NamedTuple):
    """Seconds of generating a batch on one replica."""

    alone: float
    full: float  # among other batches, so that as many samples run as may


def generation_seconds(on: Machine, shape: ModelShape, num_parameters: int, worker: WorkerMemory) -> Generation:
    """A step of a replica is a token of all its running samples: the weights and their cache go through the GPU's memory."""
    rollout, work, model = on.config.rollout, on.work, on.model
    samples = -(-work.num_samples // rollout.replicas)
    at_once = min(samples, running_at_once(on.config, worker, work.mean_tokens))
    products = (model.layers + model.output) / rollout.tensor_parallel  # of a token on one GPU
    item = served_item(on.config, shape, num_parameters)
    cached = 0.75 * work.mean_tokens * cache_bytes_per_token(on.config, shape)

    def device(running: float) -> float:
        weights = min(num_parameters / rollout.tensor_parallel, products * max(1.0, running)) * item
        graphs = 0.0 if rollout.enforce_eager else model.num_layers * constant("decode_layer_graph")
        return max((weights + running * cached) / on.hardware.bandwidth, 2 * products * running / on.flops) + graphs

    def host(running: float) -> float:
        eager = model.num_layers * constant("decode_layer_eager") if rollout.enforce_eager else 0.0
        return constant("decode_step") + running * constant("decode_sample") + eager

    def step(running: float) -> float:
        """Each step waits for the one before, so that it takes more than the longer one of device and host."""
        return float((device(running) ** 3 + host(running) ** 3) ** (1 / 3))

    shared = work.prompt_tokens // BLOCK_TOKENS * BLOCK_TOKENS
    prompts = samples * (work.prompt_tokens - shared + shared / rollout.group_size)
    sample = constant("sample") * (SAMPLE_BESIDE_TRAINING if rollout.max_staleness else 1)
    around = 2 * products * prompts / on.flops + samples * sample
    steps = decode_steps(work.lengths, samples, at_once)
    alone = sum(count * step(running) for count, running in steps) + around
    full = samples * (work.mean_tokens - work.prompt_tokens) / at_once * step(at_once) + around
    return Generation(alone, min(alone, full))


def step_seconds(config: Config, parts: dict[str, float], generation: Generation) -> StepSeconds:
    """`parts`: train, optimizer, log_probs, sync and moving. In turns with `max_staleness` 0, else side by side."""
    rollout = config.rollout
    trainer = parts["train"] + parts["optimizer"] + parts["log_probs"]
    if not rollout.max_staleness or config.algorithm.name == "sft":
        at = {"training": trainer, "generation": generation.alone, "moving": parts["moving"]}
        step, found = sum(at.values()) + parts["sync"], generation.alone
    else:  # a sync that drains one batch in flight lets replicas run empty, so that each batch is generated alone
        is_emptied = rollout.on_update == "drain" and rollout.max_staleness == 1
        found = generation.alone if is_emptied else generation.full
        at = {"training": trainer + parts["sync"], "generation": found + parts["sync"]}
        step = max(at.values())
    return StepSeconds(**parts, generation=found, step=step, binding=max(at, key=at.__getitem__))
