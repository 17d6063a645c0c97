"""Sums in a fixed order, RMSNorm, SiLU and log-probs: the same bits whatever the number of rows and their order.

Elementwise additions, products, quotients and square roots are rounded alike by every kernel; a sum over a row is a tree of
elementwise additions. exp and log_softmax are torch's, of which machine.py tries that an element's place does not show.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from exact import cuda


def row_sums(x: torch.Tensor) -> torch.Tensor:
    """[..., n] -> [..., 1]: the halves are added, then the halves of that; zeros fill up to a power of two."""
    size = 1 << (x.shape[-1] - 1).bit_length()
    x = F.pad(x, (0, size - x.shape[-1]))
    while size > 1:
        size //= 2
        x = x[..., :size] + x[..., size:]
    return x


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., n] by its root mean square, times weight [n]."""
    if x.is_cuda:
        from exact import kernels

        return kernels.rms_norm(x, weight, eps)
    return x * (1.0 / torch.sqrt(row_sums(x * x) / x.shape[-1] + eps)) * weight


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """rms_norm of x + residual, and that sum."""
    if x.is_cuda:
        from exact import kernels

        return kernels.add_rms_norm(x, residual, weight, eps)
    whole = x + residual
    return rms_norm(whole, weight, eps), whole


def silu(x: torch.Tensor) -> torch.Tensor:
    """x / (1 + exp(-x)), on CPUs, where torch's own treats the end of its input otherwise."""
    return x / (1.0 + torch.exp(-x))


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """SwiGLU: [..., 2 n], gate and up side by side, to [..., n]."""
    if x.is_cuda:
        from exact import kernels

        return kernels.silu_and_mul(x)
    gate, up = x.chunk(2, -1)
    return silu(gate) * up


def silu_and_mul_gradient(x: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """The gradient of x, from that of `silu_and_mul`."""
    if x.is_cuda:
        from exact import kernels

        return kernels.silu_and_mul_gradient(x, gradient)
    gate, up = x.chunk(2, -1)
    return torch.cat([torch.ops.aten.silu_backward(gradient * up, gate), gradient * silu(gate)], -1)


def token_log_probs(logits: torch.Tensor, labels: torch.Tensor, temperature: float) -> torch.Tensor:
    """Natural log-probs of `labels` int64 [T], float32 [T]."""
    if logits.is_cuda:
        return cuda.token_log_probs(logits, labels, temperature)
    return log_softmax(logits, temperature).gather(1, labels[:, None]).squeeze(1)


def log_softmax(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Log-probs, as vLLM's sampler on CPUs (v1/sample/sampler.py:apply_temperature, ops/topk_topp_sampler.py)."""
    divisor = torch.full((len(logits), 1), temperature, dtype=torch.float32)
    return torch.log_softmax(logits / divisor, -1, dtype=torch.float32)
