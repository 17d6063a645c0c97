"""What is recorded of a conversion copies the same as the conversion, for any sizes and shards.

python -m pytest tests/bridge/export/test_trace.py
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge.layout.copies import view
from bridge.export.trace import trace

Convert = Callable[[list[torch.Tensor]], list[torch.Tensor]]


def copied(convert: Convert, shards: list[torch.Tensor], gap: int) -> list[torch.Tensor]:
    """The conversion's results by the copies that are recorded of it, from shards that lie `gap` elements apart."""
    places, memory = [], torch.full((sum(shard.numel() + gap for shard in shards),), -1.0)
    for shard in shards:
        start = gap + (places[-1][1] + shard.numel() if places else 0)
        memory[start : start + shard.numel()] = shard.flatten()
        places.append(("memory", start))
    traced = trace(convert, shards[0].shape, shards[0].dtype, places)
    assert traced is not None
    results = [torch.full_like(tensor, torch.nan, memory_format=torch.contiguous_format) for tensor in convert(shards)]
    for result, copies in zip(results, traced, strict=True):
        for copy in copies:
            view(result.view(-1), copy.tensor_region).copy_(view(memory, copy.buffer_region))
    return results


def check(convert: Convert, shape: tuple[int, ...], num_shards: int, gap: int) -> None:
    size = torch.Size(shape).numel()
    shards = [torch.arange(size, dtype=torch.float32).view(shape) + 1000 * rank for rank in range(num_shards)]
    for result, expected in zip(copied(convert, shards, gap), convert(shards), strict=True):
        assert torch.equal(result, expected)


SMALL = st.integers(1, 4)


@given(SMALL, SMALL, SMALL, SMALL, st.sampled_from([1, 2, 4]), st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_fused_heads_come_apart(groups: int, queries: int, head: int, hidden: int, ranks: int, gap: int) -> None:
    def convert(shards: list[torch.Tensor]) -> list[torch.Tensor]:
        whole = torch.cat(shards, dim=0) if ranks > 1 else shards[0]
        heads = whole.view(groups * ranks, -1, hidden)
        cuts = (queries * head, (queries + 1) * head)
        parts = heads[:, : cuts[0]], heads[:, cuts[0] : cuts[1]], heads[:, cuts[1] :]
        return [part.reshape(-1, hidden) for part in parts]

    check(convert, (groups * (queries + 2) * head, hidden), ranks, gap)


@given(SMALL, SMALL, st.sampled_from([1, 2, 4]), st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_gate_and_up_come_apart(rows: int, columns: int, ranks: int, gap: int) -> None:
    def convert(shards: list[torch.Tensor]) -> list[torch.Tensor]:
        halves = [shard.chunk(2) for shard in shards]
        gate, up = (torch.cat([half[index] for half in halves], dim=0) for index in range(2))
        return list(torch.cat((gate, up), dim=0).chunk(2))

    check(convert, (2 * rows, columns), ranks, gap)


@given(SMALL, SMALL, st.sampled_from([1, 2, 4]), st.integers(0, 3), st.integers(0, 1))
@settings(max_examples=60, deadline=None)
def test_shards_of_either_dimension_come_together(rows: int, columns: int, ranks: int, gap: int, dim: int) -> None:
    check(lambda shards: [torch.cat(shards, dim=dim)[: rows + 1]], (rows, columns), ranks, gap)


@pytest.mark.parametrize("compute", [lambda t: t + 1, lambda t: t.to(torch.bfloat16), torch.empty_like])
def test_what_is_computed_is_not_taken_for_a_copy(compute: Callable[[torch.Tensor], torch.Tensor]) -> None:
    for convert in (lambda shards: [compute(shards[0])], lambda shards: [torch.cat([shards[0], compute(shards[0])])]):
        assert trace(convert, torch.Size((4, 2)), torch.float32, [("memory", 0)]) is None
