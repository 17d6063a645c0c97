"""Log-probs and losses. Pure functions of tensors; the same `token_log_probs` serves old, reference and current policy.

Leaves out where the tensors come from (engine.py) and how they are packed (batch.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine import fused
from engine.batch import MicroBatch
from engine.config import AlgorithmConfig
from engine.megatron import parallel_state as mpu
from engine.megatron import tensor_parallel

MAX_LOG_RATIO = 20.0  # exp of it is finite in float32, with room for sums
MAX_KL = 10.0
Sums = dict[str, torch.Tensor]  # name -> float64 scalar, a sum (or a maximum, where the name says so) over tokens


def token_log_probs(logits: torch.Tensor, labels: torch.Tensor, temperature: float, use_fused: bool = False) -> torch.Tensor:
    """Natural log-prob of each label under softmax(logits / temperature).

    Args:
        logits: [1, T, vocabulary / tensor size], this tensor-parallel rank's shard of the vocabulary; not changed.
        labels: int64 [1, T].
        use_fused: see fused.token_log_probs; else megatron-core's cross entropy on float32 logits.

    Returns:
        float32 [T], the same on every tensor-parallel rank; gradients flow to `logits`.
    """
    if use_fused:
        return fused.token_log_probs(logits[0], labels[0], temperature, mpu.get_tensor_model_parallel_group())
    scaled = logits.float() / temperature  # a new tensor: cross_entropy.py subtracts the maximum in place
    if scaled.data_ptr() == logits.data_ptr():
        scaled = scaled.clone()
    losses: torch.Tensor = tensor_parallel.vocab_parallel_cross_entropy(scaled.transpose(0, 1).contiguous(), labels.t())
    return -losses.squeeze(1)


def group_advantages(rewards: Sequence[float], groups: Sequence[int], by_std: bool) -> list[float]:
    """(reward - mean of its group), divided by the group's standard deviation + 1e-6 if `by_std` (GRPO, arXiv:2402.03300).

    A group whose rewards are all equal gets zeros. Invariant: each group's advantages sum to 0 up to rounding.
    """
    members: dict[int, list[int]] = {}
    for index, group in enumerate(groups):
        members.setdefault(group, []).append(index)
    result = [0.0] * len(rewards)
    for indices in members.values():
        values = torch.tensor([rewards[i] for i in indices], dtype=torch.float64)
        centred = values - values.mean()
        if by_std:
            centred = centred / (values.std(unbiased=False) + 1e-6)
        for index, value in zip(indices, centred.tolist(), strict=True):
            result[index] = value
    return result


def aggregation_weights(batch: MicroBatch, num_tokens: int, num_samples: int, aggregation: str) -> torch.Tensor:
    """What each token's loss counts, float32 [T]; over all micro-batches of a mini-batch the weights sum to 1.

    `num_tokens`, `num_samples`: response tokens and samples of the whole mini-batch, over all ranks.
    """
    if aggregation == "token_mean":
        return batch.mask / max(num_tokens, 1)
    counts = torch.zeros(len(batch.samples) or 1, device=batch.mask.device)  # segment.max() would synchronise
    counts.index_add_(0, batch.segment, batch.mask)
    return batch.mask / counts.clamp(min=1)[batch.segment] / max(num_samples, 1)


def sft_loss(log_probs: torch.Tensor, batch: MicroBatch, weights: torch.Tensor) -> tuple[torch.Tensor, Sums]:
    """Negative log-likelihood of the responses. Returns this micro-batch's share of the mini-batch loss, and sums."""
    loss = -(log_probs * weights).sum()
    return loss, {"loss": loss.detach().double(), "tokens": batch.mask.sum().double()}


def grpo_loss(
    log_probs: torch.Tensor, batch: MicroBatch, weights: torch.Tensor, config: AlgorithmConfig
) -> tuple[torch.Tensor, Sums]:
    """Clipped policy gradient with truncated importance sampling and an optional k3 KL term.

    PPO's clip with separate bounds (DAPO, arXiv:2503.14476); `tis` multiplies by min(old / rollout, cap), no gradient
    through it; KL as k3 = exp(d) - d - 1 with d = reference - current (Schulman 2020). Without `old_log_probs` the current
    ones are the old ones: no optimizer step lies between.

    Every exponent is clamped to +-20 and each token's KL to 10, as in verl (verl/trainer/ppo/core_algos.py,
    compute_policy_loss and kl_penalty; trainer/ppo/rollout_corr_helper.py, SAFETY_BOUND), so that no token alone makes the loss
    infinite.
    """
    mask, old = batch.mask, log_probs.detach() if batch.old_log_probs is None else batch.old_log_probs
    # masked differences are 0 before exp: padding must not give inf * 0
    ratio = _bounded((log_probs - old) * mask).exp()
    surrogate = torch.minimum(ratio * batch.advantages, ratio.clamp(1 - config.clip_low, 1 + config.clip_high) * batch.advantages)
    gap = (old - batch.rollout_log_probs) * mask
    correction = _bounded(gap).exp().clamp(max=config.importance_cap) if config.importance_correction == "tis" else mask
    token_loss = -surrogate * correction
    sums: Sums = {}
    if config.kl_coefficient > 0:
        kl = _kl(log_probs, batch)
        token_loss = token_loss + config.kl_coefficient * kl
        sums["kl"] = (kl * mask).sum().detach().double()
    loss = (token_loss * weights).sum()
    with torch.no_grad():
        clipped = (ratio < 1 - config.clip_low) | (ratio > 1 + config.clip_high)
        sums |= {
            "loss": loss.detach().double(),
            "tokens": mask.sum().double(),
            "ratio": (ratio.detach() * mask).sum().double(),
            "clipped": (clipped * mask).sum().double(),
            "gap": (gap.abs() * mask).sum().double(),
            "gap_max": (gap.abs() * mask).max().double(),
            "importance": (correction * mask).sum().double(),
        }
    return loss, sums


def _kl(log_probs: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
    """Each token's estimate k3 of the KL to the reference, from 0 to MAX_KL."""
    assert batch.reference_log_probs is not None
    difference = _bounded((batch.reference_log_probs - log_probs) * batch.mask)
    return (difference.exp() - difference - 1).clamp(max=MAX_KL)


def _bounded(log_ratio: torch.Tensor) -> torch.Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
