"""Attention by torch over sequences of one length: on CPUs, and of float32 on GPUs, which flash attention does not take.

Leaves out how packed sequences come to one length (core.py) and what a context rank attends to (context.py).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """All of [batch, heads, tokens, dim], keys and values may have fewer heads. `mask`: bool [tokens, keys]; without, causal.

    On GPUs keys and values get as many heads as queries have: torch's memory-efficient kernel takes no fewer
    (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp), and what stands in for it holds the scores of all heads,
    [tokens, keys] each, until the backward pass.
    """
    if query.is_cuda and key.shape[1] != query.shape[1]:
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    has_fewer = key.shape[1] != query.shape[1]
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=has_fewer
    )
