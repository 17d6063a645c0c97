"""Products of rows with a weight in tiles of a fixed shape, and low-rank adapters merged into a weight.

How a matrix product sums depends on its shape: one row alone gets other bits than in a batch. Here rows are always multiplied
sixteen at a time, zeros filling up the last tile. Many rows go faster in larger tiles, where those give the same bits, which is
tried for each shape of a weight once. On GPUs products are cuBLASLt's (cuda.py).

    linear(x, weight)        # [T, in], [out, in] -> [T, out]
"""

from __future__ import annotations

from functools import cache

import torch

from exact import cuda

TILE = 16
LARGE_TILE = 256
BLOCK_ELEMENTS = 2**18  # of fp32 in flight, whatever the weight's size; they stay in a core's cache


@torch.no_grad()
def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [..., in] times weight [out, in], without a bias."""
    if x.is_cuda:
        return cuda.linear(x, weight)
    rows = x.reshape(-1, x.shape[-1])
    num_rows = len(rows)
    missing = -num_rows % TILE
    if missing:
        rows = torch.cat([rows, rows.new_zeros(missing, rows.shape[1])])
    out = rows.new_empty(len(rows), len(weight))
    start = 0
    if len(rows) >= LARGE_TILE and large_tiles_agree(weight.shape[1], weight.shape[0], torch.get_num_threads()):
        start = _multiply(rows, weight, out, 0, LARGE_TILE)
    _multiply(rows, weight, out, start, TILE)
    return out[:num_rows].view(*x.shape[:-1], len(weight))


def _multiply(rows: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, start: int, tile: int) -> int:
    """Whole tiles from `start` on; where they end."""
    while start + tile <= len(rows):
        torch.mm(rows[start : start + tile], weight.t(), out=out[start : start + tile])
        start += tile
    return start


@cache
def large_tiles_agree(num_inputs: int, num_outputs: int, num_threads: int) -> bool:  # noqa: ARG001 # of the machine, for the cache
    """Whether a large tile's rows have the bits that they have in small ones, for weights of this shape."""
    generator = torch.Generator().manual_seed(num_inputs)
    rows, weight = (torch.randn(count, num_inputs, generator=generator) for count in (LARGE_TILE, num_outputs))
    small, large = rows.new_empty(LARGE_TILE, num_outputs), rows.new_empty(LARGE_TILE, num_outputs)
    _multiply(rows, weight, small, 0, TILE)
    _multiply(rows, weight, large, 0, LARGE_TILE)
    return torch.equal(small, large)


def merge_into(out: torch.Tensor, weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """Write round(W + scale B A) into `out` and return it.

    Args:
        out: like `weight`, other memory.
        weight: [rows, columns]; not changed.
        a: [rank, columns].
        b: [rows, rank].
    """
    if weight.is_cuda:
        from exact.merge_kernel import merge_on_cuda

        merge_on_cuda(out, weight, a, b, scale)
        return out
    a, b = a.float(), b.float()
    step = max(1, BLOCK_ELEMENTS // weight.shape[1])
    for start in range(0, weight.shape[0], step):
        rows = slice(start, start + step)
        out[rows] = torch.addmm(weight[rows].float(), b[rows], a, alpha=scale)
    return out
