"""The Triton kernels against what they stand for; `python -m tests.kernel_cases DEVICE` runs them all.

On the CPU in Triton's interpreter, which has to be chosen (TRITON_INTERPRET=1) before Triton is imported: a process of its own.
"""

from __future__ import annotations

import sys

import torch

from bridge import digest
from bridge.digest_kernel import chunk_sums
from bridge.merge import merge_into
from bridge.merge_kernel import merge_on_cuda


def check_digests(device: torch.device) -> None:
    multipliers = digest._multipliers(device)
    for size in (0, 1, 7, 8, 9, 16, 2**18 - 8, 2**18, 2**18 + 3, 3 * 2**18 + 45):
        data = torch.randint(0, 256, (size + 8,), dtype=torch.uint8, device=device)[:size]
        sums = chunk_sums(data, multipliers, torch.zeros(9, dtype=torch.int64, device=device))
        assert len(sums) == digest._num_sums(size)
        joined = int((sums * digest._powers(device, len(sums))).sum()) + size * digest.LENGTH_FACTOR
        assert joined & digest.MASK == digest.digest_bytes(data.cpu()), size


def check_merges(device: torch.device) -> None:
    """Ranks above and below a tile's, and shapes that fill no tile."""
    for (rows, columns), rank, dtype in [
        ((1, 1), 1, torch.float32),
        ((70, 130), 8, torch.bfloat16),
        ((64, 256), 32, torch.bfloat16),
        ((33, 200), 40, torch.float32),
    ]:
        shapes = ((rows, columns), (rank, columns), (rows, rank))
        weight, a, b = (torch.randn(shape, device=device).to(dtype) for shape in shapes)
        before = weight.clone()
        merged = torch.empty_like(weight)
        lost, moved = merge_on_cuda(merged, weight, a, b, 0.25).tolist()
        assert torch.equal(weight, before)
        exact = weight.double() + 0.25 * (b.double() @ a.double())
        unit = torch.finfo(dtype).eps
        assert bool(((merged.double() - exact).abs() <= unit * exact.abs() + 1e-5).all()), (rows, columns, rank, dtype)
        reference = merge_into(torch.empty_like(weight), weight, a, b, 0.25)
        assert torch.allclose(merged.float(), reference.float(), rtol=2 * unit, atol=1e-5)  # sums in another order
        expected = float((merged.double() - exact).square().sum()), float((0.25 * (b.double() @ a.double())).square().sum())
        assert abs(lost - expected[0]) <= 0.02 * expected[0] + 1e-9, (lost, expected)
        assert abs(moved - expected[1]) <= 1e-4 * expected[1], (moved, expected)


if __name__ == "__main__":
    torch.manual_seed(0)
    check_digests(torch.device(sys.argv[1]))
    check_merges(torch.device(sys.argv[1]))
