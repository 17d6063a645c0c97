"""The policy's loss of each token: arguments and result of a loss function, and the loss functions with a name.

A function of your own has the same signature as these (docs/your_own.md). The engine multiplies its result by the importance
weights and the aggregation's, and adds the terms of KL, entropy and routers (loss.py). Leaves out advantages
(advantages.py), and losses that a service's clients name (token_losses.py).

    token_losses, metrics = cispo(tokens)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from engine.algorithm import AlgorithmConfig

MAX_LOG_RATIO = 20.0  # exp of it is finite in float32, with room for sums


@dataclass(frozen=True, kw_only=True)
class LossTokens:
    """A micro-batch of T tokens, padding included, whole sequences end to end. All log-probs are natural.

    A value lies at the position that predicts its token. Where `mask` is 0 (prompts, given tokens, padding, responses that are
    left out) values are finite and without meaning, and so may be the loss.
    """

    log_probs: torch.Tensor  # float32 [T], of the current policy; has a gradient
    old_log_probs: torch.Tensor  # float32 [T], of the policy before the batch's first optimizer step
    rollout_log_probs: torch.Tensor  # float32 [T], by vLLM when it sampled
    reference_log_probs: torch.Tensor | None = None  # float32 [T], with algorithm.kl_coefficient above 0
    teacher_log_probs: torch.Tensor | None = None  # float32 [T], where there is a teacher
    advantages: torch.Tensor  # float32 [T]
    mask: torch.Tensor  # float32 [T], 1 where a sampled token is in the loss, else 0
    segment: torch.Tensor  # int64 [T], which sequence, from 0; padding counts as the last
    num_segments: int
    config: AlgorithmConfig
    extras: Mapping[str, torch.Tensor] = field(default_factory=dict)  # `entropy`, float32 [T], where it is computed

    def sums(self, values: torch.Tensor) -> torch.Tensor:
        """The sum of each sequence's `values` [T], float64 [num_segments]; in float64 no order of summation shows."""
        sums = torch.zeros(self.num_segments, dtype=torch.float64, device=values.device)
        return sums.index_add(0, self.segment, values.double())

    def ratio(self) -> torch.Tensor:
        """Current over old probability of each token, float32 [T]; 1 where `mask` is 0."""
        # masked differences are 0 before exp: padding must not give inf * 0
        return bounded((self.log_probs - self.old_log_probs) * self.mask).exp()


# each token's loss, float32 [T], and if wanted other values [T] by name, whose means over tokens are logged as loss/NAME
LossResult = torch.Tensor | tuple[torch.Tensor, dict[str, torch.Tensor]]
LossFunction = Callable[[LossTokens], LossResult]


def clip(tokens: LossTokens) -> LossResult:
    """PPO's clip with separate bounds (DAPO, arXiv:2503.14476), dual clip and GSPO's ratio."""
    config, advantages = tokens.config, tokens.advantages
    ratio = policy_ratio(tokens, config.ratio_level)
    loss = -clipped_surrogate(ratio, advantages, config)
    with torch.no_grad():
        metrics = {"clipped": _is_clipped(ratio, advantages, config)}
        if config.dual_clip is not None:
            metrics["dual_clipped"] = (ratio > config.dual_clip) * (advantages < 0)
    return loss, metrics


def cispo(tokens: LossTokens) -> LossResult:
    """The clipped ratio is a weight without gradient, so that clipped tokens teach, too (arXiv:2506.13585)."""
    ratio, config = tokens.ratio().detach(), tokens.config
    weight = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    return -weight * tokens.advantages * tokens.log_probs, {"clipped": (weight != ratio).float()}


def sapo(tokens: LossTokens) -> LossResult:
    """A soft gate in place of the clip, sigmoid(t (ratio - 1)) 4 / t, by the advantage's sign (arXiv:2511.20347)."""
    config = tokens.config
    temperature = torch.where(tokens.advantages > 0, config.sapo_temperature_positive, config.sapo_temperature_negative)
    gate = torch.sigmoid(temperature * (tokens.ratio() - 1)) * 4 / temperature
    return -gate * tokens.advantages


def gmpo(tokens: LossTokens) -> LossResult:
    """The geometric mean of a response's clipped ratios (arXiv:2507.20673), whose gradient is spread as in `policy_ratio`.

    Each ratio is clipped on the side where PPO's would be: above where the advantage is positive, below where it is negative.
    """
    config, advantages = tokens.config, tokens.advantages
    ratio = tokens.ratio()
    high = torch.where(advantages > 0, 1 + config.clip_high, torch.inf)
    low = torch.where(advantages < 0, 1 - config.clip_low, 0.0)
    log_ratio = ratio.clamp(low, high).log() * tokens.mask
    mean = log_ratio_at("geometric", log_ratio.detach(), tokens)
    response_ratio = (mean + log_ratio - log_ratio.detach()).exp()
    return -response_ratio * advantages, {"clipped": _is_clipped(ratio.detach(), advantages, config)}


