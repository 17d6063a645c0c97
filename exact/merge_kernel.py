"""Adapters merged into weights by a Triton kernel: each is read once, written once, and the rounding's error summed on the way.

Many weights in one launch, by tables on the device, or one; a weight's bits are the same either way. Leaves out which tensors
belong together (bridge/export/). Imported on CUDA alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

ROWS, COLUMNS, RANKS = 64, 128, 32  # of a tile, and of the adapter's rank at a time
FEW_RANKS = 16  # at a time where no adapter has more
ALIGNMENT = 16  # bytes of an address, and elements of a row, with which the kernel reads several at a time
FIELDS = 14  # of a weight in Tables.weights


@triton.jit  # type: ignore[untyped-decorator]
def _merge(  # type: ignore[no-untyped-def] # noqa: PLR0913, PLR0917
    out, weight, a, b, scale, sums, row, column, num_rows, num_columns, rank, a_row, a_column, b_row, b_column,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, RANKS: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """One tile of a weight. `sums`: where its two sums go; strides of both factors are in elements."""
    rows = row.to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    columns = column * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    update = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for start in range(0, rank, RANKS):
        of_b, of_a = start + tl.arange(0, RANKS)[None, :], start + tl.arange(0, RANKS)[:, None]
        left = tl.load(b + rows * b_row + of_b * b_column, mask=(rows < num_rows) & (of_b < rank), other=0.0)
        right = tl.load(a + of_a * a_row + columns * a_column, mask=(of_a < rank) & (columns < num_columns), other=0.0)
        update = tl.dot(left.to(tl.float32), right.to(tl.float32), update, input_precision="ieee")
    inside = (rows < num_rows) & (columns < num_columns)
    place = rows * num_columns + columns
    before = tl.load(weight + place, mask=inside, other=0.0).to(tl.float32)
    exact = tl.fma(update, tl.zeros_like(update) + scale, before)  # the compiler fuses `*` and `+` in some layouts only
    update *= scale
    rounded = exact.to(out.dtype.element_ty)
    tl.store(out + place, rounded, mask=inside)
    lost = rounded.to(tl.float32) - exact
    tl.store(sums, tl.sum(lost * lost))
    tl.store(sums + 1, tl.sum(update * update))


@triton.jit  # type: ignore[untyped-decorator]
def _merge_one(  # type: ignore[no-untyped-def] # noqa: PLR0913, PLR0917
    out, weight, a, b, scale, sums, num_rows, num_columns, rank, a_row, a_column, b_row, b_column,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, RANKS: tl.constexpr,  # noqa: N803
):  # fmt: skip
    row, column = tl.program_id(0), tl.program_id(1)
    tile = row * tl.num_programs(1) + column
    _merge(
        out, weight, a, b, scale, sums + 2 * tile, row, column, num_rows, num_columns, rank, a_row, a_column, b_row, b_column,
        ROWS, COLUMNS, RANKS,
    )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def _merge_many(  # type: ignore[no-untyped-def] # noqa: PLR0913, PLR0917
    out, bases, weights, scales, tiles, sums,
    IS_ALIGNED: tl.constexpr, IS_DENSE: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, RANKS: tl.constexpr, FIELDS: tl.constexpr,  # noqa: N803
):  # fmt: skip
    tile = tl.program_id(0)
    index, number = tl.load(tiles + 2 * tile), tl.load(tiles + 2 * tile + 1)
    of = weights + FIELDS * index
    start, num_rows, rank = tl.load(of), tl.load(of + 1).to(tl.int32), tl.load(of + 3).to(tl.int32)
    num_columns = tl.load(of + 2).to(tl.int32)
    weight = tl.load(bases + tl.load(of + 4)).to(tl.pointer_type(out.dtype.element_ty)) + tl.load(of + 5)
    a = tl.load(bases + tl.load(of + 6)).to(tl.pointer_type(out.dtype.element_ty)) + tl.load(of + 7)
    b = tl.load(bases + tl.load(of + 8)).to(tl.pointer_type(out.dtype.element_ty)) + tl.load(of + 9)
    a_row, a_column = tl.load(of + 10).to(tl.int32), tl.load(of + 11).to(tl.int32)
    b_row, b_column = tl.load(of + 12).to(tl.int32), tl.load(of + 13).to(tl.int32)
    if IS_ALIGNED:
        start, num_columns, weight = tl.multiple_of(start, 16), tl.multiple_of(num_columns, 16), tl.multiple_of(weight, 16)
        a, a_row = tl.multiple_of(a, 16), tl.multiple_of(a_row, 16)
    if IS_DENSE:
        a_column, b_column = 1, 1
    across = tl.cdiv(num_columns, COLUMNS)
    _merge(
        out + start, weight, a, b, tl.load(scales + index), sums + 2 * tile, number // across, number % across,
        num_rows, num_columns, rank, a_row, a_column, b_row, b_column, ROWS, COLUMNS, RANKS,
    )  # fmt: skip


class Tables(NamedTuple):
    """Arguments of the kernel: weights and their adapters."""

    storages: list[torch.UntypedStorage]  # of weights and factors
    weights: np.ndarray  # int64 [weights, FIELDS]: see lay_tables
    scales: np.ndarray  # float32 [weights]
    tiles: np.ndarray  # int32 [tiles, 2]: index of the weight, number of the tile among its own
    is_aligned: bool  # rows of results, weights and A begin at multiples of ALIGNMENT elements, if the storages do of its bytes
    is_dense: bool  # the elements of each row of a factor lie together
    rank: int  # the largest


def lay_tables(pairs: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor, float, int]]) -> Tables:
    """`pairs`: arguments of merge_on_cuda without `out`, and where the result starts in `merge_many`'s.

    The fields, in elements: start of the result; rows, columns, rank; for weight, a and b the index of the storage and the offset
    in it; strides of a, of b.
    """
    storages: dict[int, tuple[int, torch.UntypedStorage]] = {}

    def place(tensor: torch.Tensor) -> tuple[int, int]:
        storage = tensor.untyped_storage()
        return storages.setdefault(storage._cdata, (len(storages), storage))[0], int(tensor.storage_offset())

    fields = [
        (start, *weight.shape, len(a), *place(weight), *place(a), *place(b), *a.stride(), *b.stride())
        for weight, a, b, _, start in pairs
    ]
    weights = np.array(fields, dtype=np.int64).reshape(-1, FIELDS)
    counts = -(-weights[:, 1] // ROWS) * -(-weights[:, 2] // COLUMNS)
    which = np.repeat(np.arange(len(pairs)), counts)
    number = np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts)
    tiles = np.stack([which, number], axis=1).astype(np.int32)
    scales = np.array([scale for _, _, _, scale, _ in pairs], dtype=np.float32)
    is_aligned, is_dense = not (weights[:, [0, 2, 5, 7, 10]] % ALIGNMENT).any(), bool((weights[:, [11, 13]] == 1).all())
    rank = int(weights[:, 3].max(initial=0))
    return Tables([storage for _, storage in storages.values()], weights, scales, tiles, is_aligned, is_dense, rank)


def merge_many(out: torch.Tensor, tables: Tables, on_device: Sequence[torch.Tensor], addresses: torch.Tensor) -> torch.Tensor:
    """merge_on_cuda of all weights of `tables` in one launch; sums of all tiles, weight by weight.

    Args:
        out: flat; of the dtype of all weights and factors, other memory.
        on_device: the arrays of `tables`.
        addresses: int64 [storages], on the device, multiples of ALIGNMENT where `tables` are aligned.
    """
    sums = torch.empty(len(tables.tiles), 2, dtype=torch.float32, device=out.device)
    if len(sums):
        ranks = FEW_RANKS if tables.rank <= FEW_RANKS else RANKS  # the terms beyond are zeros: the same bits
        _merge_many[(len(sums),)](
            out, addresses, *on_device, sums, tables.is_aligned, tables.is_dense, ROWS, COLUMNS, ranks, FIELDS
        )
    return sums


def merge_on_cuda(out: torch.Tensor, weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """linear.merge_into, and the squared errors of bridge/export/merge.py over all rows as float32 [tiles, 2].

    Args:
        out: like `weight`, other memory; both are contiguous.
        weight: [rows, columns]; not changed.
        a: [rank, columns].
        b: [rows, rank].
    """
    num_rows, num_columns = weight.shape
    grid = (triton.cdiv(num_rows, ROWS), triton.cdiv(num_columns, COLUMNS))
    sums = torch.empty(grid[0] * grid[1], 2, dtype=torch.float32, device=weight.device)
    sizes = num_rows, num_columns, len(a), *a.stride(), *b.stride()
    _merge_one[grid](out, weight, a, b, scale, sums, *sizes, ROWS, COLUMNS, RANKS)
    return sums
