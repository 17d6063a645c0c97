"""What norms, rotary embeddings, attention and log-probabilities compute, in the dtype of what they are given.

    rms_norm(x.double(), weight.double(), 1e-6)

Leaves out which module computes which of it, of what, and how far off it may be (reference.py). Pure functions of tensors.
"""

from __future__ import annotations

import torch

UNIT_FLOAT32 = 2.0**-24
LANES = 8  # of float32 numbers that a CPU without AVX512 adds at a time
ROWS = 256  # of queries at a time


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def rotate(x: torch.Tensor, positions: torch.Tensor, frequencies: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """x [T, heads, size], halves of a head turned together; elements beyond twice the frequencies stay."""
    angles = positions.double()[:, None, None] * frequencies.to(x)
    cos, sin, size = scale * angles.cos(), scale * angles.sin(), 2 * len(frequencies)
    first, second = x[..., :size].chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, x[..., size:]], -1)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    positions: torch.Tensor,
    scale: float,
    window: int,
    rounded: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention with grouped queries, and the same of |value|; [T, heads, size] each.

    `window` 0: none. `rounded`: what the softmax's results are rounded to.
    """
    found = []
    for start in range(0, len(query), ROWS):  # whose scores alone are in memory
        rows = slice(start, start + ROWS)
        weights = attention_weights(query[rows], key, positions[rows], scale, window)
        weights = weights if rounded is None else weights.to(rounded).double()
        found.append([torch.einsum("ghts,sgd->tghd", weights, each).flatten(1, 2) for each in (value, value.abs())])
    out, weighed = zip(*found, strict=True)
    return torch.cat(out), torch.cat(weighed)


def attention_weights(query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor, scale: float, window: int) -> torch.Tensor:
    """[groups, heads of a group, T, keys]."""
    grouped = torch.unflatten(query, 1, (key.shape[1], -1))
    scores = scale * torch.einsum("tghd,sgd->ghts", grouped, key)
    distance = positions[:, None] - torch.arange(len(key), device=key.device)
    hidden = (distance < 0) | (distance >= window) if window else distance < 0
    return scores.masked_fill(hidden, -torch.inf).softmax(-1)


def sum_of_exps_bound(logits: torch.Tensor) -> torch.Tensor:
    """[T]: how far rounding may take the log of float32's sum of exp, one addend after the other in each of LANES, as on CPUs.

    An addition is off by half a unit of the sum so far at most, and by the addend where that is less. So the many small addends
    of a large vocabulary may all be lost beside a large one: of SmolLM2's, with 49152 tokens, 2e-5 and more.
    """
    by_addend = logits.softmax(-1).clamp_max(UNIT_FLOAT32).sum(-1)
    return by_addend.clamp_max(logits.shape[-1] / LANES * UNIT_FLOAT32)


def log_probs(logits: torch.Tensor, token_ids: torch.Tensor, temperature: float) -> torch.Tensor:
    return (logits / temperature).log_softmax(-1).gather(-1, token_ids[:, None]).squeeze(-1)
