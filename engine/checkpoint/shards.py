"""Maps each of this rank's optimizer parameters to its part of a tensor of the whole model, in any layout and wrap.

A tensor of the whole model has megatron-core's name with the layer counted over all stages, and a shape that no layout changes:
[rows, columns]; [2, rows, columns] where gate and up are one linear; [experts, ...] where a layer has experts. Data parallelism
gives a rank a range of elements of its tensor- and expert-parallel shard, itself a box, which is a few boxes of the whole tensor.
Leaves out files (state.py). Sources: megatron-core 0.16.1 optimizer/distrib_optimizer.py, megatron-fsdp 0.6.1
param_and_grad_buffer.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from engine.attention.delta_net import MIXED, split_sizes
from engine.engine import Engine
from engine.model.build import global_name, is_tied_copy
from engine.runtime.megatron import parallel_state as mpu
from engine.wrap.optimizer import inner_optimizers, local

EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
FUSED_ROWS = (".in_proj.weight", ".in_proj.lora_b")  # of gated delta nets
GATE_AND_UP = re.compile(r"linear_fc1\.(weight|bias|lora_b)$")


class Box(NamedTuple):
    """A box of a tensor: where it begins and how large it is in each dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class Dim(NamedTuple):
    """One dimension of a shard, and of the whole tensor."""

    local: int
    whole: int
    offset: int


class Piece(NamedTuple):
    """A box of the whole tensor; its elements lie together in the shard, from `start` on."""

    box: Box
    start: int


def boxes(shape: tuple[int, ...], start: int, end: int) -> Iterator[Box]:
    """The elements start .. end of a contiguous tensor of `shape` as boxes, at most 2 * dimensions - 1, in their order.

    Invariant: the boxes' elements, one box after the other and each in row-major order, are the range.
    """
    inner = math.prod(shape[1:])
    if start >= end:
        return
    first, last = start // inner, end // inner
    if start % inner:
        for offsets, sizes in boxes(shape[1:], start % inner, min(end, (first + 1) * inner) - first * inner):
            yield Box((first, *offsets), (1, *sizes))
        first += 1
    if last > first:
        yield Box((first, *(0 for _ in shape[1:])), (last - first, *shape[1:]))
    if last >= first and end % inner:
        for offsets, sizes in boxes(shape[1:], 0, end % inner):
            yield Box((last, *offsets), (1, *sizes))


def pieces(dims: list[Dim], start: int, end: int) -> Iterator[Piece]:
    """The elements start .. end of a shard within the whole tensor, without the padding of the first dimension."""
    position = 0
    for offsets, sizes in boxes(tuple(dim.local for dim in dims), start, end):
        begins = tuple(offset + dim.offset for offset, dim in zip(offsets, dims, strict=True))
        kept = (max(0, min(sizes[0], dims[0].whole - begins[0])), *sizes[1:])
        if math.prod(kept):
            yield Piece(Box(begins, kept), position)
        position += math.prod(sizes)


@dataclass(frozen=True)
class Shard:
    """The part of a tensor of the whole model that one parameter of a torch optimizer holds."""

    name: str
    shape: tuple[int, ...]  # of the whole tensor
    pieces: tuple[Piece, ...]  # none where this rank has nothing of it
    optimizer: Any
    group: dict[str, Any]  # the optimizer's, which holds the parameter
    parameter: torch.Tensor  # the optimizer's: main weights
    dtype: torch.dtype  # of the model's weight
    is_written: bool  # by this rank: of shards that are the same on several ranks, one is


class _Source(NamedTuple):
    """A parameter of an optimizer, and of which parameter of the model it is which elements."""

    chunk: torch.nn.Module
    name: str  # in the chunk
    weight: Any  # the model's, as it was before it was wrapped
    start: int
    end: int
    optimizer: Any
    group: dict[str, Any]
    parameter: Any  # the optimizer's


def optimizer_shards(engine: Engine) -> list[Shard]:
    """The shards of every parameter that this rank's optimizers step, in their order."""
    return [_shard(engine, source) for source in SOURCES[engine.config.wrap](engine)]


def _ddp_sources(engine: Engine) -> Iterator[_Source]:
    """megatron-core's distributed optimizer: a range of each parameter, cut anywhere."""
    named = {parameter: (chunk, name) for chunk in engine.chunks for name, parameter in chunk.named_parameters()}
    for member in getattr(engine.optimizer, "chained_optimizers", [engine.optimizer]):
        for weight, (number, order) in getattr(member, "model_param_group_index_map", {}).items():  # a stub has none
            span, group = member._get_model_param_range_map(weight)["param"], member.optimizer.param_groups[number]
            yield _Source(*named[weight], weight, span.start, span.end, member.optimizer, group, group["params"][order])


