"""Rewards become advantages: baselines, the penalty for overlong responses, groups that teach nothing. Beside plain loops."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from engine.objective.advantages import group_advantages, is_group_worth_training, overlong_penalty, penalised_rewards

rewards = st.lists(st.sampled_from([0.0, 0.25, 1.0, -0.5]), min_size=1, max_size=8)


@settings(deadline=None, max_examples=100)
@given(st.lists(rewards, min_size=1, max_size=4), st.booleans())
def test_advantages_are_those_of_plain_loops(groups: list[list[float]], by_std: bool) -> None:
    flat = [(reward, number) for number, group in enumerate(groups) for reward in group]
    found = {
        baseline: group_advantages([reward for reward, _ in flat], [number for _, number in flat], by_std, baseline)
        for baseline in ("group_mean", "leave_one_out")
    }
    index = 0
    for group in groups:
        size, mean = len(group), sum(group) / len(group)
        divisor = math.sqrt(sum((reward - mean) ** 2 for reward in group) / max(size - 1, 1)) + 1e-6 if by_std else 1.0
        for place, reward in enumerate(group):
            others = group[:place] + group[place + 1 :]
            left_out = (reward - sum(others) / len(others)) / divisor if others else 0.0
            assert found["group_mean"][index] == pytest.approx((reward - mean) / divisor, abs=1e-9)
            assert found["leave_one_out"][index] == pytest.approx(left_out, abs=1e-9)
            scaled = found["group_mean"][index] * (size / (size - 1) if size > 1 else 1)
            assert found["leave_one_out"][index] == pytest.approx(scaled, abs=1e-9)
            index += 1


@settings(deadline=None, max_examples=100)
@given(rewards)
def test_a_group_is_worth_training_where_any_advantage_is_not_zero(group: list[float]) -> None:
    for baseline in ("group_mean", "leave_one_out"):
        values = group_advantages(group, [0] * len(group), by_std=False, baseline=baseline)
        assert is_group_worth_training(group) == any(abs(value) > 1e-12 for value in values)
    assert not is_group_worth_training([])


@settings(deadline=None, max_examples=200)
@given(st.integers(2, 100), st.data())
def test_overlong_penalty_is_that_of_its_equation(longest: int, data: st.DataObject) -> None:
    """DAPO's eq. 13, its three cases as they are printed; it never rises with the length."""
    buffer, length = data.draw(st.integers(1, longest - 1)), data.draw(st.integers(0, 2 * longest))
    if length <= longest - buffer:
        expected = 0.0
    elif length <= longest:
        expected = ((longest - buffer) - length) / buffer
    else:
        expected = -1.0
    assert overlong_penalty(length, longest, buffer) == pytest.approx(expected)
    assert overlong_penalty(length + 1, longest, buffer) <= overlong_penalty(length, longest, buffer)
    assert overlong_penalty(longest, longest, buffer) == -1


def test_penalised_rewards_of_short_responses_are_the_rewards() -> None:
    assert penalised_rewards([1.0, 1.0, 0.0, 0.5], [3, 8, 9, 10], max_new_tokens=10, buffer=4) == [1.0, 0.5, -0.75, -0.5]
