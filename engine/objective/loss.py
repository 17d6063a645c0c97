"""Log-probs and losses. Pure functions of tensors; the same `token_log_probs` serves old, reference and current policy.

Leaves out where the tensors come from (engine.py), how they are packed (batch.py), advantages (advantages.py) and the weights of
off-policy rollouts (correction.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.attention import fused
from engine.batch.batch import MicroBatch
from engine.config import AlgorithmConfig
from engine.objective.correction import Sums, bounded, importance_weights, log_ratio_at, weight_sums
from engine.runtime.megatron import parallel_state as mpu, tensor_parallel

MAX_KL = 10.0


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
    # a new tensor: cross_entropy.py subtracts the maximum in place
    scaled = logits.to(torch.float32, copy=True) if temperature == 1 else logits.float() / temperature
    losses: torch.Tensor = tensor_parallel.vocab_parallel_cross_entropy(scaled.transpose(0, 1).contiguous(), labels.t())
    return -losses.squeeze(1)


def leave_out(batch: MicroBatch, counts: Sequence[bool]) -> None:
    """Take samples out of the loss and its sums: their tokens' mask becomes 0. `counts` has one value a sample of the batch."""
    if not all(counts):
        kept = torch.tensor(counts, dtype=batch.mask.dtype).to(batch.mask.device)
        batch.mask = batch.mask * kept[batch.segment]


def aggregation_weights(
    batch: MicroBatch, num_tokens: int, num_members: int, aggregation: str, max_new_tokens: int = 0
) -> torch.Tensor:
    """What each token's loss counts, float32 [T].

    With `token_mean` (DAPO, arXiv:2503.14476) and `sequence_mean` (GRPO, arXiv:2402.03300) the weights sum to 1 over all
    micro-batches of a mini-batch; with `constant_length` each is 1 / (num_members * max_new_tokens) (Dr. GRPO, arXiv:2503.20783).
    A member, one response or all branches of an episode, is one sequence.

    `num_tokens`, `num_members`: sampled tokens and members of the whole mini-batch that are in the loss, over all ranks.
    """
    if aggregation == "token_mean":
        return batch.mask / max(num_tokens, 1)
    if aggregation == "constant_length":
        return batch.mask / (max_new_tokens * max(num_members, 1))
    return batch.mask / batch.member_tokens.clamp(min=1)[batch.segment] / max(num_members, 1)


def sft_loss(log_probs: torch.Tensor, batch: MicroBatch, weights: torch.Tensor) -> tuple[torch.Tensor, Sums]:
    """Negative log-likelihood of the responses. Returns this micro-batch's share of the mini-batch loss, and sums."""
    loss = -(log_probs * weights).sum()
    return loss, {"loss": loss.detach().double(), "tokens": batch.mask.sum().double()}


def policy_ratio(log_probs: torch.Tensor, old: torch.Tensor, batch: MicroBatch, level: str) -> torch.Tensor:
    """The ratio of current to old probabilities, float32 [T]; without meaning, but finite, where `batch.mask` is 0.

    At level `sequence` its value at each token of a response is s, the geometric mean of their ratios, and its gradient s times
    that of the token's log-prob (GSPO-token, arXiv:2507.18071, section 4.3), so that the response's mean has the gradient of s.
    """
    # masked differences are 0 before exp: padding must not give inf * 0
    log_ratio = (log_probs - old) * batch.mask
    if level == "sequence":
        log_ratio = log_ratio_at("geometric", log_ratio.detach(), batch) + (log_probs - log_probs.detach()) * batch.mask
    return bounded(log_ratio).exp()


def clipped_surrogate(ratio: torch.Tensor, advantages: torch.Tensor, config: AlgorithmConfig) -> torch.Tensor:
    """PPO's clip with separate bounds (DAPO, arXiv:2503.14476), float32 [T], to be maximised.

    With `dual_clip` c it is at least c * advantage where the advantage is negative (arXiv:1912.09729).
    """
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(1 - config.clip_low, 1 + config.clip_high) * advantages)
    if config.dual_clip is None:
        return surrogate
    return torch.where(advantages < 0, torch.maximum(surrogate, config.dual_clip * advantages), surrogate)


def grpo_loss(
    log_probs: torch.Tensor, batch: MicroBatch, weights: torch.Tensor, config: AlgorithmConfig
) -> tuple[torch.Tensor, Sums]:
    """Clipped policy gradient with weights for off-policy rollouts and an optional k3 KL term.

    `importance_weights` multiply the surrogate, no gradient through them; KL as k3 = exp(d) - d - 1 with d = reference - current
    (Schulman 2020). Without `old_log_probs` the current ones are the old ones: no optimizer step lies between.
    Of the sums, `loss` is all of it and `policy` the clipped policy gradient alone; `clipped` counts tokens whose surrogate is at
    PPO's bound, which depends on the advantage's sign, `dual_clipped` those at `dual_clip`.

    Every exponent is clamped to +-20 and each token's KL to 10, as in verl (verl/trainer/ppo/core_algos.py,
    compute_policy_loss and kl_penalty; trainer/ppo/rollout_corr_helper.py, SAFETY_BOUND), so that no token alone makes the loss
    infinite.
    """
    mask, old = batch.mask, log_probs.detach() if batch.old_log_probs is None else batch.old_log_probs
    ratio = policy_ratio(log_probs, old, batch, config.ratio_level)
    gap = (old - batch.rollout_log_probs) * mask
    correction = importance_weights(gap, batch, config)
    policy_loss = token_loss = -clipped_surrogate(ratio, batch.advantages, config) * correction
    sums: Sums = {}
    if config.kl_coefficient > 0:
        kl = _kl(log_probs, batch)
        token_loss = token_loss + config.kl_coefficient * kl
        sums["kl"] = (kl * mask).sum().detach().double()
    loss = (token_loss * weights).sum()
    with torch.no_grad():
        is_low, is_high = ratio < 1 - config.clip_low, ratio > 1 + config.clip_high
        clipped = (is_low & (batch.advantages < 0)) | (is_high & (batch.advantages > 0))
        sums |= weight_sums(correction, batch, config) | {
            "loss": loss.detach().double(),
            "policy": (policy_loss * weights).sum().double(),
            "tokens": mask.sum().double(),
            "ratio": (ratio.detach() * mask).sum().double(),
            "clipped": (clipped * mask).sum().double(),
            "gap": (gap.abs() * mask).sum().double(),
            "gap_max": (gap.abs() * mask).max().double(),
        }
        if batch.own_choice_log_probs is not None:
            sums["own_gap"] = ((batch.own_choice_log_probs - batch.rollout_log_probs) * mask).abs().sum().double()
        if config.dual_clip is not None:
            sums["dual_clipped"] = ((ratio > config.dual_clip) * (batch.advantages < 0) * mask).sum().double()
    return loss, sums


def _kl(log_probs: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
    """Each token's estimate k3 of the KL to the reference, from 0 to MAX_KL."""
    assert batch.reference_log_probs is not None
    difference = bounded((batch.reference_log_probs - log_probs) * batch.mask)
    return (difference.exp() - difference - 1).clamp(max=MAX_KL)
