"""Seconds of a batch's generation: the steps of a replica, each a token of all samples that run, and their prompts.

Leaves out how long responses are (lengths.py), and how many run at once (replicas.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from engine.config import DTYPE_BYTES
from megasync.config.schema import Config
from megasync.hf.model_shape import ModelShape
from megasync.planning.cpu.decoding import CpuDecoding
from megasync.planning.hardware import Hardware, overlapped, seconds
from megasync.planning.lengths import decode_steps
from megasync.planning.model_costs import ModelCosts
from megasync.planning.replicas import WorkerMemory, cache_bytes_per_token, running_at_once
from megasync.planning.shapes import Work

OVERLAP = 3  # of overlapped(): each step waits for the one before
BLOCK_TOKENS, CPU_BLOCK_TOKENS = 16, 128  # of vLLM's cache: a group's samples share what is whole blocks of their prompt


class Generation(NamedTuple):
    """Seconds of a batch."""

    in_turns: float  # alone
    beside: float  # beside training, alone
    full: float  # beside training, among other batches, so that replicas are always full
    is_bound_by_host: bool = False  # the host of a GPU takes longer for a step than the GPU


NO_GENERATION = Generation(0.0, 0.0, 0.0)


@dataclass(frozen=True)
class GpuDecoding:
    """Steps of one replica. What the host does for one, and what its GPUs do, overlap."""

    flops: float
    bandwidth: float
    weights: float  # bytes of a GPU, all
    active: float  # those that one token needs
    products: float  # of a token, on a GPU
    cached: float  # bytes that a running sample has in the cache, mean
    base: float  # seconds of the host, whatever runs
    graph: float  # seconds of the GPU beside what it reads

    @staticmethod
    def of(
        config: Config, shape: ModelShape, model: ModelCosts, num_parameters: int, context: float, hardware: Hardware
    ) -> GpuDecoding:
        rollout, item, num_active = config.rollout, DTYPE_BYTES[config.model.dtype], model.layers + model.output
        eager = seconds("decode_layer_eager_experts" if model.experts_per_token else "decode_layer_eager")
        return GpuDecoding(
            flops=hardware.flops(config.model.dtype),
            bandwidth=hardware.bandwidth,
            weights=num_parameters * item / rollout.tensor_parallel,
            active=num_active * item / rollout.tensor_parallel,
            products=num_active / rollout.tensor_parallel,
            cached=context * cache_bytes_per_token(config, shape),
            base=seconds("decode_step") + (model.num_layers * eager if rollout.enforce_eager else 0.0),
            graph=0.0 if rollout.enforce_eager else model.num_layers * seconds("decode_layer_graph"),
        )

    def host(self, running: int) -> float:
        return self.base + running * seconds("decode_sequence")

    def device(self, running: int) -> float:
        read = min(self.weights, self.active * max(1, running)) + running * self.cached
        return max(read / self.bandwidth, 2 * self.products * running / self.flops) + self.graph

    def step(self, running: int) -> float:
        return overlapped(self.device(running), self.host(running), OVERLAP)

    def prefill(self, tokens: float, samples: float) -> float:
        return 2 * self.products * tokens / self.flops + samples * seconds("sample")

    def is_bound_by_host(self, running: int) -> bool:
        return self.host(running) > self.device(running)


def generation_seconds(
    config: Config,
    shape: ModelShape,
    model: ModelCosts,
    num_parameters: int,
    work: Work,
    worker: WorkerMemory,
    hardware: Hardware,
    num_processes: int = 1,
) -> Generation:
    """`num_processes`: that compute at the same time on the cores of a CPU, the replicas' and whichever else."""
    rollout, context = config.rollout, work.mean_tokens * 0.75
    samples = -(-work.num_samples // rollout.replicas)
    at_once = min(samples, running_at_once(config, worker, work.mean_tokens))
    decoding: CpuDecoding | GpuDecoding
    if hardware.is_cpu:
        decoding = CpuDecoding.of(config, model, context, at_once, num_processes)
    else:
        decoding = GpuDecoding.of(config, shape, model, num_parameters, context, hardware)
    block = CPU_BLOCK_TOKENS if hardware.is_cpu else BLOCK_TOKENS
    shared = work.prompt_tokens // block * block
    prefill = decoding.prefill(samples * (work.prompt_tokens - shared + shared / rollout.group_size), samples)
    steps = decode_steps(work.lengths, samples, at_once)
    alone = sum(count * decoding.step(running) for count, running in steps) + prefill
    full = samples * (work.mean_tokens - work.prompt_tokens) / at_once * decoding.step(at_once) + prefill
    extra = 0.0 if hardware.is_cpu else samples * (seconds("sample_overlapped") - seconds("sample"))
    mean = round(sum(count * running for count, running in steps) / max(1, sum(count for count, _ in steps)))
    return Generation(alone, alone + extra, min(alone, full) + extra, decoding.is_bound_by_host(mean))
