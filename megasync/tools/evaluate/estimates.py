"""Means over prompts with their 95 % confidence intervals.

The interval is the normal one of the central limit theorem, over prompts and not over samples, since samples of one prompt are
alike (E. Miller, Adding Error Bars to Evals, arXiv:2411.00640, sections 2.1 and 2.2). It is for some dozen prompts or more; where
all prompts have one value its width is 0.

    estimate([1.0, 0.0, 1.0, 1.0])      # Estimate(mean=0.75, low=0.26, high=1.24, num_prompts=4)
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from megasync.rollouts.evaluation import pass_at_k, standard_error

Z = statistics.NormalDist().inv_cdf(0.975)


@dataclass(frozen=True)
class Estimate:
    """`low` and `high` are None for one prompt alone."""

    mean: float
    low: float | None
    high: float | None
    num_prompts: int

    def __str__(self) -> str:
        return f"{self.mean:.4f}" if self.low is None else f"{self.mean:.4f}  [{self.low:.4f}, {self.high:.4f}]"


def estimate(values: Sequence[float]) -> Estimate:
    """The estimate from one value a prompt, at least one."""
    mean = statistics.fmean(values)
    if len(values) == 1:
        return Estimate(mean, None, None, 1)
    half = Z * standard_error(values)
    return Estimate(mean, mean - half, mean + half, len(values))


def estimates(rewards: Sequence[Sequence[float]], pass_reward: float) -> dict[str, Estimate]:
    """avg@n of the n samples of every prompt, and pass@k for k = n and the powers of two below it."""
    num_samples = len(rewards[0])
    passed = [sum(reward >= pass_reward for reward in group) for group in rewards]
    found = {f"avg@{num_samples}": estimate([statistics.fmean(group) for group in rewards])}
    for k in sorted({2**power for power in range(num_samples.bit_length()) if 2**power < num_samples} | {num_samples}):
        found[f"pass@{k}"] = estimate([pass_at_k(num_samples, count, k) for count in passed])
    return found
