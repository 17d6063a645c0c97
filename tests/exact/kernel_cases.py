"""The Triton kernels of exact/ beside what they compute on CPUs; `python -m tests.exact.kernel_cases` runs them all.

In Triton's interpreter, which has to be chosen (TRITON_INTERPRET=1) before Triton is imported: a process of its own. In float32;
what their bits are on a GPU is in test_cuda.py.
"""

from __future__ import annotations

import torch

from exact import kernels, pointwise, rotary


def check_norms() -> None:
    for columns in (64, 100, 576):
        x, residual, weight = torch.randn(7, 2 * columns)[:, columns:], torch.randn(7, columns), torch.randn(columns)
        torch.testing.assert_close(kernels.rms_norm(x, weight, 1e-6), pointwise.rms_norm(x, weight, 1e-6))
        found, whole = kernels._norm(x, residual, weight, 1e-6)
        assert torch.equal(whole, x + residual)
        torch.testing.assert_close(found, kernels.rms_norm(whole, weight, 1e-6))


def check_swiglu() -> None:
    for columns in (8, 1536):
        x, gradient = torch.randn(5, 2 * columns), torch.randn(5, columns)
        torch.testing.assert_close(kernels.silu_and_mul(x), pointwise.silu_and_mul(x))
        torch.testing.assert_close(kernels.silu_and_mul_gradient(x, gradient), pointwise.silu_and_mul_gradient(x, gradient))


def check_rotation() -> None:
    for heads, size in ((9, 64), (3, 40)):
        x = torch.randn(6, 2 * heads * size)[:, heads * size :].view(6, heads, size)
        cos, sin = rotary.table(1.0 / 10000 ** (torch.arange(0, size, 2) / size), 300)[:, None].chunk(2, -1)
        rows = torch.randperm(300)[:6]
        expected = rotary.rotate(x, cos, sin, rows)
        torch.testing.assert_close(kernels.rotate(x, cos, sin, rows), expected)
        torch.testing.assert_close(kernels.rotate(x, cos[rows], sin[rows]), expected)


def main() -> None:
    torch.manual_seed(0)
    check_norms()
    check_swiglu()
    check_rotation()


if __name__ == "__main__":
    main()
