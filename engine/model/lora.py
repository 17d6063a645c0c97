"""Low-rank adapters: put beside a model's linears (lora_linears.py), kept, shown and trained; the base weights are frozen.

Leaves out files (engine/peft/), passes that several adapters share (engine/shared.py) and the merge (the weight bridge's).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.nn.functional as F

from engine import rules
from engine.config import DELTA_NET_TARGETS, LORA_TARGETS, LoraConfig
from engine.model.build import global_name, gpt_model
from engine.model.lora_linears import ADAPTED, Adapted, AdaptedExpertLinear
from engine.moe.experts import ExpertLinear
from engine.runtime import workarounds
from engine.runtime.megatron import ColumnParallelLinear, RowParallelLinear, parallel_state as mpu, tensor_parallel

START = "start"  # the name of the adapters of the start model
NamedLinears = Iterator[tuple[str, Any]]


def add_adapters(chunks: list[torch.nn.Module], config: LoraConfig, seed: int) -> None:
    """Freeze the loaded chunks, not yet wrapped, and put an adapter beside each linear that `config.targets` names.

    A is drawn as PEFT does (Kaiming uniform with a = sqrt(5)), by seed and name, so that every layout starts alike;
    B is zero.

    Raises:
        ValueError: no linear is called so, the rank is larger than a linear's dimension, or does not go with experts.
    """
    workarounds.fold_gradients_of_frozen_linears()
    for chunk in chunks:
        for parameter in chunk.parameters():
            parameter.requires_grad = False
        linears = dict(_layer_linears(chunk))
        present = {name.rpartition(".")[2] for name in linears}
        if gpt_model(chunk).config.linear_attention_freq:  # some chunks have layers of one kind alone
            present |= {*LORA_TARGETS, *DELTA_NET_TARGETS}
        unknown = [target for target in config.targets if target not in present]
        if unknown:
            raise ValueError(f"engine.lora.targets: no linear {unknown[0]!r} in this model; it has {', '.join(sorted(present))}")
        for name, linear in linears.items():
            if name.rpartition(".")[2] in config.targets:
                adapt = _adapt_experts if isinstance(linear, ExpertLinear) else _adapt
                adapt(linear, global_name(chunk, name), config, seed)
        embedding = getattr(gpt_model(chunk), "embedding", None)
        if embedding is not None:
            embedding.register_forward_hook(_begin_graph)


def adapted_linears(chunks: list[torch.nn.Module]) -> NamedLinears:
    """(global name, linear) of every linear with an adapter, in layer order."""
    for chunk in chunks:
        for name, module in chunk.named_modules():
            if isinstance(module, Adapted):
                yield global_name(chunk, name), module


def keep(chunks: list[torch.nn.Module], name: str) -> None:
    """Keep a copy of the adapters of now, not yet wrapped, under a name."""
    for _, linear in adapted_linears(chunks):
        linear.lora_kept = {**linear.lora_kept, name: (linear.lora_a.detach().clone(), linear.lora_b.detach().clone())}


@torch.no_grad()
def put_back(chunks: list[torch.nn.Module], name: str) -> None:
    """Undo what has changed in the adapters, not yet wrapped, since they were kept."""
    for _, linear in adapted_linears(chunks):
        for factor, kept in zip((linear.lora_a, linear.lora_b), linear.lora_kept[name], strict=True):
            factor.copy_(kept)


def showing(chunks: list[torch.nn.Module], name: str) -> AbstractContextManager[None]:
    """Another model: the base with the adapters kept under this name, or none. Chunks without adapters stay as they are."""
    return _set(chunks, "lora_shown", name)


def reference(chunks: list[torch.nn.Module]) -> AbstractContextManager[None]:
    """The start model."""
    return showing(chunks, START)


def training(chunks: list[torch.nn.Module]) -> AbstractContextManager[None]:
    """Enables the adapters' dropout."""
    return _set(chunks, "lora_training", True)


@contextmanager
def _set(chunks: list[torch.nn.Module], name: str, value: str | bool) -> Iterator[None]:
    linears = [linear for _, linear in adapted_linears(chunks)]
    for linear in linears:
        setattr(linear, name, value)
    try:
        yield
    finally:
        for linear in linears:
            delattr(linear, name)


def _layer_linears(chunk: torch.nn.Module) -> NamedLinears:
    for name, module in chunk.named_modules():
        if type(module) in ADAPTED and "decoder.layers." in name:
            yield name, module


