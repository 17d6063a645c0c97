"""Rewards become advantages: DAPO's penalty for overlong responses, baselines within a group, groups that teach nothing.

Leaves out the rewards themselves (the rollouts') and the use of advantages (loss.py). Plain functions of numbers.
"""

from __future__ import annotations

from collections.abc import Sequence


def is_group_worth_training(rewards: Sequence[float]) -> bool:
    """Whether the rewards of a prompt's samples differ: else every advantage is 0 (dynamic sampling, DAPO, arXiv:2503.14476)."""
    return any(reward != rewards[0] for reward in rewards)


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
            centred = centred / (values.std(unbiased=len(indices) > 1) + 1e-6)
        for index, value in zip(indices, centred.tolist(), strict=True):
            result[index] = value
    return result
