"""Losses that a caller names, as sums over given positions: none is averaged, and weights come from the caller.

Each takes the log-probs of the targets and the caller's own values at the same positions. Names and formulas are those of
Tinker's clients. Leaves out how positions are packed (engine/driven.py), and the losses of a run (loss.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.objective.policy import bounded

Values = dict[str, torch.Tensor]  # by name, float32 [T]; `sequence`, int64 [T]: the number of each token's sequence
Options = dict[str, float]
CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}  # bounds of the ratio itself


@dataclass(frozen=True)
class TokenLoss:
    """`value` maps log-probs float32 [T], values and options to the loss of each position, float32 [T]."""

    inputs: tuple[str, ...]
    options: Options  # with their defaults
    value: Callable[[torch.Tensor, Values, Options], torch.Tensor]


def _ratio(log_probs: torch.Tensor, values: Values) -> torch.Tensor:
    return bounded(log_probs - values["logprobs"]).exp()


def cross_entropy(log_probs: torch.Tensor, values: Values, _: Options) -> torch.Tensor:
    return -log_probs * values["weights"]


def importance_sampling(log_probs: torch.Tensor, values: Values, _: Options) -> torch.Tensor:
    """-(p / q) A, where q sampled the tokens."""
    return -_ratio(log_probs, values) * values["advantages"]


def ppo(log_probs: torch.Tensor, values: Values, options: Options) -> torch.Tensor:
    """The clipped surrogate (arXiv:1707.06347)."""
    ratio, advantages = _ratio(log_probs, values), values["advantages"]
    clipped = ratio.clamp(options["clip_low_threshold"], options["clip_high_threshold"])
    return -torch.minimum(ratio * advantages, clipped * advantages)


def cispo(log_probs: torch.Tensor, values: Values, options: Options) -> torch.Tensor:
    """REINFORCE with clipped importance weights, through which no gradient goes (arXiv:2506.13585)."""
    ratio = _ratio(log_probs, values).detach()
    return -ratio.clamp(options["clip_low_threshold"], options["clip_high_threshold"]) * log_probs * values["advantages"]


def gspo(log_probs: torch.Tensor, values: Values, options: Options) -> torch.Tensor:
    """The clipped surrogate with the geometric mean of a sequence's ratios, and each token's own gradient (GSPO-token,
    arXiv:2507.18071, section 4.3). `sequence_ratio_mask` marks the tokens of the mean; where it marks none the ratio is 1.
    """
    own, sequence = log_probs.detach(), values["sequence"]
    is_in = values["sequence_ratio_mask"] != 0
    sums = torch.zeros(2, int(sequence.max()) + 1, dtype=torch.float64, device=own.device)
    distances = torch.where(is_in, own - values["logprobs"], 0.0)
    total, count = sums.index_add(1, sequence, torch.stack([distances, is_in.float()]).double())
    mean = (total / count.clamp(min=1.0)).float()[sequence]
    ratio, advantages = bounded(mean + log_probs - own).exp(), values["advantages"]
    clipped = ratio.clamp(options["clip_low_threshold"], options["clip_high_threshold"])
    return -torch.minimum(ratio * advantages, clipped * advantages)


def dro(log_probs: torch.Tensor, values: Values, options: Options) -> torch.Tensor:
    """-(log p A - beta / 2 (log p - log q)^2), after arXiv:2405.19107."""
    distance = log_probs - values["logprobs"]
    return -(log_probs * values["advantages"] - 0.5 * options["beta"] * distance.square())


OFF_POLICY = ("logprobs", "advantages")
TOKEN_LOSSES = {
    "cross_entropy": TokenLoss(("weights",), {}, cross_entropy),
    "importance_sampling": TokenLoss(OFF_POLICY, {}, importance_sampling),
    "ppo": TokenLoss(OFF_POLICY, CLIP, ppo),
    "cispo": TokenLoss(OFF_POLICY, CLIP, cispo),
    "gspo": TokenLoss((*OFF_POLICY, "sequence_ratio_mask"), CLIP, gspo),
    "dro": TokenLoss(OFF_POLICY, {"beta": 0.05}, dro),
}
