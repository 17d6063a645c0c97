"""Log-probs, and the loss of a micro-batch: the policy's loss of each token (policy.py), its weights, KL and entropy terms.

Pure functions of tensors; the same `token_log_probs` serves old, reference and current policy. The weights that correct for
rollouts of another policy go by token or by sequence. A sample's tokens are all in one micro-batch, which the last stage sees
whole, so that sequences need no communication; of an episode with several branches each is a sequence of its own. Only sampled
tokens count, those where the mask is 1.

Leaves out where the tensors come from (engine.py), how they are packed (batch.py) and advantages (advantages.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.attention import fused
from engine.batch.batch import MicroBatch
from engine.algorithm import AlgorithmConfig
from engine.objective.policy import LOSSES, LossFunction, LossTokens, bounded, log_ratio_at, policy_ratio
from engine.runtime.megatron import parallel_state as mpu, tensor_parallel

MAX_KL = 10.0
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


def support_log_probs(logits: torch.Tensor, targets: torch.Tensor, temperature: float) -> torch.Tensor:
    """Natural log-prob of each label under softmax(logits / temperature) over the tokens of its support.

    A rank gathers those of its shard; the values of all shards are added, so that the result has the same bits for every tensor
    size, and none is made of the whole vocabulary.

    Args:
        logits: [1, T, vocabulary / tensor size], as for `token_log_probs`.
        targets: int64 [1 + most kept tokens, T], the labels and below them their supports, which hold them (MicroBatch.targets).

    Returns:
        float32 [T], the same on every tensor-parallel rank; gradients flow to `logits`.
    """
    labels, kept, size = targets[0], targets[1:].t(), logits.shape[-1]
    own = kept - mpu.get_tensor_model_parallel_rank() * size
    is_own = (own >= 0) & (own < size) & (kept >= 0)
    own_values = logits[0].gather(1, own.clamp(0, size - 1)).float().masked_fill(~is_own, 0.0) / temperature
    values: torch.Tensor = tensor_parallel.reduce_from_tensor_model_parallel_region(own_values)
    of_label = values.masked_fill(kept != labels[:, None], 0.0).sum(1)
    return of_label - values.masked_fill(kept < 0, float("-inf")).logsumexp(1)


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
    return loss, {"loss": loss.detach().double(), "data": loss.detach().double(), "tokens": batch.mask.sum().double()}


def grpo_loss(
    log_probs: torch.Tensor,
    batch: MicroBatch,
    weights: torch.Tensor,
    config: AlgorithmConfig,
    entropy: torch.Tensor | None = None,
    function: LossFunction | None = None,
) -> tuple[torch.Tensor, Sums]:
    """The policy's loss by `function`, None for the one that `config.loss` names, with weights for off-policy rollouts, and the
    terms of KL and entropy.

    `importance_weights` multiply the policy's loss, no gradient through them. Without `old_log_probs` the current ones are the
    old ones: no optimizer step lies between. `entropy`: float32 [T]; with a gradient where `config.entropy_coefficient` is not 0.
    Of the sums, `loss` is all of it and `policy` that of the function alone; the function reports `clipped`, `dual_clipped`
    (of the named ones) and `loss/NAME`.

    Every exponent is clamped to +-20 and each token's KL to 10, as in verl (verl/trainer/ppo/core_algos.py,
    compute_policy_loss and kl_penalty; trainer/ppo/rollout_corr_helper.py, SAFETY_BOUND), so that no token alone makes the loss
    infinite.
    """
    tokens = loss_tokens(log_probs, batch, config, entropy)
    mask = batch.mask
    gap = (tokens.old_log_probs - batch.rollout_log_probs) * mask
    correction = importance_weights(gap, tokens)
    found = (function or LOSSES[config.loss])(tokens)
    by_token, own = found if isinstance(found, tuple) else (found, {})
    policy_loss = token_loss = by_token * correction
    sums: Sums = {}
    if config.kl_coefficient > 0:
        kl = kl_estimate(log_probs, batch, config.kl_estimator)
        if config.kl_in == "loss":
            token_loss = token_loss + config.kl_coefficient * kl
        sums["kl"] = (kl * mask).sum().detach().double()
    if entropy is not None:
        sums["entropy"] = (entropy.detach() * mask).sum().double()
        if config.entropy_coefficient:
            token_loss = token_loss - config.entropy_coefficient * entropy
    loss = (token_loss * weights).sum()
    with torch.no_grad():
        sums |= weight_sums(correction, tokens) | {
            "loss": loss.detach().double(),
            "policy": (policy_loss * weights).sum().double(),
            "tokens": mask.sum().double(),
            "ratio": (policy_ratio(tokens, config.ratio_level) * mask).sum().double(),
            "gap": (gap.abs() * mask).sum().double(),
            "gap_max": (gap.abs() * mask).max().double(),
        }
        sums |= {own_name(name): (values * mask).sum().double() for name, values in own.items()}
        if batch.own_choice_log_probs is not None:
            sums["own_gap"] = ((batch.own_choice_log_probs - batch.rollout_log_probs) * mask).abs().sum().double()
    return loss, sums


def own_name(name: str) -> str:
    """The name of the sum of a value that a loss reports."""
    return name if name in ("clipped", "dual_clipped") else f"loss/{name}"


def loss_tokens(
    log_probs: torch.Tensor, batch: MicroBatch, config: AlgorithmConfig, entropy: torch.Tensor | None
) -> LossTokens:
    """The loss function's view of a micro-batch; a stand-in, which has no samples, is one sequence."""
    return LossTokens(
        log_probs=log_probs,
        old_log_probs=log_probs.detach() if batch.old_log_probs is None else batch.old_log_probs,
        rollout_log_probs=batch.rollout_log_probs,
        reference_log_probs=batch.reference_log_probs,
        teacher_log_probs=batch.teacher_log_probs,
        advantages=batch.advantages,
        mask=batch.mask,
        segment=batch.segment,
        num_segments=len(batch.samples) or 1,
        config=config,
        extras={} if entropy is None else {"entropy": entropy},
    )


