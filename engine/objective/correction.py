"""Log-ratios of two policies by token or by sequence, and the weights that correct for rollouts of another policy.

A sample's tokens are all in one micro-batch, which the last stage sees whole, so that sequences need no communication; of an
episode with several branches each is a sequence of its own. Only sampled tokens count, those where the mask is 1.
Leaves out the policy's objective (loss.py) and where log-probs come from (engine.py).
"""

from __future__ import annotations

import torch

from engine.batch.batch import MicroBatch
from engine.config import AlgorithmConfig

MAX_LOG_RATIO = 20.0  # exp of it is finite in float32, with room for sums
Sums = dict[str, torch.Tensor]  # name -> float64 scalar, a sum (or a maximum, where the name says so) over tokens


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
    """What multiplies each token's loss because other weights or kernels than the trainer's sampled it, float32 [T]; no gradient.

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
