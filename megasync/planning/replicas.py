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

BATCHED_TOKENS = 2048  # vllm/config/scheduler.py: max_num_batched_tokens of an engine that is neither LLM's nor a server's
CPU_BATCHED_TOKENS = 8192  # what measured.json's bytes of a worker on a CPU were found with
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


def worker_memory(
    config: Config, shape: ModelShape, num_parameters: int, hardware: Hardware, sent_bytes: int | None = None
) -> WorkerMemory:
    """`num_parameters`: of the whole model, tied embeddings once; `sent_bytes`: of a sync, None: that of all weights."""
    rollout = config.rollout
    whole = num_parameters * DTYPE_BYTES[config.model.dtype]
    weights = whole // rollout.tensor_parallel
    sent = whole if sent_bytes is None else sent_bytes
    buckets = 0 if rollout.is_colocated else 2 * min(config.sync.bucket_bytes, sent)
    if hardware.is_cpu:
        return _on_cpu(config, shape, weights, buckets, sent)
    parts = {"weights": weights, "KV cache": 0, "sampling state": _sampling_state(config, shape)}
    parts |= {"working memory": _working_memory(config, shape), "kernels": num_bytes("kernels")}
    graphs = 0 if rollout.enforce_eager else _graphs(config, shape)
    cache = rollout.kv_cache_bytes
    if cache is None:
        within = sum(parts.values()) + (0 if _uses_second_runner(shape) else graphs)
        cache = int(rollout.gpu_memory_utilization * hardware.memory_bytes) - within
    groups = (rollout.tensor_parallel > 1) + (not rollout.is_colocated)  # of several GPUs: its workers; trainer and workers
    outside = num_bytes("context") + groups * num_bytes("nccl")
    parts |= {"KV cache": cache, "CUDA graphs": graphs, "sync buckets": buckets, "CUDA context, NCCL": outside}
    shown = {name: size for name, size in parts.items() if size}
    asleep = outside + parts["kernels"] + graphs + parts["sampling state"]
    return WorkerMemory(shown, cache // cache_bytes_per_token(config, shape), asleep)


def _uses_second_runner(shape: ModelShape) -> bool:
    """Of vLLM's two model runners (vllm/config/vllm.py:DEFAULT_V2_MODEL_RUNNER_ARCHITECTURES, 0.26). It takes no account of
    graphs when it finds how large the cache may be (v1/worker/gpu/model_runner.py:profile_cudagraph_memory); the first one does.
    """
    return not shape.num_experts or shape.model_type == "qwen2_moe"


def _sampling_state(config: Config, shape: ModelShape) -> int:
    """What the second runner has of each sequence: how often it has each token (v1/worker/gpu/sample/penalties.py)."""
    per_token = 4 + 4 / 32 if _uses_second_runner(shape) else 0
    return int(config.rollout.max_num_seqs * shape.vocab_size * per_token)


def _working_memory(config: Config, shape: ModelShape) -> int:
    """Of the pass that vLLM tries before it starts: over as many tokens as it ever takes, and the logits of all sequences.

    Of logits: the model's, and float32 ones; the first runner has their log-probs, probabilities and random numbers besides. Rows
    of up to 128 sequences are buffers of top-k and top-p (v1/sample/ops/topk_topp_triton.py).
    """
    rollout, item = config.rollout, DTYPE_BYTES[config.model.dtype]
    per_logit = item + (4 if _uses_second_runner(shape) else 16)
    logits = shape.vocab_size * (rollout.max_num_seqs * per_logit + min(rollout.max_num_seqs, 128) * 4)
    return _activations(config, shape) + logits + num_bytes("worker_workspaces")


def _activations(config: Config, shape: ModelShape) -> int:
    """Of the widest part of a layer: the MLP's, before and after its activation function, or those of a token's experts."""
    rollout = config.rollout
    limit = int(rollout.engine_arguments.get("max_num_batched_tokens", BATCHED_TOKENS))
    rows = min(limit, rollout.max_num_seqs * (rollout.max_model_len or limit))
    width = 3 * shape.intermediate_size // rollout.tensor_parallel
    if shape.num_experts:
        expert = shape.moe_intermediate_size // rollout.tensor_parallel
        width = shape.num_experts_per_tok * (max(2 * expert, shape.hidden_size) + expert)
    return rows * (width + 3 * shape.hidden_size) * DTYPE_BYTES[config.model.dtype]


def _graphs(config: Config, shape: ModelShape) -> int:
    """What the driver keeps of each, and their own pool of tensors."""
    most = min(512, 2 * config.rollout.max_num_seqs)  # vllm/config/vllm.py:_set_cudagraph_sizes
    sizes = len([*(size for size in (1, 2, 4) if size <= most), *range(8, min(most + 1, 256), 8), *range(256, most + 1, 16)])
    return sizes * shape.num_hidden_layers * num_bytes("graph_layer") + _activations(config, shape) + num_bytes("graph_pool")


def _on_cpu(config: Config, shape: ModelShape, weights: int, buckets: int, sent: int) -> WorkerMemory:
    rollout, item = config.rollout, DTYPE_BYTES[config.model.dtype]
    rows = min(CPU_BATCHED_TOKENS, rollout.max_num_seqs * (rollout.max_model_len or CPU_BATCHED_TOKENS))
    width = 2 * max(shape.intermediate_size, shape.moe_intermediate_size * max(1, shape.num_experts_per_tok))
    working = rows * (width // rollout.tensor_parallel + 4 * shape.hidden_size) * item
    working += rollout.max_num_seqs * shape.vocab_size * 8  # float32 logits, and their log-probs
    cache = rollout.kv_cache_bytes or CPU_CACHE_BYTES
    parts = {"weights": weights, "KV cache": cache, "working memory": working, "sync buckets": buckets}
    parts |= {"largest tensor of a sync": min(sent, shape.vocab_size * shape.hidden_size * item)}  # put together from buckets
    shown = {name: size for name, size in parts.items() if size}
    host = sum(parts.values()) + num_bytes("host_worker")
    return WorkerMemory(shown, cache // cache_bytes_per_token(config, shape), 0, host)


def cache_bytes_per_token(config: Config, shape: ModelShape) -> int:
    """On one worker."""
    numbers = shape.num_hidden_layers * shape.cached_numbers(config.rollout.tensor_parallel)
    return int(numbers * DTYPE_BYTES[config.model.dtype])


def running_at_once(config: Config, worker: WorkerMemory, mean_tokens: float) -> int:
    """Samples of one replica that decode at the same time; a half of each sample's tokens is there on average."""
    by_cache = max(0, worker.cache_tokens) / max(1.0, mean_tokens * 0.75)
    return max(1, min(config.rollout.max_num_seqs, int(by_cache)))
