"""Triton kernels on CUDA: RMSNorm, the rotary embedding and SwiGLU, a program a row or a token, so that no other row shows.

What a program adds up it adds in an order that follows from the row's length alone: block size and number of warps are functions
of it. Leaves out who calls them (cuda.py). Imported on CUDA alone.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

HEADS = 8  # of a program of the rotary embedding
WARP_ELEMENTS = 256  # of a row, for each warp
COLUMNS = 1024  # of a program of SwiGLU
TRIED_ROWS = 64


@triton.jit  # type: ignore[untyped-decorator]
def _rms_norm(  # type: ignore[no-untyped-def] # noqa: PLR0913, PLR0917
    x, residual, weight, out, whole, stride, num_columns, eps, ADDS: tl.constexpr, BLOCK: tl.constexpr  # noqa: N803
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < num_columns
    values = tl.load(x + row * stride + columns, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        values += tl.load(residual + row * num_columns + columns, mask=inside, other=0.0).to(tl.float32)
        rounded = values.to(whole.dtype.element_ty)
        tl.store(whole + row * num_columns + columns, rounded, mask=inside)
        values = rounded.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(values * values) / num_columns + eps)
    factors = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * num_columns + columns, (values * scale * factors).to(out.dtype.element_ty), mask=inside)


def _norm(x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """With a contiguous residual, the norm of the sum of both, and that sum second."""
    num_columns = x.shape[-1]
    rows = x.reshape(-1, num_columns)
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    out = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
    whole = out if residual is None else torch.empty_like(out)
    block = triton.next_power_of_2(num_columns)
    warps = min(16, max(1, block // WARP_ELEMENTS))
    if len(rows):
        sizes, added = (rows.stride(0), num_columns, eps), out if residual is None else residual
        _rms_norm[(len(rows),)](
            rows, added, weight, out, whole, *sizes, ADDS=residual is not None, BLOCK=block, num_warps=warps
        )
    return out.view(x.shape), whole.view(x.shape)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., n] by its root mean square, times weight [n]; computed in float32, rounded once."""
    return _norm(x, None, weight, eps)[0]


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """rms_norm of x + residual, and that sum, in one kernel where that gives the same bits."""
    if residual.is_contiguous() and sums_agree(x.shape[-1], x.dtype):
        return _norm(x, residual, weight, eps)
    whole = x + residual
    return rms_norm(whole, weight, eps), whole


@cache
def sums_agree(num_columns: int, dtype: torch.dtype) -> bool:
    """Whether a kernel that adds first has the bits of a norm of the sum: both have to add a row's squares in one order."""
    generator = torch.Generator("cuda").manual_seed(num_columns)
    shapes = ((TRIED_ROWS, num_columns), (TRIED_ROWS, num_columns), (num_columns,))
    x, residual, weight = (torch.randn(shape, generator=generator, device="cuda").to(dtype) for shape in shapes)
    found, whole = _norm(x, residual, weight, 1e-5)
    return torch.equal(whole, x + residual) and torch.equal(found, rms_norm(x + residual, weight, 1e-5))


@triton.jit  # type: ignore[untyped-decorator]
def _silu_and_mul(x, out, stride, num_columns, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: N803
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < num_columns
    gate = tl.load(x + row * stride + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * stride + num_columns + columns, mask=inside, other=0.0).to(tl.float32)
    value = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * num_columns + columns, value.to(out.dtype.element_ty), mask=inside)


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """SwiGLU of gate and up side by side, [..., 2 n] -> [..., n], in float32, rounded once."""
    rows = x.reshape(-1, x.shape[-1])
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    num_columns = rows.shape[1] // 2
    out = torch.empty(len(rows), num_columns, dtype=x.dtype, device=x.device)
    if len(rows):
        grid = (len(rows), triton.cdiv(num_columns, COLUMNS))
        _silu_and_mul[grid](rows, out, rows.stride(0), num_columns, COLUMNS=COLUMNS, num_warps=4)
    return out.view(*x.shape[:-1], num_columns)


@triton.jit  # type: ignore[untyped-decorator]
def _silu_and_mul_gradient(x, gradient, out, num_columns, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: N803
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < num_columns
    begin = row * 2 * num_columns + columns
    gate = tl.load(x + begin, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + begin + num_columns, mask=inside, other=0.0).to(tl.float32)
    of_out = tl.load(gradient + row * num_columns + columns, mask=inside, other=0.0).to(tl.float32)
    share = 1.0 / (1.0 + tl.exp(-gate))
    of_gate = of_out * up * share * (1.0 + gate * (1.0 - share))
    tl.store(out + begin, of_gate.to(out.dtype.element_ty), mask=inside)
    tl.store(out + begin + num_columns, (of_out * gate * share).to(out.dtype.element_ty), mask=inside)


def silu_and_mul_gradient(x: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """The gradient of x, from that of `silu_and_mul`."""
    x, gradient = x.contiguous(), gradient.contiguous()
    num_columns = gradient.shape[-1]
    out, num_rows = torch.empty_like(x), gradient.numel() // num_columns
    if num_rows:
        grid = (num_rows, triton.cdiv(num_columns, COLUMNS))
        _silu_and_mul_gradient[grid](x, gradient, out, num_columns, COLUMNS=COLUMNS, num_warps=4)
    return out


@triton.jit  # type: ignore[untyped-decorator]
def _rotate(  # type: ignore[no-untyped-def] # noqa: PLR0913, PLR0917
    x, cos, sin, rows, out, of_token, of_head, of_cos, of_sin, num_heads, half,
    CHOOSES: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,  # noqa: N803
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + token).to(tl.int64) if CHOOSES else token
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    columns = tl.arange(0, HALF)[None, :]
    inside = (heads < num_heads) & (columns < half)
    read = x + token * of_token + heads * of_head + columns
    first = tl.load(read, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(read + half, mask=inside, other=0.0).to(tl.float32)
    cosine = tl.load(cos + row * of_cos + columns, mask=columns < half, other=0.0)
    sine = tl.load(sin + row * of_sin + columns, mask=columns < half, other=0.0)
    written = out + (token * num_heads + heads) * 2 * half + columns
    tl.store(written, (first * cosine - second * sine).to(out.dtype.element_ty), mask=inside)
    tl.store(written + half, (second * cosine + first * sine).to(out.dtype.element_ty), mask=inside)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, rows: torch.Tensor | None = None) -> torch.Tensor:
    """rotary.rotate in float32, rounded once.

    Args:
        x: [T, heads, size].
        cos, sin: float32 [T, 1, size / 2], last stride 1.
        rows: int64 [T], which rows of cos and sin are each token's; there may be others then. None: its own.
    """
    x = x if x.stride(2) == 1 else x.contiguous()
    num_tokens, num_heads, size = x.shape
    assert cos.stride(2) == sin.stride(2) == 1
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    grid = (num_tokens, triton.cdiv(num_heads, HEADS))
    sizes = x.stride(0), x.stride(1), cos.stride(0), sin.stride(0), num_heads, size // 2
    if num_tokens:
        chosen, half = cos if rows is None else rows, triton.next_power_of_2(size // 2)
        _rotate[grid](x, cos, sin, chosen, out, *sizes, CHOOSES=rows is not None, HEADS=HEADS, HALF=half, num_warps=4)
    return out
