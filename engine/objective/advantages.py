"""Rewards become advantages: DAPO's penalty for overlong responses, baselines within a group, groups that teach nothing.

A function of your own has the signature of those in ADVANTAGES (docs/your_own.md). Leaves out the rewards themselves (the
rollouts') and the use of advantages (loss.py). Plain functions of numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from math import comb
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

    from engine.algorithm import AlgorithmConfig

Numbers = npt.NDArray[np.float64]
EPSILON = 1e-6  # added to standard deviations
ROUNDING = 1e-9  # largest difference of equal sums of rewards


@dataclass(frozen=True, kw_only=True)
class AdvantageInput:
    """A batch of n responses; of an episode all branches are one. Every trainer rank has the same."""

    rewards: Numbers  # [n], weighted sums, with penalties for length and KL
    groups: npt.NDArray[np.int64]  # [n], responses of a prompt share it
    lengths: npt.NDArray[np.int64]  # [n], sampled tokens
    config: AlgorithmConfig
    # [n, k]: of each of k rewards, without its weight, where there are several; NaN where a reward does not score the sample's
    # source, or an episode gave the sum alone
    parts: Numbers = field(default_factory=lambda: np.empty((0, 0)))
    part_weights: Sequence[float] = ()  # k
    greedy_rewards: Numbers = field(default_factory=lambda: np.empty(0))  # [n], of each prompt's greedy response; NaN: none

    def by_group(self, function: Callable[[Numbers], Numbers], values: Numbers | None = None) -> Numbers:
        """`function` of each group's values, by default its rewards, at their places; float64 [n]."""
        values = self.rewards if values is None else values
        result = np.zeros(len(values))
        for group in np.unique(self.groups):
            is_own = self.groups == group
            result[is_own] = function(values[is_own])
        return result


AdvantageFunction = Callable[[AdvantageInput], Any]  # n finite numbers: a list, or an array or a tensor [n]


def is_group_worth_training(returns: Sequence[Sequence[float]]) -> bool:
    """Whether any advantage of a prompt's samples is not 0 (dynamic sampling, DAPO, arXiv:2503.14476).

    Args:
        returns: of each sample its reward alone or, with `algorithm.credit=turn`, of each turn the rewards of it and later ones.
    """
    if any(own[0] != returns[0][0] for own in returns):
        return True
    earlier = zip_longest(*([own[0] - later for later in own] for own in returns), fillvalue=math.nan)
    spread = [max(own) - min(own) for column in earlier if (own := [value for value in column if not math.isnan(value)])]
    return max(spread, default=0.0) > ROUNDING


def overlong_penalty(num_tokens: int, max_new_tokens: int, buffer: int) -> float:
    """The penalty for a response's length, added to its reward, from -1 to 0 (DAPO, arXiv:2503.14476, eq. 13).

    0 up to `max_new_tokens - buffer` response tokens, from there on falling to -1 at `max_new_tokens`; -1 beyond.
    """
    over = num_tokens - (max_new_tokens - buffer)
    return -min(max(over, 0) / buffer, 1.0)


def penalised_rewards(rewards: Sequence[float], lengths: Sequence[int], max_new_tokens: int, buffer: int) -> list[float]:
    """Each reward with the penalty for its response's length, in tokens."""
    return [reward + overlong_penalty(length, max_new_tokens, buffer) for reward, length in zip(rewards, lengths, strict=True)]


def group_advantages(rewards: Sequence[float], groups: Sequence[int], by_std: bool, baseline: str = "group_mean") -> list[float]:
    """(reward - baseline), divided by the group's standard deviation + 1e-6 if `by_std`.

    The standard deviation is that of a sample, with n - 1 in the denominator, as in verl and TRL (torch.std's default).

    The baseline `group_mean` is the mean of the group (GRPO, arXiv:2402.03300), `leave_one_out` the mean of the group's other
    samples (RLOO, arXiv:2402.14740), which is (reward - mean of the group) * n / (n - 1).

    A group whose rewards are all equal gets zeros, and so does a group of one. Invariant: each group's advantages sum to 0 up
    to rounding.
    """
    import torch

    members: dict[int, list[int]] = {}
    for index, group in enumerate(groups):
        members.setdefault(group, []).append(index)
    result = [0.0] * len(rewards)
    for indices in members.values():
        values = torch.tensor([rewards[i] for i in indices], dtype=torch.float64)
        centred = values - values.mean()
        if baseline == "leave_one_out" and len(indices) > 1:
            centred = centred * (len(indices) / (len(indices) - 1))
        if by_std:
            centred = centred / (_deviation(values) + EPSILON)
        for index, value in zip(indices, centred.tolist(), strict=True):
            result[index] = value
    return result


def _deviation(values: torch.Tensor) -> torch.Tensor:
    """The standard deviation of a sample; 0 for a single value."""
    return values.std(unbiased=len(values) > 1)


