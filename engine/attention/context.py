"""Context parallelism: C ranks share every packed sequence.

A sequence, padded to a multiple of 2 C tokens, is cut into 2 C chunks, and rank r has the chunks r and 2 C - 1 - r: with a
causal mask all ranks have the same work. Only attention looks across: by `allgather` each rank has K and V of all tokens for the
queries of its own; by `ulysses` (arXiv:2309.14509) it has all tokens for a part of the heads. What the loss is made of is
gathered to whole sequences, so that every context rank computes the same loss, and of its gradient takes its part.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from engine.attention import dense, flash
from engine import rules
from engine.batch.batch import MicroBatch
from engine.config import ParallelConfig
from engine.runtime.megatron import parallel_state as mpu
from engine.batch.packed import ContextPart

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def gather(values: torch.Tensor, part: ContextPart) -> torch.Tensor:
    """[T / C, ...] of each rank to [T, ...], for what every rank computes alike: of a gradient each takes its own part."""
    return _Gather.apply(values, part, False)  # type: ignore[no-any-return, no-untyped-call]


def attend(
    part: ContextPart,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float | None,
    whole: Attend,
    window: int = 0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of [T / C, heads, dim], values may have a smaller dim, which is the result's.

    `whole`: that of all T tokens of a packing, with the same `window` and `sinks`.
    """
    if part.uses_ulysses:
        heads = whole(*(_Exchange.apply(x, part, True) for x in (query, key, value)))  # type: ignore[no-untyped-call]
        return _Exchange.apply(heads, part, False)  # type: ignore[no-any-return, no-untyped-call]
    both = [key.flatten(1), value.flatten(1)]
    gathered = _Gather.apply(torch.cat(both, 1), part, True).split([x.shape[1] for x in both], 1)  # type: ignore[no-untyped-call]
    key, value = (x.unflatten(1, own.shape[1:]) for x, own in zip(gathered, (key, value), strict=True))
    if query.is_cuda and query.dtype is not torch.float32 and sinks is None:
        ends, kv_index, longest = part.prefixes
        return flash.attend_prefixes(query, key[kv_index], value[kv_index], ends, longest, scale, window)
    pieces, begin = [], 0
    for start, end, size in part.chunks:
        q, k, v = (x.transpose(0, 1)[None] for x in (query[begin : begin + size], key[start:end], value[start:end]))
        mask = causal_mask(size, end - start, window, query.device)
        out = dense.attend(q, k, v, scale, mask, sinks)
        pieces.append(out[0].transpose(0, 1))
        begin += size
    return torch.cat(pieces)


def check(hf_config: Any, parallel: ParallelConfig) -> None:
    """ValueError for what does not go with it."""
    if found := rules.context_problem(hf_config.model_type, hf_config.num_key_value_heads, parallel):
        raise ValueError(str(found))


def causal_mask(num_queries: int, num_keys: int, window: int, device: torch.device) -> torch.Tensor:
    """bool [queries, keys]: the tokens that each query attends to. Queries are the last tokens; `window`: 0, or most of them."""
    before = num_keys - num_queries
    mask = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device).tril(before)
    return mask.triu(before - window + 1) if window else mask


def num_chunks(parallel: ParallelConfig) -> int:
    """Into how many every sequence is cut."""
    return 2 * parallel.context if parallel.context > 1 else 1


def shard_microbatches(microbatches: list[MicroBatch], parallel: ParallelConfig) -> list[MicroBatch]:
    """The micro-batches with this context rank's part of the model's inputs; the loss's inputs stay whole."""
    if parallel.context == 1:
        return microbatches
    group, uses_ulysses, parts = mpu.get_context_parallel_group(), parallel.context_attention == "ulysses", []
    for micro in microbatches:
        part = ContextPart.from_lengths(micro.sequences.lengths, group, micro.tokens.device, uses_ulysses=uses_ulysses)
        others = ("support", "teacher_top_ids", "teacher_top_log_probs")
        names = ("tokens", "labels", "position_ids", *(name for name in others if getattr(micro, name) is not None))
        read: dict[str, Any] = {name: getattr(micro, name)[:, part.own] for name in names}
        micro.sequences.context = part
        if micro.sequences.routing is not None:
            micro.sequences.routing = micro.sequences.routing.part(part.own)
        parts.append(dataclasses.replace(micro, **read))
    return parts


class _Gather(torch.autograd.Function):
    """All ranks' tokens in the order of the packing; gradients are summed over ranks, or equal on each."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, part: ContextPart, sums: bool) -> torch.Tensor:
        ctx.part, ctx.sums = part, sums
        gathered = values.new_empty(len(part.order), *values.shape[1:])
        dist.all_gather_into_tensor(gathered, values.contiguous(), group=part.group)
        return gathered[part.order]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        part: ContextPart = ctx.part
        (gradient,) = gradients
        if not ctx.sums:
            return gradient[part.own], None, None
        own = gradient.new_empty(len(part.own), *gradient.shape[1:])
        dist.reduce_scatter_tensor(own, gradient[part.by_rank], group=part.group)
        return own, None, None


class _Exchange(torch.autograd.Function):
    """Between [T / C, heads, dim] and [T, heads / C, dim], `to_heads`, in the order of the packing: each other's transpose."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, part: ContextPart, to_heads: bool) -> torch.Tensor:
        ctx.part, ctx.to_heads = part, to_heads
        return _exchange(values, part, to_heads=to_heads)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _exchange(gradients[0], ctx.part, to_heads=not ctx.to_heads), None, None


def _exchange(values: torch.Tensor, part: ContextPart, *, to_heads: bool) -> torch.Tensor:
    size, dim = part.group.size(), values.shape[-1]
    num_own = len(part.order) // size
    if to_heads:
        sent = values.reshape(num_own, size, -1, dim).transpose(0, 1).contiguous()
    else:
        sent = values[part.by_rank].reshape(size, num_own, -1, dim)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=part.group)
    if to_heads:
        return received.flatten(0, 1)[part.order]
    return received.transpose(0, 1).reshape(num_own, -1, dim)
