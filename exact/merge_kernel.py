"""Adapters merged into a weight by one Triton kernel: it is read once, written once, and the rounding's error summed on the way.

Leaves out which tensors belong together (bridge/export/gather.py). Imported on CUDA alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

ROWS, COLUMNS, RANKS = 64, 128, 32  # of a tile, and of the adapter's rank at a time


@triton.jit  # type: ignore[untyped-decorator]
def _merge_tile(  # type: ignore[no-untyped-def] # noqa: PLR0913, PLR0917
    out, weight, a, b, scale, sums, num_rows, num_columns, rank,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, RANKS: tl.constexpr,  # noqa: N803
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    update = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for start in range(0, rank, RANKS):
        of_b, of_a = start + tl.arange(0, RANKS)[None, :], start + tl.arange(0, RANKS)[:, None]
        left = tl.load(b + rows * rank + of_b, mask=(rows < num_rows) & (of_b < rank), other=0.0).to(tl.float32)
        right = tl.load(a + of_a * num_columns + columns, mask=(of_a < rank) & (columns < num_columns), other=0.0).to(tl.float32)
        update = tl.dot(left, right, update, input_precision="ieee")
    update *= scale
    inside = (rows < num_rows) & (columns < num_columns)
    place = rows * num_columns + columns
    exact = tl.load(weight + place, mask=inside, other=0.0).to(tl.float32) + update
    rounded = exact.to(out.dtype.element_ty)
    tl.store(out + place, rounded, mask=inside)
    lost = rounded.to(tl.float32) - exact
    tile = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    tl.store(sums + 2 * tile, tl.sum(lost * lost))
    tl.store(sums + 2 * tile + 1, tl.sum(update * update))


def merge_on_cuda(out: torch.Tensor, weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """linear.merge_into, and the squared errors of bridge/export/merge.py over all rows as float32 [tiles, 2].

    Args:
        out: like `weight`, other memory; contiguous, as all are.
        weight: [rows, columns]; not changed.
        a: [rank, columns].
        b: [rows, rank].
    """
    num_rows, num_columns = weight.shape
    grid = (triton.cdiv(num_rows, ROWS), triton.cdiv(num_columns, COLUMNS))
    sums = torch.empty(grid[0] * grid[1], 2, dtype=torch.float32, device=weight.device)
    _merge_tile[grid](
        out, weight, a.contiguous(), b.contiguous(), scale, sums, num_rows, num_columns, len(a), ROWS, COLUMNS, RANKS
    )
    return sums
