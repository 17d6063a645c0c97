"""Triton kernels on CUDA: RMSNorm and the rotary embedding, a program a row or a token, so that no other row shows.

What a program adds up it adds in an order that follows from the row's length alone: block size and number of warps are functions
of it. Leaves out who calls them (cuda.py). Imported on CUDA alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

HEADS = 8  # of a program of the rotary embedding
WARP_ELEMENTS = 256  # of a row, for each warp


@triton.jit  # type: ignore[untyped-decorator]
def _rms_norm(x, weight, out, stride, num_columns, eps, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: N803
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < num_columns
    values = tl.load(x + row * stride + columns, mask=inside, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(values * values) / num_columns + eps)
    factors = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * num_columns + columns, (values * scale * factors).to(out.dtype.element_ty), mask=inside)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., n] by its root mean square, times weight [n]; computed in float32, rounded once."""
    num_columns = x.shape[-1]
    rows = x.reshape(-1, num_columns)
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    out = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(num_columns)
    warps = min(16, max(1, block // WARP_ELEMENTS))
    if len(rows):
        _rms_norm[(len(rows),)](rows, weight, out, rows.stride(0), num_columns, eps, BLOCK=block, num_warps=warps)
    return out.view(x.shape)


@triton.jit  # type: ignore[untyped-decorator]
def _rotate(  # type: ignore[no-untyped-def] # noqa: PLR0913, PLR0917
    x, cos, sin, out, of_token, of_head, of_cos, of_sin, num_heads, half, HEADS: tl.constexpr, HALF: tl.constexpr  # noqa: N803
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    columns = tl.arange(0, HALF)[None, :]
    inside = (heads < num_heads) & (columns < half)
    read = x + token * of_token + heads * of_head + columns
    first = tl.load(read, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(read + half, mask=inside, other=0.0).to(tl.float32)
    cosine = tl.load(cos + token * of_cos + columns, mask=columns < half, other=0.0)
    sine = tl.load(sin + token * of_sin + columns, mask=columns < half, other=0.0)
    written = out + (token * num_heads + heads) * 2 * half + columns
    tl.store(written, (first * cosine - second * sine).to(out.dtype.element_ty), mask=inside)
    tl.store(written + half, (second * cosine + first * sine).to(out.dtype.element_ty), mask=inside)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """rotary.rotate in float32, rounded once. x [T, heads, size]; cos, sin float32 [T, 1, size / 2], last stride 1."""
    x = x if x.stride(2) == 1 else x.contiguous()
    num_tokens, num_heads, size = x.shape
    assert cos.stride(2) == sin.stride(2) == 1
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    grid = (num_tokens, triton.cdiv(num_heads, HEADS))
    sizes = x.stride(0), x.stride(1), cos.stride(0), sin.stride(0), num_heads, size // 2
    if num_tokens:
        _rotate[grid](x, cos, sin, out, *sizes, HEADS=HEADS, HALF=triton.next_power_of_2(size // 2), num_warps=4)
    return out
