"""Causal attention over packed sequences on a GPU, in 16 bits: cuDNN's kernel for long sequences, else torch's varlen_attn.

On an H200, with 16 heads of 128 on 2 KV heads and 32 768 tokens, cuDNN 9.19 reaches 627 TFLOP/s forward and 463 backward,
FlashAttention 2 under varlen_attn 347 and 252. cuDNN takes one length a call and plans each shape anew, so that sequences are
padded at their end, where the causal mask keeps what is added out. Neither wants K and V repeated for grouped queries.
Windows go through varlen_attn, which skips what lies outside of them: scaled_dot_product_attention has none for cuDNN. So do
heads above 128, which cuDNN takes in some versions and on some devices only.
"""

from __future__ import annotations

import inspect
from functools import cache
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from engine.attention import PackedSequences

LONG = 8192  # tokens from which a sequence has a call of its own
WIDEST = 128  # elements of a head that cuDNN takes everywhere
MULTIPLE = 1024  # of tokens, to which those are padded: a few shapes only, each planned once


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packed: PackedSequences, scale: float | None, window: int = 0
) -> torch.Tensor:
    """query [T, heads, dim], key [T, groups, dim] and value [T, groups, dim or fewer] to [T, heads, value's dim].

    `window`: see engine/windows.py:of_layer.
    """
    if missing := query.shape[-1] - value.shape[-1]:  # the kernels take one dim
        whole = attend(query, key, F.pad(value, (0, missing)), packed, scale, window)
        return whole[..., : value.shape[-1]]
    lengths, value = packed.lengths, value.contiguous()  # a view would keep the whole of what q, k and v are split from
    if max(lengths) < LONG or query.shape[-1] > WIDEST or 0 < window < max(lengths):
        return _varlen(query, key, value, packed.cu_seqlens_q, max(lengths), scale, window)
    pieces, start = [], 0
    for is_long, run in groupby(lengths, lambda length: length >= LONG):
        members = list(run)
        for part in [[length] for length in members] if is_long else [members]:
            q, k, v = (x[start : start + sum(part)] for x in (query, key, value))
            if is_long:
                pieces.append(_alone(q, k, v, scale))
            else:
                pieces.append(_varlen(q, k, v, offsets(part, q.device), max(part), scale))
            start += sum(part)
    return torch.cat(pieces) if len(pieces) > 1 else pieces[0]


def offsets(lengths: list[int], device: torch.device) -> torch.Tensor:
    """Where each sequence starts and the last ends, int32 [sequences + 1]."""
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device, non_blocking=True)


def _alone(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None) -> torch.Tensor:
    """One sequence."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    num_tokens, padding = len(query), -len(query) % MULTIPLE
    q, k, v = (F.pad(x, (0, 0, 0, 0, 0, padding)) if padding else x for x in (query, key, value))
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
    return out[0].transpose(0, 1)[:num_tokens]


@cache
def _grouped_queries() -> dict[str, Any]:
    """How varlen_attn is told that there are fewer heads of K and V: torch 2.11 takes them as they are."""
    from torch.nn.attention.varlen import varlen_attn

    return {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


def _varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    ends: torch.Tensor,
    longest: int,
    scale: float | None,
    window: int = 0,
) -> torch.Tensor:
    return attend_prefixes(query, key, value, (ends, ends), (longest, longest), scale, window)


def attend_prefixes(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    ends: tuple[torch.Tensor, torch.Tensor],
    longest: tuple[int, int],
    scale: float | None,
    window: int = 0,
) -> torch.Tensor:
    """varlen_attn where the queries of a sequence are its last tokens, and the keys all up to them.

    `ends`, `longest`: `offsets` of the queries and of the keys, and the most tokens of a sequence of either.
    """
    from torch.nn.attention.varlen import varlen_attn

    if missing := query.shape[-1] - value.shape[-1]:
        whole = attend_prefixes(query, key, F.pad(value, (0, missing)), ends, longest, scale, window)
        return whole[..., : value.shape[-1]]
    before = window - 1 if 0 < window < longest[1] else -1  # tokens before the query's own; -1: all
    options = {"scale": scale, "window_size": (before, 0), **_grouped_queries()}
    out = varlen_attn(query, key, value, *ends, *longest, **options)
    assert isinstance(out, torch.Tensor)
    return out
