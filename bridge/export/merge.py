"""Adapters merged into their weights, out of place and per shard: W + scale B A in fp32, rounded once.

On CUDA a kernel does it (exact/merge_kernel.py), for many weights in one launch. Column-parallel shards take B's shard and the
whole A, row-parallel ones the whole B and A's shard; so no adapter is gathered. The base weight is never written to. Leaves out
which tensors belong together (gather.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from bridge.layout.upload import Addresses, upload
from exact.linear import merge_into

__all__ = ["GroupedMerge", "Pair", "merge_into", "squared_error"]
SAMPLED_ROWS = 64  # of each weight, for the merge error


class Pair(NamedTuple):
    """A weight [rows, columns], contiguous, and its adapter, of the same dtype and of any strides."""

    weight: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    scale: float
    start: int  # of the merged weight among the results, in elements


class GroupedMerge:
    """The merge of some weights into `out`, prepared once and run in every pass; their storages may move in between.

    On CUDA one launch, with the bits of one launch a weight.
    """

    def __init__(self, out: torch.Tensor, pairs: Sequence[Pair]) -> None:
        """`out`: flat, of the pairs' dtype, other memory than theirs."""
        self._out, self._pairs = out, pairs
        if out.is_cuda:
            from exact.merge_kernel import lay_tables

            self._tables, self._addresses = lay_tables(pairs), Addresses()
            arrays = self._tables.weights, self._tables.scales, self._tables.tiles
            self._on_device = [upload(torch.from_numpy(array), out.device) for array in arrays]

    def run(self) -> torch.Tensor:
        """squared_error's sums, as [parts, 2]; on CUDA over all rows."""
        if self._out.is_cuda:
            from exact.merge_kernel import ALIGNMENT, merge_many

            addresses = [storage.data_ptr() for storage in self._tables.storages]
            if any(each % ALIGNMENT for each in addresses):
                self._tables = self._tables._replace(is_aligned=False)
            return merge_many(self._out, self._tables, self._on_device, self._addresses.on(self._out.device, addresses))
        errors = []
        for weight, a, b, scale, start in self._pairs:
            merged = merge_into(self._out[start : start + weight.numel()].view(weight.shape), weight, a, b, scale)
            errors.append(squared_error(merged, weight, a, b, scale))
        return torch.stack(errors)


def squared_error(merged: torch.Tensor, weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """[|round(W + D) - (W + D)|^2, |D|^2] with D = scale B A, over evenly spaced rows; float64 [2].

    Sums of it over tensors and shards give the model's merge error: sqrt of their quotient.
    """
    rows = slice(None, None, -(-weight.shape[0] // SAMPLED_ROWS))
    update = scale * (b[rows].float() @ a.float())
    lost = merged[rows].float() - (weight[rows].float() + update)
    return torch.stack([lost.square().sum(dtype=torch.float64), update.square().sum(dtype=torch.float64)])
