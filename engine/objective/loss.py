"""Log-probs and losses. Pure functions of tensors; the same `token_log_probs` serves old, reference and current policy.

Ratios of two policies go by token or by sequence, and so do the weights that correct for rollouts of another policy. A sample's
tokens are all in one micro-batch, which the last stage sees whole, so that sequences need no communication; of an episode with
several branches each is a sequence of its own. Only sampled tokens count, those where the mask is 1.

Leaves out where the tensors come from (engine.py), how they are packed (batch.py) and advantages (advantages.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.attention import fused
from engine.batch.batch import MicroBatch
from engine.config import AlgorithmConfig
from engine.runtime.megatron import parallel_state as mpu, tensor_parallel

MAX_KL = 10.0
MAX_LOG_RATIO = 20.0  # exp of it is finite in float32, with room for sums
Sums = dict[str, torch.Tensor]  # name -> float64 scalar, a sum (or a maximum, as in gap_max) over tokens


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
    """Exclude samples from the loss and its sums: their tokens' mask becomes 0. `counts` has one value a sample of the batch."""
    if not all(counts):
        kept = torch.tensor(counts, dtype=batch.mask.dtype).to(batch.mask.device)
        batch.mask = batch.mask * kept[batch.segment]


def aggregation_weights(
    batch: MicroBatch, num_tokens: int, num_members: int, aggregation: str, max_new_tokens: int = 0
) -> torch.Tensor:
    """The weight of each token's loss, float32 [T].

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


def bounded(log_ratio: torch.Tensor) -> torch.Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def sequence_sums(values: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
    """The sum over each sample's tokens of `values` [T], float64 [samples]; in float64 no order of summation shows.

    Without samples (a stand-in) there is one sum.
    """
    sums = torch.zeros(len(batch.samples) or 1, dtype=torch.float64, device=values.device)
    return sums.index_add(0, batch.segment, values.double())


def log_ratio_at(level: str, log_ratio: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
    """Each token's own log-ratio (`token`), or at all tokens of a sample that of its response, float32 [T].

    `sequence` is the ratio of the response's probabilities, the sum over its tokens; `geometric` is the sum divided by their
    number, the logarithm of the geometric mean of the tokens' ratios.

    Args:
        log_ratio: float32 [T], 0 where `batch.mask` is 0.
    """
    if level == "token":
        return log_ratio
    sums = sequence_sums(log_ratio, batch)
    if level == "geometric":
        sums = sums / sequence_sums(batch.mask, batch).clamp(min=1)
    return sums.to(log_ratio.dtype)[batch.segment]


def importance_weights(gap: torch.Tensor, batch: MicroBatch, config: AlgorithmConfig) -> torch.Tensor:
    """The importance weight of each token's loss, since other weights or kernels sampled it, float32 [T]; no gradient.

    The ratio is the trainer's old probability over that of the version that made the token, taken at
    `config.importance_level`: by token, by sequence as the product over its tokens, or as their geometric mean (the levels of
    verl's rollout correction, verl/trainer/ppo/rollout_corr_helper.py; TRL's vllm_importance_sampling_mode has the first two).
    `tis` takes min(ratio, cap) (truncated importance sampling, Ionides 2008; Yao et al. 2025, "Your efficient RL framework
    secretly brings you off-policy RL training"); `mask` takes the ratio from `importance_floor` to `importance_cap` and
    elsewhere 0 (IcePop, arXiv:2510.18855). Masked tokens still count in the loss's mean.

    Args:
        gap: float32 [T], the old log-probs less the rollout's, 0 where `batch.mask` is 0.
    """
    if config.importance_correction == "none":
        return batch.mask
    ratio = bounded(log_ratio_at(config.importance_level, gap.detach(), batch)).exp()
    if config.importance_correction == "tis":
        return ratio.clamp(max=config.importance_cap)
    return ratio * ((ratio >= config.importance_floor) & (ratio <= config.importance_cap))  # NaN stays NaN


def weight_sums(weights: torch.Tensor, batch: MicroBatch, config: AlgorithmConfig) -> Sums:
    """Sums for the mean, the masked share and the effective sample size of the weights of `importance_weights`.

    By token each token is one sample of the policy; by sequence each response that has tokens in the loss is.
    """
    mask, share = batch.mask, batch.mask.double()
    if config.importance_level != "token":
        share = share / sequence_sums(mask, batch).clamp(min=1)[batch.segment]
    return {
        "importance": (weights * mask).sum().double(),
        "masked": ((weights == 0) * mask).sum().double(),
        "weight_count": share.sum(),
        "weight": (weights * share).sum(),
        "weight_square": (weights.double().square() * share).sum(),
    }
