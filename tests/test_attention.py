"""Attention over packed sequences on a GPU against scaled_dot_product_attention in float32, one sequence at a time."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    pieces = []
    for parts in zip(*(torch.split(x, lengths) for x in (q, k, v)), strict=True):
        one, two, three = (x.transpose(0, 1)[None] for x in parts)
        out = F.scaled_dot_product_attention(one, two, three, is_causal=True, enable_gqa=True)
        pieces.append(out[0].transpose(0, 1))
    return torch.cat(pieces)


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [[5, 700, 1, 1300], [8192], [40, 9001, 3, 8192, 8200, 2]])
def test_packed_attention_equals_each_sequence_alone(lengths: list[int]) -> None:
    """Short sequences, a long one and both; values and gradients with 4 heads on 2 of K and V."""
    from engine import flash  # imports megatron-core, which workers that only collect this file do without
    from engine.attention import PackedSequences

    generator = torch.Generator("cuda").manual_seed(0)
    shapes = [(sum(lengths), heads, 64) for heads in (4, 2, 2, 4)]
    q, k, v, seed = (torch.randn(shape, generator=generator, device="cuda").bfloat16() for shape in shapes)
    mine = [x.clone().requires_grad_() for x in (q, k, v)]
    theirs = [x.float().requires_grad_() for x in (q, k, v)]
    out = flash.attend(*mine, PackedSequences.from_lengths(lengths, torch.device("cuda")), None)
    expected = reference(*theirs, lengths)
    out.backward(seed)
    expected.backward(seed.float())
    pairs = [(out, expected), *((a.grad, b.grad) for a, b in zip(mine, theirs, strict=True))]
    for a, b in pairs:
        assert float((a.float() - b).abs().max() / b.abs().max()) < 2e-2
