"""Fused tensors whose parts are split by tensor parallelism one by one: a rank's pieces of the whole."""

from __future__ import annotations

import itertools

import pytest
import torch

from engine.attention.delta_net import split_ranks
from engine.checkpoint.shards import Dim, _pieces


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("cuts", [(0, 48), (0, 7, 31, 48)])
def test_pieces_are_the_rows_that_the_model_takes(size: int, cuts: tuple[int, ...]) -> None:
    """Of any range of elements; together they are all."""
    parts, columns = [4, 4, 2, 6], 3
    whole = torch.arange(sum(parts) * columns).view(-1, columns)
    cuts = tuple(cut // size for cut in cuts)
    for rank, shard in enumerate(split_ranks(whole, parts, size)):
        dims = [Dim(len(shard), len(whole), rank * len(shard)), Dim(columns, columns, 0)]
        for start, end in itertools.pairwise(cuts):
            found = torch.full((end - start,), -1)
            for box, position in _pieces(dims, parts, start, end):
                (row, column), (rows, width) = box
                values = whole[row : row + rows, column : column + width].reshape(-1)
                found[position : position + len(values)] = values
            assert torch.equal(found, shard.reshape(-1)[start:end])
