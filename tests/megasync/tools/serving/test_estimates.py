"""Means over prompts with their confidence intervals."""

from __future__ import annotations

import json
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megasync.tools.evaluate import command as evaluate
from megasync.rollouts.evaluation import pass_at_k, set_metrics
from megasync.tools.evaluate.estimates import Estimate, estimate, estimates

REWARDS = st.sampled_from([0.0, 0.5, 1.0])
GROUPS = st.integers(1, 8).flatmap(lambda size: st.lists(st.lists(REWARDS, min_size=size, max_size=size), min_size=1))


@given(GROUPS, st.sampled_from([0.5, 1.0]))
def test_means_are_those_of_the_runs_metrics(rewards: list[list[float]], pass_reward: float) -> None:
    found = {f"eval/x/{name}": each for name, each in estimates(rewards, pass_reward).items()}
    expected = set_metrics("x", rewards, pass_reward)
    assert found.keys() == expected.keys()
    for name, each in found.items():
        assert each.mean == pytest.approx(expected[name]) and each.num_prompts == len(rewards)
        assert (each.low is None) == (len(rewards) == 1)
        assert each.low is None or each.high is None or each.low <= each.mean <= each.high


@given(st.lists(st.floats(0, 1), min_size=2, max_size=30))
def test_the_interval_is_the_normal_one_and_four_times_the_prompts_halve_it(values: list[float]) -> None:
    one, four = estimate(values), estimate(values * 4)
    assert one.low is not None and one.high is not None and four.low is not None and four.high is not None
    assert one.high - one.mean == pytest.approx(one.mean - one.low)
    assert one.high - one.mean == pytest.approx(1.959964 * statistics.stdev(values) / len(values) ** 0.5, rel=1e-5)
    n = len(values)
    assert four.high - four.low == pytest.approx((one.high - one.low) / 2 * (4 * (n - 1) / (4 * n - 1)) ** 0.5, abs=1e-9)


def test_the_table_has_intervals() -> None:
    values = {"prompts": 4, "samples": 2, "temperature": 1.0, "truncated": 0.25, "failed": 0}
    rewards = [[1.0, 0.0], [1.0, 1.0], [0.0, 0.0], [0.0, 1.0]]
    metrics = {name: each.__dict__ for name, each in estimates(rewards, 1.0).items()}
    shown = evaluate.table({"weights": "runs/rl, step 3", "reward": "exact_match", "sets": {"sums": {**values, **metrics}}})
    assert "sums: 4 prompts, 2 samples each, temperature 1, 25.0% cut off" in shown
    assert "  avg@2    0.5000  [0.0999, 0.9001]" in shown and "  pass@2   0.7500  [0.2600, 1.2400]" in shown
    assert "failed" not in shown
    of_set = {**values, "failed": 3, **metrics}
    assert "  3 of 8 episodes failed" in evaluate.table({"weights": "m", "episode": "a:b", "sets": {"sums": of_set}})
    assert str(Estimate(0.5, None, None, 1)) == "0.5000"
    assert estimates(rewards, 1.0)["pass@2"].mean == statistics.fmean(pass_at_k(2, int(sum(group)), 2) for group in rewards)
    assert json.loads(json.dumps(metrics))["avg@2"]["num_prompts"] == 4