def dppo_tv(tokens: LossTokens) -> LossResult:
    """A token counts unless it would move on away from the rollout's policy, from which it is too far: clip_low, clip_high.

    The binary approximation of the total variation (DPPO, arXiv:2602.04879, eq. 13): |current - rollout| of the sampled token.
    """
    current, sampled = tokens.log_probs.detach().exp(), tokens.rollout_log_probs.exp()
    return _within(tokens, current - sampled, (current - sampled).abs())


def dppo_kl(tokens: LossTokens) -> LossResult:
    """Like `dppo_tv`, by the binary approximation of KL(rollout || current) (DPPO, arXiv:2602.04879, eq. 14)."""
    current, sampled = tokens.log_probs.detach().double(), tokens.rollout_log_probs.double()
    p, q = sampled.exp(), current.exp()
    others = torch.log(((1 - p).clamp(min=1e-8)) / (1 - q).clamp(min=1e-8))
    return _within(tokens, q - p, p * (sampled - current) + (1 - p) * others)


LOSSES: dict[str, LossFunction] = {
    "clip": clip, "cispo": cispo, "sapo": sapo, "gmpo": gmpo, "dppo_tv": dppo_tv, "dppo_kl": dppo_kl,
}  # fmt: skip


def _within(tokens: LossTokens, change: torch.Tensor, divergence: torch.Tensor) -> LossResult:
    """Ratio times advantage, and 0 where the probability's `change` goes on in the advantage's direction beyond a bound."""
    config, advantages = tokens.config, tokens.advantages
    is_out = (advantages > 0) & (change > 0) & (divergence > config.clip_high)
    is_out |= (advantages < 0) & (change < 0) & (divergence > config.clip_low)
    return -tokens.ratio() * advantages * ~is_out, {"clipped": is_out.float()}


def _is_clipped(ratio: torch.Tensor, advantages: torch.Tensor, config: AlgorithmConfig) -> torch.Tensor:
    """Whether the token is at PPO's bound, which depends on the advantage's sign."""
    is_low, is_high = ratio < 1 - config.clip_low, ratio > 1 + config.clip_high
    return (is_low & (advantages < 0)) | (is_high & (advantages > 0))


# ------------------------------------------------------------------------------------------------ ratios


def policy_ratio(tokens: LossTokens, level: str) -> torch.Tensor:
    """The ratio of current to old probabilities, float32 [T]; without meaning, but finite, where the mask is 0.

    At level `sequence` its value at each token of a response is s, the geometric mean of their ratios, and its gradient s times
    that of the token's log-prob (GSPO-token, arXiv:2507.18071, section 4.3), so that the response's mean has the gradient of s.
    """
    log_ratio = (tokens.log_probs - tokens.old_log_probs) * tokens.mask
    if level == "sequence":
        own = (tokens.log_probs - tokens.log_probs.detach()) * tokens.mask
        log_ratio = log_ratio_at("geometric", log_ratio.detach(), tokens) + own
    return bounded(log_ratio).exp()


def clipped_surrogate(ratio: torch.Tensor, advantages: torch.Tensor, config: AlgorithmConfig) -> torch.Tensor:
    """PPO's clip with separate bounds (DAPO, arXiv:2503.14476), float32 [T], to be maximised.

    With `dual_clip` c it is at least c * advantage where the advantage is negative (arXiv:1912.09729).
    """
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(1 - config.clip_low, 1 + config.clip_high) * advantages)
    if config.dual_clip is None:
        return surrogate
    return torch.where(advantages < 0, torch.maximum(surrogate, config.dual_clip * advantages), surrogate)


def bounded(log_ratio: torch.Tensor) -> torch.Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def log_ratio_at(level: str, log_ratio: torch.Tensor, tokens: LossTokens) -> torch.Tensor:
    """Each token's own log-ratio (`token`), or at all tokens of a sample that of its response, float32 [T].

    `sequence` is the ratio of the response's probabilities, the sum over its tokens; `geometric` is the sum divided by their
    number, the logarithm of the geometric mean of the tokens' ratios.

    Args:
        log_ratio: float32 [T], 0 where the mask is 0.
    """
    if level == "token":
        return log_ratio
    sums = tokens.sums(log_ratio)
    if level == "geometric":
        sums = sums / tokens.sums(tokens.mask).clamp(min=1)
    return sums.to(log_ratio.dtype)[tokens.segment]
