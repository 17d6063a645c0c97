"""Bytes of one vLLM worker by part, and what its KV cache holds. Pure functions; no torch in here.

vLLM takes rollout.gpu_memory_utilization of a GPU and gives to the KV cache what weights and its own working memory leave, or
rollout.kv_cache_bytes where that is set. Leaves out the trainer, which may share the GPU (make.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.config import DTYPE_BYTES
from megasync.config.schema import Config
from megasync.hf.model_shape import ModelShape
from megasync.planning.hardware import GIB, Hardware, num_bytes

BATCHED_TOKENS = 8192  # vllm/engine/arg_utils.py: max_num_batched_tokens of a GPU of 70 GiB or more
WORKER_PEAK = "memory/worker_host_peak_bytes"  # of a run's summary: the largest peak of a worker's resident memory
WORKER_DEVICE = "memory/worker_device_bytes"  # of a run's summary: what is taken of a worker's GPU at the end, by all processes
TRAINING_DEVICE = "memory/training_device_bytes"  # of a GPU that trainer and replica share, while the replica sleeps
CPU_CACHE_BYTES = GIB  # VLLM_CPU_KVCACHE_SPACE of launch/setup.sh


@dataclass(frozen=True)
class WorkerMemory:
    """In bytes."""

    parts: dict[str, int]
    cache_tokens: int  # of all its sequences together
    asleep: int  # what stays on the GPU while a trainer that shares it trains
    host: int = 0  # of a worker on a CPU: the whole process

    @property
    def total(self) -> int:
        return sum(self.parts.values())


def worker_memory(config: Config, shape: ModelShape, num_parameters: int, hardware: Hardware) -> WorkerMemory:
    """`num_parameters`: of the whole model, tied embeddings once."""
    rollout, item = config.rollout, DTYPE_BYTES[config.model.dtype]
    weights = num_parameters * item // rollout.tensor_parallel
    rows = min(BATCHED_TOKENS, rollout.max_num_seqs * (rollout.max_model_len or BATCHED_TOKENS))
    width = 2 * max(shape.intermediate_size, shape.moe_intermediate_size * max(1, shape.num_experts_per_tok))
    working = rows * (width // rollout.tensor_parallel + 4 * shape.hidden_size) * item
    working += rollout.max_num_seqs * shape.vocab_size * 8  # float32 logits, and their log-probs
    context = 0 if hardware.is_cpu else num_bytes("context") + (num_bytes("nccl") if rollout.tensor_parallel > 1 else 0)
    graphs = 0 if hardware.is_cpu or rollout.enforce_eager else num_bytes("graphs")
    cache = rollout.kv_cache_bytes
    if cache is None and hardware.is_cpu:
        cache = CPU_CACHE_BYTES
    if cache is None:
        cache = int(rollout.gpu_memory_utilization * hardware.memory_bytes) - weights - working - context
    buckets = 0 if rollout.is_colocated else 2 * config.sync.bucket_bytes
    parts = {"weights": weights, "KV cache": cache, "working memory": working, "CUDA graphs": graphs, "sync buckets": buckets}
    parts["CUDA context, NCCL"] = context
    shown = {name: size for name, size in parts.items() if size}
    host = sum(parts.values()) + num_bytes("host_worker") if hardware.is_cpu else 0
    return WorkerMemory(shown, cache // cache_bytes_per_token(config, shape), context + graphs, host)


def cache_bytes_per_token(config: Config, shape: ModelShape) -> int:
    """On one worker."""
    numbers = shape.num_hidden_layers * shape.cached_numbers(config.rollout.tensor_parallel)
    return int(numbers * DTYPE_BYTES[config.model.dtype])


def running_at_once(config: Config, worker: WorkerMemory, mean_tokens: float) -> int:
    """Samples of one replica that decode at the same time; a half of each sample's tokens is there on average."""
    by_cache = max(0, worker.cache_tokens) / max(1.0, mean_tokens * 0.75)
    return max(1, min(config.rollout.max_num_seqs, int(by_cache)))
