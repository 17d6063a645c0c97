"""The gated delta rule against transformers, packed sequences against each alone, and how rows are split over ranks.

    python -m pytest tests/engine/attention/test_delta_net.py
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.qwen3_5 import modeling_qwen3_5 as theirs

from engine.attention import delta_net
from engine.attention.delta_net import MIXED, merge_ranks, rule, split_ranks, split_sizes
from engine.batch.packed import PackedSequences

CONFIG = SimpleNamespace(
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=24, linear_conv_kernel_dim=4
)
KEYS, VALUES, HEADS = 32, 96, 4


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


@pytest.mark.parametrize("length", [1, 3, 64, 65, 150])
def test_the_rule_is_that_of_transformers(length: int) -> None:
    """Values and gradients; in chunks, and token by token."""
    shapes = [(2, length, 3, 16), (2, length, 3, 16), (2, length, 3, 24), (2, length, 3), (2, length, 3)]
    inputs = [drawn(*shape, seed=number) for number, shape in enumerate(shapes)]
    inputs[3], inputs[4] = -3 * inputs[3].abs(), inputs[4].sigmoid()
    inputs = [each.requires_grad_() for each in inputs]
    weights = drawn(2, length, 3, 24, seed=9)
    mine = rule(*inputs)
    chunked, _ = theirs.torch_chunk_gated_delta_rule(*inputs, use_qk_l2norm_in_kernel=True)
    by_token, _ = theirs.torch_recurrent_gated_delta_rule(*inputs, use_qk_l2norm_in_kernel=True)
    assert float((mine - chunked).detach().abs().max()) < 1e-6 and float((mine - by_token).detach().abs().max()) < 1e-5
    gradients = [torch.autograd.grad((each * weights).sum(), inputs) for each in (mine, chunked)]
    for own, other in zip(*gradients, strict=True):
        assert float((own - other).abs().max()) < 1e-5


def test_the_rule_keeps_the_dtype_of_values() -> None:
    mixed = [drawn(1, 5, 2, 16).bfloat16() for _ in range(3)]
    assert rule(*mixed, -drawn(1, 5, 2).abs(), drawn(1, 5, 2).sigmoid()).dtype is torch.bfloat16


CONVOLUTION = drawn(2 * KEYS + VALUES, 1, 4, seed=5)


def attend(
    lengths: list[int], mixed: torch.Tensor, decay: torch.Tensor, strength: torch.Tensor,
    conv1d: torch.Tensor = CONVOLUTION, num_ranks: int = 1,
) -> torch.Tensor:  # fmt: skip
    """Of one of `num_ranks` tensor-parallel ranks, with its rows."""
    sizes = [size // num_ranks for size in split_sizes(CONFIG)[:MIXED]]
    packed = PackedSequences.from_lengths(lengths, torch.device("cpu"))
    return delta_net.attend(packed, mixed, decay, strength, conv1d, sizes, CONFIG.linear_key_head_dim)


def test_ranks_compute_their_heads() -> None:
    """Side by side they are those of one rank: a head of values reads the same head of keys on both."""
    lengths, total = [70, 5], 75
    mixed, decay, strength = drawn(total, 2 * KEYS + VALUES), -drawn(total, HEADS, seed=1).abs(), drawn(total, HEADS).sigmoid()
    of_mixed = split_sizes(CONFIG)[:MIXED]
    rows = [part.T for part in split_ranks(mixed.T, of_mixed, 2)]
    shards = zip(rows, decay.chunk(2, 1), strength.chunk(2, 1), split_ranks(CONVOLUTION, of_mixed, 2), strict=True)
    found = torch.cat([attend(lengths, *shard, num_ranks=2) for shard in shards], 1)
    assert float((found - attend(lengths, mixed, decay, strength)).abs().max()) < 1e-6


@settings(deadline=None, max_examples=20)
@given(st.lists(st.integers(1, 90), min_size=1, max_size=5), st.integers(0, 99))
def test_packed_sequences_are_computed_as_each_alone(lengths: list[int], seed: int) -> None:
    """Neither convolution nor state reach from one to the next; a gradient stays within its sequence."""
    total = sum(lengths)
    mixed = drawn(total, 2 * KEYS + VALUES, seed=seed).requires_grad_()
    decay, strength = -drawn(total, HEADS, seed=seed + 1).abs(), drawn(total, HEADS, seed=seed + 2).sigmoid()
    packed = attend(lengths, mixed, decay, strength)
    parts = zip(*(each.split(lengths) for each in (mixed, decay, strength)), strict=True)
    alone = torch.cat([attend([len(part[0])], *part) for part in parts])
    assert float((packed - alone).detach().abs().max()) < 1e-5
    (gradient,) = torch.autograd.grad(packed[: lengths[0]].square().sum(), mixed)
    assert not gradient[lengths[0] :].any()


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.integers(1, 4))
def test_ranks_have_their_rows_of_each_part(counts: list[int], num_ranks: int) -> None:
    sizes = [count * num_ranks for count in counts]
    whole = torch.arange(sum(sizes))[:, None]
    shards = split_ranks(whole, sizes, num_ranks)
    assert torch.equal(merge_ranks(shards, sizes), whole)
    for rank, shard in enumerate(shards):
        parts = shard.split(counts)
        for part, begin, count in zip(parts, [sum(sizes[:index]) for index in range(len(sizes))], counts, strict=True):
            assert part.flatten().tolist() == list(range(begin + rank * count, begin + (rank + 1) * count))