def _begin_graph(_module: torch.nn.Module, _inputs: Any, output: torch.Tensor) -> None:
    """Make the first layer's input require a gradient, although the embeddings are frozen.

    megatron-core's recompute gives no gradients where no input wants one (random.py:CheckpointFunction), and Megatron-FSDP
    frees a unit after its backward pass by a hook on its inputs' gradients (megatron_fsdp.py:825).
    """
    if torch.is_grad_enabled() and not output.requires_grad:
        output.requires_grad_()


def _adapt(linear: Any, name: str, config: LoraConfig, seed: int) -> None:
    is_column, is_row = isinstance(linear, ColumnParallelLinear), isinstance(linear, RowParallelLinear)
    rows, columns = linear.weight.shape
    _check_rank(config, name, min(linear.input_size, linear.output_size))
    first = first_a(linear, name, seed, config.rank, config.rank)
    assert first.shape[1] == columns
    linear.__class__ = ADAPTED[type(linear)]  # as torch's fully_shard does: hooks, names and references stay
    linear.lora_a = torch.nn.Parameter(first.to(linear.weight))
    linear.lora_b = torch.nn.Parameter(linear.weight.new_zeros(rows, config.rank))
    for factor, is_sharded in ((linear.lora_a, is_row), (linear.lora_b, is_column)):
        if is_sharded:
            tensor_parallel.set_tensor_model_parallel_attributes(factor, True, 0 if is_column else 1, 1)
        elif linear.sequence_parallel:
            factor.sequence_parallel = True
    linear.lora_scale = config.scale
    linear.lora_dropout = config.dropout


def _adapt_experts(linear: Any, name: str, config: LoraConfig, seed: int) -> None:
    weight, count = linear.weight, linear.num_experts
    size, is_column = mpu.get_expert_tensor_parallel_world_size(), weight.partition_dim == 0
    rows, columns = weight.shape[0] // count, weight.shape[1]
    linear.input_size = columns if is_column else columns * size
    _check_rank(config, name, min(linear.input_size, rows * size if is_column else rows))
    if found := rules.experts_lora_problem(config, name, str(weight.dtype).removeprefix("torch.")):
        raise ValueError(str(found))
    first = first_a(linear, name, seed, config.rank, config.rank)
    linear.__class__ = AdaptedExpertLinear
    linear.lora_a = torch.nn.Parameter(first.to(weight))
    linear.lora_b = torch.nn.Parameter(weight.new_zeros(count * rows, config.rank))
    for factor in (linear.lora_a, linear.lora_b):
        factor.allreduce = weight.allreduce
        factor.num_local_experts, factor.expert_parallel_size = count, weight.expert_parallel_size
    sharded, whole = (linear.lora_b, linear.lora_a) if is_column else (linear.lora_a, linear.lora_b)
    tensor_parallel.set_tensor_model_parallel_attributes(sharded, True, 0 if is_column else 1, 1)
    whole.sequence_parallel = size > 1
    linear.lora_scale, linear.lora_dropout = config.scale, 0.0


def _check_rank(config: LoraConfig, name: str, smallest: int) -> None:
    if config.rank > smallest:
        raise ValueError(f"engine.lora.rank={config.rank} is larger than a dimension of {name} ({smallest}); lower it")


def first_a(linear: Any, name: str, seed: int, rank: int, num_rows: int) -> torch.Tensor:
    """This rank's part of the A that every layout draws, with zeros in rows above `rank`: float32 on the CPU.

    [num_rows, in], of experts [experts * num_rows, in]; of a row-parallel linear in / tensor. `linear` may be adapted or not.
    """
    weight: Any = linear.weight
    is_row, names = isinstance(linear, RowParallelLinear), [name]
    size, tensor_rank = (linear.tp_group.size(), linear.tp_group.rank()) if is_row else (1, 0)
    if isinstance(linear, ExpertLinear):
        first_expert = mpu.get_expert_model_parallel_rank() * linear.num_experts
        names = [f"{name}.{first_expert + number}" for number in range(linear.num_experts)]
        is_row = weight.partition_dim == 1
        size, tensor_rank = mpu.get_expert_tensor_parallel_world_size(), mpu.get_expert_tensor_parallel_rank()
    drawn = [F.pad(initial_a(rank, linear.input_size, each, seed), (0, 0, 0, num_rows - rank)) for each in names]
    whole = torch.cat(drawn)
    return whole.chunk(size, dim=1)[tensor_rank].contiguous() if is_row else whole


def initial_a(rank: int, num_inputs: int, name: str, seed: int) -> torch.Tensor:
    """float32 [rank, num_inputs] on the CPU."""
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
    a = torch.empty(rank, num_inputs)
    return torch.nn.init.kaiming_uniform_(a, a=math.sqrt(5), generator=generator)
