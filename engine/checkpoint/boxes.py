"""Ranges of a shard's elements as boxes of the whole tensor (pure functions).

A tensor-parallel shard is a box of the whole tensor; of it a data-parallel rank has a range of elements, which is a few boxes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple


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
    """The elements start .. end of a shard within the whole tensor, without what is padding there (of a first dimension)."""
    position = 0
    for offsets, sizes in boxes(tuple(dim.local for dim in dims), start, end):
        begins = tuple(offset + dim.offset for offset, dim in zip(offsets, dims, strict=True))
        kept = (max(0, min(sizes[0], dims[0].whole - begins[0])), *sizes[1:])
        if math.prod(kept):
            yield Piece(Box(begins, kept), position)
        position += math.prod(sizes)