def _fsdp_sources(engine: Engine) -> Iterator[_Source]:
    """Megatron-FSDP: a range of each parameter, most often whole rows."""
    named: dict[Any, tuple[torch.nn.Module, str]] = {}
    chunk: Any
    for chunk in engine.chunks:
        named |= {parameter: (chunk, name) for name, parameter in chunk.param_and_grad_buffer.optimizer_named_parameters}
    for optimizer in inner_optimizers(engine.optimizer):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                span = parameter.megatron_fsdp_slice
                yield _Source(*named[parameter], parameter.orig_param, span.start, span.stop, optimizer, group, parameter)


SOURCES = {"ddp": _ddp_sources, "megatron_fsdp": _fsdp_sources}


def _shard(engine: Engine, source: _Source) -> Shard:
    name, weight = global_name(source.chunk, source.name), source.weight
    dims = _dims(engine, name, weight)
    assert math.prod(dim.local for dim in dims) == weight.numel(), name
    assert source.end - source.start == local(source.parameter).numel(), name
    is_tied = is_tied_copy(source.chunk, source.name)  # the last stage's copy of the first stage's tensor
    is_replica = mpu.get_tensor_model_parallel_rank() > 0 and not getattr(weight, "tensor_model_parallel", False)
    return Shard(
        EMBEDDING if is_tied else name,
        tuple(dim.whole for dim in dims),
        tuple(_pieces(dims, _fused_rows(engine, name), source.start, source.end)),
        source.optimizer,
        source.group,
        source.parameter,
        weight.dtype,
        is_written=not (is_tied or is_replica),
    )


def _dims(engine: Engine, name: str, weight: Any) -> list[Dim]:
    """The boxes of the whole tensor that this rank's shard of a parameter covers, in the order of its elements."""
    num_experts = getattr(weight, "num_local_experts", 0)
    size, rank = mpu.get_tensor_model_parallel_world_size(), mpu.get_tensor_model_parallel_rank()
    if num_experts:
        size, rank = mpu.get_expert_tensor_parallel_world_size(), mpu.get_expert_tensor_parallel_rank()
    sharded = weight.partition_dim if getattr(weight, "tensor_model_parallel", False) and size > 1 else None
    shape = list(weight.shape)
    if num_experts:
        shape[0] //= num_experts
    halves = 2 if GATE_AND_UP.search(name) and engine.model_config.gated_linear_unit else 1
    shape[0] //= halves
    dims = [Dim(n, n * size, n * rank) if dim == sharded else Dim(n, n, 0) for dim, n in enumerate(shape)]
    if name in (EMBEDDING, OUTPUT):
        dims[0] = dims[0]._replace(whole=engine.mbridge.hf_config.vocab_size)
    if halves > 1:
        dims.insert(0, Dim(2, 2, 0))
    if num_experts:
        first = mpu.get_expert_model_parallel_rank() * num_experts
        dims.insert(0, Dim(num_experts, num_experts * weight.expert_parallel_size, first))
    return dims


def _fused_rows(engine: Engine, name: str) -> list[int]:
    """Rows of the whole tensor's parts where tensor parallelism splits each of several; else none."""
    if name.endswith(FUSED_ROWS):
        return split_sizes(engine.model_config)
    return split_sizes(engine.model_config)[:MIXED] if name.endswith(".self_attention.conv1d") else []


def _pieces(dims: list[Dim], parts: list[int], start: int, end: int) -> Iterator[Piece]:
    """Like `pieces`. `parts`: the rows of each part; a shard holds its share of every part."""
    rows = dims[0]
    if not parts or rows.local == rows.whole:
        yield from pieces(dims, start, end)
        return
    size, rank, inner, first = rows.whole // rows.local, rows.offset // rows.local, math.prod(dim.local for dim in dims[1:]), 0
    for number, part in enumerate(parts):
        share = part // size
        of_part = [Dim(share, rows.whole, sum(parts[:number]) + rank * share), *dims[1:]]
        low, high = max(start, first * inner), min(end, (first + share) * inner)
        for box, position in pieces(of_part, low - first * inner, high - first * inner) if low < high else ():
            yield Piece(box, low - start + position)
        first += share