def turn_advantages(
    totals: Numbers, earlier: Numbers, groups: Sequence[int], by_std: bool, baseline: str = "group_mean"
) -> Numbers:
    """Advantages of each turn, float64 [n, turns]: that of the member's total reward, less that of its rewards before the turn.

    What was rewarded before a turn is compared among the group's members that have such a turn. With `by_std` a group is divided
    by the largest standard deviation of both, since the totals may be equal. Invariants: rewards in last turns alone give all
    turns the `group_advantages` of the totals, however long the episodes are; in episodes of one length each turn is compared by
    the rewards of it and of later ones.

    Args:
        totals: float64 [n].
        earlier: float64 [n, turns], the sum of the rewards before each turn; NaN where a member has no such turn.
    """
    import torch

    of_totals = np.array(group_advantages(totals.tolist(), groups, by_std=False, baseline=baseline))
    found = np.repeat(of_totals[:, None], earlier.shape[1], axis=1)
    numbers = np.asarray(groups)
    scales = {group: [totals[numbers == group]] for group in set(groups)}
    for turn, column in enumerate(earlier.T):
        has_turn = ~np.isnan(column)
        own = numbers[has_turn].tolist()
        found[has_turn, turn] -= group_advantages(column[has_turn].tolist(), own, by_std=False, baseline=baseline)
        found[~has_turn, turn] = 0.0
        for group in set(own):
            scales[group].append(column[has_turn & (numbers == group)])
    for group, values in scales.items() if by_std else ():
        found[numbers == group] /= max(_deviation(torch.from_numpy(each)).item() for each in values) + EPSILON
    return found


def group(batch: AdvantageInput) -> list[float]:
    """`group_advantages` with the keys of the config."""
    config = batch.config
    rewards, groups = batch.rewards.tolist(), batch.groups.tolist()
    return group_advantages(rewards, groups, config.normalize_advantage_by_std, config.baseline)


def reinforce_plus_plus(batch: AdvantageInput) -> Numbers:
    """Rewards less the batch's mean, by the batch's standard deviation (REINFORCE++, arXiv:2501.03262)."""
    return whitened(batch.rewards)


def reinforce_plus_plus_baseline(batch: AdvantageInput) -> Numbers:
    """Rewards less the group's mean, by the batch's standard deviation (REINFORCE++-baseline, arXiv:2501.03262)."""
    return whitened(batch.by_group(lambda rewards: rewards - rewards.mean()))


def remax(batch: AdvantageInput) -> Numbers:
    """Rewards less that of the prompt's greedy response (ReMax, arXiv:2310.10505)."""
    return batch.rewards - batch.greedy_rewards


def pass_at_k(batch: AdvantageInput) -> Numbers:
    """The share of `pass_k`-subsets of a group that have a right response, as the reward (arXiv:2508.10751, eq. 14 and 15).

    A reward above 0.5 counts as right. A group of fewer than `pass_k` responses is taken with k = its size.
    """
    return batch.by_group(lambda rewards: _pass_at_k(rewards > 0.5, batch.config.pass_k))


def _pass_at_k(is_right: npt.NDArray[np.bool_], most: int) -> Numbers:
    number, wrong = len(is_right), int((~is_right).sum())
    k = min(most, number)
    fails = comb(wrong, k) / comb(number, k)
    deviation = (fails * (1 - fails)) ** 0.5
    if deviation == 0:
        return np.zeros(number)
    fails_with_wrong = comb(wrong - 1, k - 1) / comb(number - 1, k - 1)
    found: Numbers = np.where(is_right, fails, fails - fails_with_wrong) / deviation
    return found


def gdpo(batch: AdvantageInput) -> Numbers:
    """Each reward is normalised within the group, the weighted sum over the batch (GDPO, arXiv:2601.05242).

    Raises:
        ValueError: samples have no `reward_parts`.
    """
    if not batch.parts.size:
        raise ValueError("algorithm.advantage = gdpo: samples have no reward_parts")
    columns = [batch.by_group(whitened, column) for column in batch.parts.T]
    return whitened(np.sum([weight * column for weight, column in zip(batch.part_weights, columns, strict=True)], axis=0))


def whitened(values: Numbers) -> Numbers:
    """Less the mean, by the standard deviation of a sample; 0 for a single value or equal ones."""
    deviation = values.std(ddof=1) if len(values) > 1 else 0.0
    found: Numbers = (values - values.mean()) / (deviation + EPSILON)
    return found


ADVANTAGES: dict[str, AdvantageFunction] = {
    "group": group,
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    "remax": remax,
    "pass_at_k": pass_at_k,
    "gdpo": gdpo,
}


def checked_advantages(found: Any, number: int) -> Numbers:
    """The result of an advantage function, checked, as float64 [number].

    Raises:
        ValueError: it has another shape, or a number that is not finite.
    """
    values = np.asarray(found.tolist() if hasattr(found, "tolist") else found)
    if values.dtype.kind not in "fiub":
        raise ValueError(f"returned {type(found).__name__}, not {number} numbers")
    if values.shape != (number,):
        raise ValueError(f"returned shape {list(values.shape)}, not [{number}], one number a response")
    if not np.isfinite(values).all():
        raise ValueError(f"returned {values[~np.isfinite(values)][0]} for response {int(np.argmin(np.isfinite(values)))}")
    return values.astype(np.float64)
