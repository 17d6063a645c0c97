"""Replaces code that meta tensors cannot run while a step is traced: kernels keep their memory, not their arithmetic.

For GPUs attention saves the tensors of FlashAttention and has its temporaries, in float32 those of torch's memory-efficient
kernel, and the norm is torch's CUDA kernel; for CPUs both are the engine's own code on torch's operators. A kernel of
torch.compile is one piece; experts get equal numbers of tokens. All else is the engine's own code. Leaves out the counting
(tracker.py).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F

from engine.attention import context, core, delta_net, flash, fused
from engine.model import lora_linears
from engine.model.families import gpt_oss
from engine.moe import experts
from engine.moe.experts import TokenDispatcher
from engine.objective import entropy
from engine.runtime.megatron import MoEAlltoAllTokenDispatcher, bias_swiglu_impl
from megasync.tools.plan.meta.tracker import Tracker

COMPILED: tuple[tuple[ModuleType, tuple[str, ...]], ...] = (
    (fused, ("_rotate", "_log_sum_exp", "_logits_gradient")),
    (entropy, ("_within_fused",)),
    (sys.modules[bias_swiglu_impl.__module__], ("swiglu", "swiglu_back", "weighted_swiglu", "weighted_swiglu_back")),
)
DISPATCHERS = sys.modules[MoEAlltoAllTokenDispatcher.__module__]
Kernel = tuple[Any, str, Any]  # an object, the name of its function, and what stands in for it


class _Attention(torch.autograd.Function):
    """flash_api.cpp:mha_varlen_fwd and mha_varlen_bwd: dq is added up in float32, dk and dv are first of all heads."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(query)
        ctx.save_for_backward(query, key, value, out, query.new_empty(query.shape[:2], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor, ...]:
        query, key, value, *_rest = ctx.saved_tensors
        found = tuple(torch.empty_like(x) for x in (query, key, value))
        added_up = [query.new_empty(query.shape, dtype=torch.float32)]
        if key.shape[1] != query.shape[1]:
            added_up += [torch.empty_like(query), torch.empty_like(query)]
        del added_up
        return found


class _Norm(torch.autograd.Function):
    """torch's CUDA kernel of RMSNorm saves the input and one number a row."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight, _norms = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


class _Grouped(torch.autograd.Function):
    """torch's grouped products: they keep their inputs. On meta tensors torch has only those in bfloat16."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, weight: torch.Tensor, num_outputs: int) -> torch.Tensor:
        ctx.save_for_backward(inputs, weight)
        return inputs.new_empty(len(inputs), num_outputs)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        wanted = zip(ctx.saved_tensors, ctx.needs_input_grad, strict=False)
        return (*(torch.empty_like(tensor) if is_wanted else None for tensor, is_wanted in wanted), None)


def _grouped(inputs: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> Any:
    return _Grouped.apply(inputs, weight, len(weight) // len(ends))  # type: ignore[no-untyped-call]


def _stacked(inputs: torch.Tensor, weight: torch.Tensor, _ends: torch.Tensor) -> Any:
    return _Grouped.apply(inputs, weight, weight.shape[1])  # type: ignore[no-untyped-call]


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    result: torch.Tensor = _Attention.apply(query, key, value)  # type: ignore[no-untyped-call]
    return result


def _attend_packed(self: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packed: Any) -> torch.Tensor:
    return flash.attend(query, key, value, packed, self.scale, self.window).flatten(1)


def attend_grouped(self: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packed: Any) -> torch.Tensor:
    """CoreAttention._grouped for sequences of one length: gathered, attended to in one batch, and scattered back."""
    count, length = len(packed.lengths), max(packed.lengths)
    assert count * length == len(query)
    index = torch.arange(len(query), device="meta")
    q, k, v = (x[index.view(count, length)].transpose(1, 2) for x in (query, key, value))
    out = self._dense(q, k, v).transpose(1, 2).flatten(0, 1)[index]
    return torch.cat([out])[index].flatten(1)


def _attend_delta(
    packed: Any, mixed: torch.Tensor, log_decay: torch.Tensor, strength: torch.Tensor, *others: Any
) -> torch.Tensor:
    """delta_net.attend for sequences of one length, as above."""
    index = torch.arange(len(mixed), device="meta")
    rows = index.view(len(packed.lengths), -1)
    out = delta_net.of_sequences(mixed[rows], log_decay[rows], strength[rows], *others).flatten(0, 1)[index]
    return torch.cat([out])[index]


def _dot_products(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: Any = None, **options: Any
) -> torch.Tensor:
    """torch's attention of float32 on GPUs, with the heads of keys repeated as engine/attention/dense.py does there."""
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    bias = None if attn_mask is None else attn_mask.to(query.dtype).expand(*query.shape[:2], *attn_mask.shape)
    causal, kernel = bool(options.get("is_causal")), torch.ops.aten._scaled_dot_product_efficient_attention
    return kernel(query, key, value, bias, True, 0.0, causal, scale=options.get("scale"))[0]  # type: ignore[no-any-return]


def _attend_over_context(part: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any) -> torch.Tensor:
    """engine/attention/context.py:attend as with CUDA: gathers keys and values of all tokens, then selects the visible ones."""
    if part.uses_ulysses:
        return _real_attend(part, query, key, value, *rest)
    apply: Any = context._Gather.apply
    both = [key.flatten(1), value.flatten(1)]
    gathered = apply(torch.cat(both, 1), part, True).split([x.shape[1] for x in both], 1)
    key, value = (x.unflatten(1, own.shape[1:]) for x, own in zip(gathered, (key, value), strict=True))
    seen = part.prefixes[1].to("meta")
    return _attend(query, key[seen], value[seen])


_real_attend = context.attend


def _equal_shares(self: Any, routing_map: torch.Tensor) -> torch.Tensor:
    """MoEAlltoAllTokenDispatcher.preprocess with equal numbers of tokens for all experts."""
    copies = routing_map.shape[0] * self.config.moe_router_topk
    each = copies // self.num_experts
    self.num_out_tokens = copies
    self.input_splits = self.output_splits = [copies // self.ep_size] * self.ep_size
    ranks = self.tp_size * self.ep_size
    # from numpy: real numbers, since the dispatcher reads them
    self.output_splits_tp = torch.from_numpy(np.full(self.tp_size, copies))
    self.num_global_tokens_per_local_expert = torch.from_numpy(np.full((ranks, self.num_local_experts), each))
    return torch.from_numpy(np.full(self.num_local_experts, each * ranks))


def _backward(tensors: Any, gradients: Any = None, **_: Any) -> None:
    """torch.autograd.backward, which disables torch's function modes inside of it."""
    roots = (tensors,) if isinstance(tensors, torch.Tensor) else tuple(tensors)
    given = [None] * len(roots) if gradients is None else [gradients] if isinstance(gradients, torch.Tensor) else list(gradients)
    pairs = [(root, given_) for root, given_ in zip(roots, given, strict=True) if root.requires_grad]
    ones = tuple(torch.ones_like(root) if own is None else own for root, own in pairs)
    run: Any = torch.autograd.graph._engine_run_backward
    run(tuple(root for root, _ in pairs), ones, False, False, (), allow_unreachable=True, accumulate_grad=True)


def _sorted_chunks(
    tokens: torch.Tensor, _sizes: Any, _order: Any, probs: torch.Tensor | None = None, **_: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """moe_utils.py:sort_chunks_by_idxs: split, and concatenated in another order."""
    return torch.cat([tokens]), None if probs is None else torch.cat([probs])


def kernels_of(dtype: torch.dtype) -> list[Kernel]:
    """Attention and norms on GPUs."""
    norm = (core.RMSNorm, "forward", lambda self, x: _Norm.apply(x, self.weight))  # type: ignore[no-untyped-call]
    if dtype is torch.float32:
        return [(core.CoreAttention, "_packed", attend_grouped), (F, "scaled_dot_product_attention", _dot_products), norm]
    return [(core.CoreAttention, "_packed", _attend_packed), norm]


@contextmanager
def installed(tracker: Tracker, kernels: Sequence[Kernel], *, use_fused: bool) -> Iterator[None]:
    """Within the block the engine's code runs on meta tensors, with these kernels.

    Nothing compiled is called: torch's compiler never compiles a function that it first meets under a dispatch mode
    (torch/_dynamo/convert_frame.py:_handle_skip).
    """
    with ExitStack() as stack:
        if use_fused:
            stack.enter_context(patch.object(torch._dynamo, "maybe_mark_dynamic", lambda *_: None))
        for module, names in COMPILED:
            for name in names if use_fused else ():
                stack.enter_context(patch.object(module, name, tracker.opaque(getattr(module, name))))
        for owner, name, stand_in in (
            *kernels,
            (delta_net, "attend", _attend_delta),
            (fused, "_mark_dynamic", lambda *_: None),
            (context, "attend", _attend_over_context),
            (flash, "attend_prefixes", _attend),
            (flash, "_alone", _attend),
            *((module, "grouped_linear", _grouped) for module in (experts, lora_linears)),
            (gpt_oss, "stacked_linear", _stacked),
            (TokenDispatcher, "preprocess", _equal_shares),
            (TokenDispatcher, "_maybe_dtoh_and_synchronize", lambda _self, _point, counts=None: counts),
            (DISPATCHERS, "sort_chunks_by_idxs", _sorted_chunks),
            (torch.autograd, "backward", _backward),
        ):
            stack.enter_context(patch.object(owner, name, stand_in))
        stack.enter_context(tracker.counting_resizes())
        yield
