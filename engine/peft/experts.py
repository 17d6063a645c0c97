"""Experts' adapters in PEFT's folders: of a layer's experts one A and one B for each of the two parameters that hold them all.

PEFT stacks the experts' A, and in B's columns the expert counts fastest. Around the adapter of `mlp.experts.gate_up_proj` it
wraps that of `down_proj`: the names are `mlp.experts.base_layer` and `mlp.experts`, or the latter where one alone is adapted.
Sources: peft 0.21.2 tuners/lora/layer.py:ParamWrapper; transformers 5.19 modeling_qwen3_moe.py. Leaves out files (peft.py).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
import torch.distributed as dist

from engine.runtime.megatron import parallel_state as mpu
from engine.wrap.items import AdapterItem

PARAMETERS = {"linear_fc1": "gate_up_proj", "linear_fc2": "down_proj"}


def linear_name(linear: str) -> str:
    """transformers' parameter of megatron-core's `linear`."""
    layer, kind = linear.split(".")[2], linear.rpartition(".")[2]
    return f"model.layers.{layer}.mlp.experts.{PARAMETERS[kind]}"


def peft_name(linear: str, adapted: Collection[str]) -> str:
    """PEFT's module beside `linear`, where a layer's `adapted` linears have adapters."""
    parent, _, kind = linear.rpartition(".")
    is_inner = kind == "linear_fc1" and f"{parent}.linear_fc2" in adapted
    return linear_name(linear).rpartition(".")[0] + (".base_layer" if is_inner else "")


def whole_factors(item: AdapterItem, group: Any, tensor_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """PEFT's A [experts * rank, in] and B [out, rank * experts] of all experts.

    `group`: the expert-parallel ranks, and of each the `tensor_size` tensor-parallel ones, in this order; None: this rank alone.
    Collective over it.
    """
    a, b, _ = item.adapter
    num_ranks, halves = b.shape[1], 2 if item.linear.endswith("linear_fc1") else 1
    parts = [a.view(item.num_experts, num_ranks, -1), b.view(item.num_experts, halves, -1, num_ranks)]
    split_dims = [2 if item.shard_dim == 1 else None, 2 if item.shard_dim == 0 else None]
    if group is not None:
        parts = [_gather(part, dim, group, tensor_size) for part, dim in zip(parts, split_dims, strict=True)]
    whole_a, whole_b = parts
    return whole_a.flatten(0, 1), whole_b.flatten(1, 2).permute(1, 2, 0).flatten(1)


def _gather(part: torch.Tensor, split_dim: int | None, group: Any, tensor_size: int) -> torch.Tensor:
    """Experts are its dimension 0; `split_dim`: which tensor parallelism shards."""
    gathered = part.new_empty(group.size() * part.numel())
    dist.all_gather_into_tensor(gathered, part.reshape(-1), group=group)
    by_rank = gathered.view(-1, tensor_size, *part.shape)
    whole = [torch.cat(list(shards), split_dim) if split_dim is not None else shards[0] for shards in by_rank]
    return torch.cat(whole)


def load(linear: Any, name: str, a: torch.Tensor, b: torch.Tensor) -> None:
    """Put this rank's part of PEFT's `a` and `b` into an adapted linear, megatron-core's `name`.

    Of a linear with more ranks, as fused ones beside it need, those beyond the adapter's add nothing.
    """
    size, rank = mpu.get_expert_tensor_parallel_world_size(), mpu.get_expert_tensor_parallel_rank()
    count = linear.num_experts
    num_experts = count * linear.weight.expert_parallel_size
    num_ranks, halves = a.shape[0] // num_experts, 2 if name.endswith("linear_fc1") else 1
    first = mpu.get_expert_model_parallel_rank() * count
    own_a = a.view(num_experts, num_ranks, -1)[first : first + count]
    own_b = b.view(-1, num_ranks, num_experts).permute(2, 0, 1)[first : first + count]
    own_b = own_b.reshape(count, halves, -1, num_ranks)
    if linear.weight.partition_dim == 0:
        own_b = own_b.chunk(size, dim=2)[rank]
    else:
        own_a = own_a.chunk(size, dim=2)[rank]
    linear.lora_a.view(count, -1, own_a.shape[2])[:, :num_ranks].copy_(own_a)
    linear.lora_b.zero_().view(count, -1, linear.lora_b.shape[1])[..., :num_ranks].copy_(own_b.flatten(1, 2))