def kl_estimate(log_probs: torch.Tensor, batch: MicroBatch, estimator: str) -> torch.Tensor:
    """Each token's estimate of KL(policy || reference), float32 [T] (Schulman 2020, http://joschu.net/blog/kl-approx.html).

    With d = reference - policy k1 is -d, k2 d^2 / 2, k3 exp(d) - d - 1; the last two from 0 to MAX_KL.
    """
    assert batch.reference_log_probs is not None
    difference = bounded((batch.reference_log_probs - log_probs) * batch.mask)
    if estimator == "k1":
        return -difference
    estimate = difference.square() / 2 if estimator == "k2" else difference.exp() - difference - 1
    return estimate.clamp(max=MAX_KL)


def importance_weights(gap: torch.Tensor, tokens: LossTokens) -> torch.Tensor:
    """The importance weight of each token's loss, since other weights or kernels sampled it, float32 [T]; no gradient.

    The ratio is the trainer's old probability over that of the version that made the token, taken at
    `config.importance_level`: by token, by sequence as the product over its tokens, or as their geometric mean (the levels of
    verl's rollout correction, verl/trainer/ppo/rollout_corr_helper.py; TRL's vllm_importance_sampling_mode has the first two).
    `tis` takes min(ratio, cap) (truncated importance sampling, Ionides 2008; Yao et al. 2025, "Your efficient RL framework
    secretly brings you off-policy RL training"); `mask` takes the ratio from `importance_floor` to `importance_cap` and
    elsewhere 0 (IcePop, arXiv:2510.18855). Masked tokens still count in the loss's mean.

    Args:
        gap: float32 [T], the old log-probs less the rollout's, 0 where the mask is 0.
    """
    config = tokens.config
    if config.importance_correction == "none":
        return tokens.mask
    ratio = bounded(log_ratio_at(config.importance_level, gap.detach(), tokens)).exp()
    if config.importance_correction == "tis":
        return ratio.clamp(max=config.importance_cap)
    return ratio * ((ratio >= config.importance_floor) & (ratio <= config.importance_cap))  # NaN stays NaN


def weight_sums(weights: torch.Tensor, tokens: LossTokens) -> Sums:
    """Sums for the mean, the masked share and the effective sample size of the weights of `importance_weights`.

    By token each token is one sample of the policy; by sequence each response that has tokens in the loss is.
    """
    mask, share = tokens.mask, tokens.mask.double()
    if tokens.config.importance_level != "token":
        share = share / tokens.sums(mask).clamp(min=1)[tokens.segment]
    return {
        "importance": (weights * mask).sum().double(),
        "masked": ((weights == 0) * mask).sum().double(),
        "weight_count": share.sum(),
        "weight": (weights * share).sum(),
        "weight_square": (weights.double().square() * share).sum(),
    }
