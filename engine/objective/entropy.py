"""The entropy of the policy at every token, for the log: without gradient and without a float32 copy of the logits.

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
        chunks = [_within(chunk, divisor) for chunk in torch.split(rows, max(1, CHUNK_ELEMENTS // rows.shape[1]))]
        normalizer, entropy = (torch.cat(parts) for parts in zip(*chunks, strict=True))
    group = mpu.get_tensor_model_parallel_group()
    return entropy if dist.get_world_size(group) == 1 else _over_shards(normalizer, entropy, group)


def _over_shards(normalizer: torch.Tensor, entropy: torch.Tensor, group: Any) -> torch.Tensor:
    peak = normalizer.clone()
    dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=group)
    share = torch.exp(normalizer - peak)
    sums = torch.stack([share, share * (entropy - (normalizer - peak))])
    dist.all_reduce(sums, group=group)
    return sums[1] / sums[0] + sums[0].log()
