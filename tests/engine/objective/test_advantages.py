"""Rewards become advantages: baselines, the penalty for overlong responses, groups that teach nothing. Beside plain loops."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from engine.objective.advantages import (
    group_advantages,
    is_group_worth_training,
    overlong_penalty,
    penalised_rewards,
    turn_advantages,
)

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
        assert is_group_worth_training([[reward] for reward in group]) == any(abs(value) > 1e-12 for value in values)
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


VALUE = st.sampled_from([0.0, 0.1, 0.3, 1.0, -0.7])
# groups of members, each with the rewards of its turns
played = st.lists(st.lists(st.lists(VALUE, min_size=1, max_size=4), min_size=1, max_size=5), min_size=1, max_size=3)
BASELINES = st.sampled_from(["group_mean", "leave_one_out"])


def turns_of(groups: list[list[list[float]]]) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """Total rewards, the rewards before each turn, and groups."""
    members = [(number, member) for number, group in enumerate(groups) for member in group]
    earlier = np.full((len(members), max(len(member) for _, member in members)), math.nan)
    for row, (_, member) in zip(earlier, members, strict=True):
        row[: len(member)] = [math.fsum(member[:turn]) for turn in range(len(member))]
    return np.array([math.fsum(member) for _, member in members]), earlier, [number for number, _ in members]


def centred(values: list[float], baseline: str) -> list[float]:
    scale = len(values) / (len(values) - 1) if baseline == "leave_one_out" and len(values) > 1 else 1.0
    return [(value - sum(values) / len(values)) * scale for value in values]


@settings(deadline=None, max_examples=100)
@given(played, st.booleans(), BASELINES)
def test_advantages_of_turns_are_those_of_plain_loops(groups: list[list[list[float]]], by_std: bool, baseline: str) -> None:
    found, row = turn_advantages(*turns_of(groups), by_std, baseline), 0
    for group in groups:
        totals, compared = [sum(member) for member in group], [[sum(member) for member in group]]
        wanted = [[total] * len(member) for total, member in zip(centred(totals, baseline), group, strict=True)]
        for turn in range(found.shape[1]):
            who = [index for index, member in enumerate(group) if turn < len(member)]
            compared.append([sum(group[index][:turn]) for index in who])
            for index, value in zip(who, centred(compared[-1], baseline) if who else [], strict=True):
                wanted[index][turn] -= value
        divisor = max(float(np.std(values, ddof=1)) if len(values) > 1 else 0.0 for values in compared) + 1e-6 if by_std else 1.0
        for own in wanted:
            assert found[row, : len(own)].tolist() == pytest.approx([value / divisor for value in own], rel=1e-6, abs=1e-9)
            assert not found[row, len(own) :].any()
            assert not by_std or abs(found[row]).max() <= 2 * len(group) ** 0.5 + 1e-9
            row += 1


@settings(deadline=None, max_examples=100)
@given(played, st.booleans(), BASELINES)
def test_rewards_of_last_turns_are_the_episodes(groups: list[list[list[float]]], by_std: bool, baseline: str) -> None:
    """Bit for bit, in each turn, however long the episodes are."""
    made = [[[*[0.0] * (len(member) - 1), member[-1]] for member in group] for group in groups]
    totals, earlier, numbers = turns_of(made)
    found = turn_advantages(totals, earlier, numbers, by_std, baseline)
    wanted = group_advantages(totals, numbers, by_std, baseline)
    for own, before, value in zip(found, earlier, wanted, strict=True):
        assert own[~np.isnan(before)].tolist() == [value] * int((~np.isnan(before)).sum())


@settings(deadline=None, max_examples=50)
@given(played, st.integers(2, 4), st.booleans(), BASELINES)
def test_rewards_of_the_first_turn_are_its_own(
    groups: list[list[list[float]]], num_turns: int, by_std: bool, baseline: str
) -> None:
    """Bit for bit what the episode's would be; later turns did not get them."""
    made = [[[member[0], *[0.0] * (num_turns - 1)] for member in group] for group in groups]
    totals, earlier, numbers = turns_of(made)
    found = turn_advantages(totals, earlier, numbers, by_std, baseline)
    assert found[:, 0].tolist() == group_advantages(totals, numbers, by_std, baseline) and not found[:, 1:].any()


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 4), st.data(), BASELINES)
def test_in_episodes_of_one_length_a_turn_has_the_rewards_from_it_on(num_turns: int, data: st.DataObject, baseline: str) -> None:
    group = data.draw(st.lists(st.lists(VALUE, min_size=num_turns, max_size=num_turns), min_size=1, max_size=5))
    found = turn_advantages(*turns_of([group]), by_std=False, baseline=baseline)
    for turn in range(num_turns):
        assert found[:, turn].tolist() == pytest.approx(centred([sum(member[turn:]) for member in group], baseline), abs=1e-9)


@settings(deadline=None, max_examples=100)
@given(st.lists(st.lists(VALUE, min_size=1, max_size=4), min_size=1, max_size=5))
def test_a_group_is_worth_training_where_any_turn_has_an_advantage(group: list[list[float]]) -> None:
    """Also one whose total rewards are equal."""
    returns = [[math.fsum(member[turn:]) for turn in range(len(member))] for member in group]
    values = turn_advantages(*turns_of([group]), by_std=False)
    assert is_group_worth_training(returns) == bool((abs(values) > 1e-9).any())
    assert is_group_worth_training([[1.0, 1.0], [1.0, 0.0]]) and not is_group_worth_training([[1.0], [1.0, 1.0, 1.0]])
