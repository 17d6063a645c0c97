"""Bytes of one vLLM worker by part, and the tokens that its KV cache holds. Pure functions; no torch in here.

vLLM takes rollout.gpu_memory_utilization of a GPU, and the part without weights and working memory becomes the KV cache, unless
rollout.kv_cache_bytes sets its size. Leaves out the trainer, which may share the GPU (make.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from bridge.layout.quantised import is_quantised
from engine.config import DTYPE_BYTES
from megasync.checks.served_sizes import cache_bytes_per_token
from megasync.config.schema import Config
from megasync.models.folder import model_fields
from megasync.models.model_shape import ModelShape
from megasync.models.tensors import expected_tensors
from megasync.models.tensors import num_parameters as num_parameters_of
from megasync.tools.plan.hardware import Hardware, num_bytes

BATCHED_TOKENS = 2048  # vllm/config/scheduler.py: max_num_batched_tokens of an engine that is neither LLM's nor a server's


@dataclass(frozen=True)
class WorkerMemory:
    """Memory of a vLLM worker in bytes."""

    parts: dict[str, int]
    cache_tokens: int  # of all its sequences together
    asleep: int  # stays on the GPU while a trainer that shares it trains

    @property
    def total(self) -> int:
        return sum(self.parts.values())


def worker_memory(
    config: Config, shape: ModelShape, num_parameters: int, hardware: Hardware, sent_bytes: int | None = None
) -> WorkerMemory:
    """`num_parameters`: of the whole model, tied embeddings once; `sent_bytes`: of a sync, None: that of all weights."""
    rollout = config.rollout
    whole = int(num_parameters * served_item(config, shape, num_parameters))
    weights = whole // rollout.tensor_parallel
    sent = whole if sent_bytes is None else sent_bytes
    buckets = 0 if rollout.is_colocated else 2 * min(config.sync.bucket_bytes, sent)
    draft = num_parameters_of(Path(path)) if (path := rollout.speculation.draft_path) else 0
    draft_weights = draft * DTYPE_BYTES[config.model.dtype] // rollout.tensor_parallel
    parts = {"weights": weights, "draft model": draft_weights, "KV cache": 0, "sampling state": _sampling_state(config, shape)}
    parts |= {"working memory": _working_memory(config, shape), "kernels": num_bytes("kernels")}
    graphs = 0 if rollout.enforce_eager else _graphs(config, shape)
    cache = rollout.kv_cache_bytes
    if cache is None:
        within = sum(parts.values()) + (0 if _uses_second_runner(config, shape) else graphs)
        cache = int(rollout.gpu_memory_utilization * hardware.memory_bytes) - within
    groups = (rollout.tensor_parallel > 1) + (not rollout.is_colocated)  # of several GPUs: its workers; trainer and workers
    outside = num_bytes("context") + groups * num_bytes("nccl")
    parts |= {"KV cache": cache, "CUDA graphs": graphs, "sync buckets": buckets, "CUDA context, NCCL": outside}
    shown = {name: size for name, size in parts.items() if size}
    asleep = outside + parts["kernels"] + graphs + parts["sampling state"]
    return WorkerMemory(shown, cache // cache_bytes_per_token(config, shape), asleep)


def served_item(config: Config, shape: ModelShape, num_parameters: int) -> float:
    """Bytes of a parameter on the replicas and in a sync, on average."""
    item = DTYPE_BYTES[config.model.dtype]
    if config.rollout.dtype != "fp8":
        return item
    sizes = [size for name, size in expected_tensors(shape, model_fields(config.model.path)).items() if is_quantised(name)]
    saved = sum(math.prod(size) * (item - 1) - 4 * size[0] for size in sizes)  # each row has a float32 scale
    return item - saved / num_parameters


def _uses_second_runner(config: Config, shape: ModelShape) -> bool:
    """Of vLLM's two model runners (vllm/config/vllm.py:DEFAULT_V2_MODEL_RUNNER_ARCHITECTURES, 0.26), never with speculation. It
    ignores CUDA graphs when it sizes the cache (v1/worker/gpu/model_runner.py:profile_cudagraph_memory); the first one does not.
    """
    if config.rollout.speculation.is_set:
        return False
    return not shape.num_experts or shape.model_type == "qwen2_moe"


def _sampling_state(config: Config, shape: ModelShape) -> int:
    """The second runner counts the tokens of each sequence (v1/worker/gpu/sample/penalties.py)."""
    per_token = 4 + 4 / 32 if _uses_second_runner(config, shape) else 0
    return int(config.rollout.max_num_seqs * shape.vocab_size * per_token)


def _working_memory(config: Config, shape: ModelShape) -> int:
    """Bytes of the profiling pass: over the most tokens that a step takes, and the logits of all sequences.

    Logits are the model's and float32 ones; the first runner also has their log-probs, probabilities and random numbers. Buffers
    of top-k and top-p have rows for up to 128 sequences (v1/sample/ops/topk_topp_triton.py).
    """
    rollout, item = config.rollout, DTYPE_BYTES[config.model.dtype]
    per_logit = item + (4 if _uses_second_runner(config, shape) else 16)
    rows = rollout.max_num_seqs * (1 + (rollout.speculation.num_tokens if rollout.speculation.is_set else 0))
    logits = shape.vocab_size * (rows * per_logit + min(rollout.max_num_seqs, 128) * 4)
    return _activations(config, shape) + logits + num_bytes("worker_workspaces")


def _activations(config: Config, shape: ModelShape) -> int:
    """Bytes of the widest part of a layer: the MLP's, before and after its activation function, or those of a token's experts."""
    rollout = config.rollout
    limit = int(rollout.engine_arguments.get("max_num_batched_tokens", BATCHED_TOKENS))
    rows = min(limit, rollout.max_num_seqs * (rollout.max_model_len or limit))
    width = 3 * shape.intermediate_size // rollout.tensor_parallel
    if shape.num_experts:
        expert = shape.moe_intermediate_size // rollout.tensor_parallel
        width = shape.num_experts_per_tok * (max(2 * expert, shape.hidden_size) + expert)
    return rows * (width + 3 * shape.hidden_size) * DTYPE_BYTES[config.model.dtype]


def _graphs(config: Config, shape: ModelShape) -> int:
    """The driver's memory of each graph, and their pool of tensors."""
    largest = min(512, 2 * config.rollout.max_num_seqs)  # vllm/config/vllm.py:_set_cudagraph_sizes
    few, some, many = (1, 2, 4), range(8, min(largest + 1, 256), 8), range(256, largest + 1, 16)
    sizes = sum(size <= largest for size in few) + len(some) + len(many)
    return sizes * shape.num_hidden_layers * num_bytes("graph_layer") + _activations(config, shape) + num_bytes("graph_pool")


def running_at_once(config: Config, worker: WorkerMemory, mean_tokens: float) -> int:
    """Samples of one replica that decode at the same time, at three quarters of their length on average."""
    by_cache = max(0, worker.cache_tokens) / max(1.0, mean_tokens * 0.75)
    return max(1, min(config.rollout.max_num_seqs, int(by_cache)))
