"""The entropy of the policy at every token, without a float32 copy of the logits: for the log, or with a gradient for the loss.

Each tensor-parallel rank has a shard of the vocabulary, with the share w of the probability, and the entropy h within it; the
whole entropy is the sum over the shards of w (h - log w). Leaves out the mean over tokens (engine.py).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from engine.runtime import device
from engine.runtime.megatron import parallel_state as mpu

CHUNK_ELEMENTS = 2**24  # logits that are float32 at once: 64 MiB


def _within(logits: torch.Tensor, temperature: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The log of the denominator and the entropy of softmax(logits / temperature) in each row, both float32 [rows]."""
    scaled = logits.float() / temperature
    normalizer = torch.logsumexp(scaled, -1)
    log_probs = scaled - normalizer[:, None]
    return normalizer, -(torch.exp(log_probs) * log_probs).sum(-1)


def _chunks(rows: torch.Tensor, width: int) -> tuple[torch.Tensor, ...]:
    """Chunks of tensors with a row for each token; logits `width` wide have at most CHUNK_ELEMENTS in one."""
    return torch.split(rows, max(1, CHUNK_ELEMENTS // width))


_within_fused = device.compiled(_within)


@torch.no_grad()
def token_entropy(logits: torch.Tensor, temperature: float, use_fused: bool = False) -> torch.Tensor:
    """Entropy in nats of softmax(logits / temperature).

    Args:
        logits: [1, T, vocabulary / tensor size], this tensor-parallel rank's shard of the vocabulary; not changed.
        use_fused: one compiled kernel; else a few rows after another.

    Returns:
        float32 [T], the same on every tensor-parallel rank.
    """
    rows, divisor = logits.detach()[0], torch.full((), temperature, device=logits.device)
    if use_fused:
        torch._dynamo.maybe_mark_dynamic(rows, 0)
        normalizer, entropy = _within_fused(rows, divisor)
    else:
        chunks = [_within(chunk, divisor) for chunk in _chunks(rows, rows.shape[1])]
        normalizer, entropy = (torch.cat(parts) for parts in zip(*chunks, strict=True))
    return _over_shards(normalizer, entropy)[1]


class _Entropy(torch.autograd.Function):
    """`token_entropy` with the gradient of logit i: -p_i (log p_i + entropy) / temperature."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, temperature: float) -> torch.Tensor:
        rows, divisor = logits.detach()[0], torch.full((), temperature, device=logits.device)
        chunks = [_within(chunk, divisor) for chunk in _chunks(rows, rows.shape[1])]
        normalizer, entropy = _over_shards(*(torch.cat(parts) for parts in zip(*chunks, strict=True)))
        ctx.save_for_backward(logits, normalizer, entropy, divisor)
        return entropy

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits, normalizer, entropy, divisor = ctx.saved_tensors
        result, width = torch.empty_like(logits), logits.shape[2]
        columns = [each[:, None] for each in (normalizer, entropy, gradients[0] / divisor)]
        parts = [_chunks(each, width) for each in (result[0], logits[0], *columns)]
        for out, rows, own_normalizer, own_entropy, gradient in zip(*parts, strict=True):
            log_probs = rows.float() / divisor - own_normalizer
            out.copy_(-gradient * log_probs.exp() * (log_probs + own_entropy))
        return result, None


def entropy_with_gradient(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """`token_entropy` from which gradients flow to `logits`, which is kept for the backward pass."""
    return _Entropy.apply(logits, temperature)  # type: ignore[no-any-return, no-untyped-call]


def _over_shards(normalizer: torch.Tensor, entropy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both of the whole vocabulary, from those of this rank's shard."""
    group = mpu.get_tensor_model_parallel_group()
    if dist.get_world_size(group) == 1:
        return normalizer, entropy
    peak = normalizer.clone()
    dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=group)
    share = torch.exp(normalizer - peak)
    sums = torch.stack([share, share * (entropy - (normalizer - peak))])
    dist.all_reduce(sums, group=group)
    return peak + sums[0].log(), sums[1] / sums[0] + sums[0].log()
