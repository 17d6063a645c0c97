"""Attention by torch over sequences of one length: on CPUs, and of float32 on GPUs, which flash attention does not take.

Leaves out how packed sequences come to one length (core.py) and what a context rank attends to (context.py).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from engine.runtime.megatron import SoftmaxOne


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float | None,
    mask: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """All of [batch, heads, tokens, dim], keys and values may have fewer heads. `mask`: bool [tokens, keys]; without, causal.

    `sinks` [heads]: the logit of an additional key whose value is zero. With them all scores are held in memory.

    On GPUs keys and values get as many heads as queries have: torch's memory-efficient kernel takes no fewer
    (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp), and what stands in for it holds the scores of all heads,
    [tokens, keys] each, until the backward pass.
    """
    if query.is_cuda and key.shape[1] != query.shape[1]:
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    if sinks is not None:
        return _attend_with_sinks(query, key, value, scale, mask, sinks)
    has_fewer = key.shape[1] != query.shape[1]
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=has_fewer
    )


def _attend_with_sinks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float | None,
    mask: torch.Tensor | None,
    sinks: torch.Tensor,
) -> torch.Tensor:
    """By megatron-core's softmax, in float32."""
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    if mask is None:
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()
    scores = (query @ key.transpose(2, 3)).float() * (scale or query.shape[-1] ** -0.5)
    weights: torch.Tensor = SoftmaxOne(-1, sinks.float())(scores.masked_fill(~mask, -torch.inf))
    return weights.to(value.dtype) @ value
