"""Adapters merged into their weights, out of place and per shard: W + scale B A in fp32, rounded once.

On CUDA a kernel does it (exact/merge_kernel.py). Column-parallel shards take B's shard and the whole A, row-parallel ones the
whole B and A's shard; so no adapter is gathered. The base weight is never written to. Leaves out which tensors belong together
(gather.py).
"""

from __future__ import annotations

import torch

from exact.linear import merge_into

__all__ = ["merge", "merge_into", "squared_error"]
SAMPLED_ROWS = 64  # of each weight, for the merge error


def merge(out: torch.Tensor, weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """merge_into, then squared_error's sums, as [parts, 2]. On CUDA one kernel does both, with the sums over all rows."""
    if weight.is_cuda:
        from exact.merge_kernel import merge_on_cuda

        return merge_on_cuda(out, weight, a, b, scale)
    return squared_error(merge_into(out, weight, a, b, scale), weight, a, b, scale)[None]


def squared_error(merged: torch.Tensor, weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """[|round(W + D) - (W + D)|^2, |D|^2] with D = scale B A, over evenly spaced rows; float64 [2].

    Sums of it over tensors and shards give the model's merge error: sqrt of their quotient.
    """
    rows = slice(None, None, -(-weight.shape[0] // SAMPLED_ROWS))
    update = scale * (b[rows].float() @ a.float())
    lost = merged[rows].float() - (weight[rows].float() + update)
    return torch.stack([lost.square().sum(dtype=torch.float64), update.square().sum(dtype=torch.float64)])
