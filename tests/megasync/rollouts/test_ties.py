"""Which groups teach nothing, and when that is said."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.objective.advantages import group_advantages
from engine.sample import Sample
from megasync.config.schema import Config
from megasync.rollouts.metrics import PATIENCE, UniformRewardMonitor, learnt_rewards, tied_fraction

REWARD = st.sampled_from([0.0, 0.25, 1.0])


@settings(deadline=None)
@given(st.lists(st.lists(REWARD, min_size=2, max_size=4), min_size=1, max_size=6))
def test_a_tied_group_is_one_without_advantages(groups: list[list[float]]) -> None:
    rewards = [reward for group in groups for reward in group]
    places = [place for place, group in enumerate(groups) for _ in group]
    advantages = group_advantages(rewards, places, by_std=False)
    taught = {place for place, advantage in zip(places, advantages, strict=True) if advantage}
    returns = [[[reward] for reward in group] for group in groups]
    assert tied_fraction(returns) == (len(groups) - len(taught)) / len(groups)


@given(st.lists(st.sampled_from([0.5, 1.0]), max_size=20))
def test_it_is_said_once_for_each_time_that_nothing_is_learnt(fractions: list[float]) -> None:
    watch = UniformRewardMonitor()
    said = [step for step, fraction in enumerate(fractions, start=1) if watch.observe(step, fraction, [0.0, 0.0])]
    tied = [fraction == 1 for fraction in fractions]
    runs = [step for step in range(PATIENCE, len(tied) + 1) if all(tied[step - PATIENCE : step])]
    assert said == [step for step in runs if step - PATIENCE == 0 or not tied[step - PATIENCE - 1]]


def test_what_is_said_depends_on_the_rewards() -> None:
    same, different = UniformRewardMonitor(), UniformRewardMonitor()
    for step in range(1, PATIENCE + 1):
        all_zero, by_group = same.observe(step, 1.0, [0.0, 0.0]), different.observe(step, 1.0, [0.0, 1.0])
    assert "since step 1: every reward of step 3 is 0" in all_zero and "samples.jsonl" in all_zero
    assert "within each group" in by_group and "Raise rollout.temperature" in by_group
    assert all("algorithm.filter_groups=true" in hint for hint in (all_zero, by_group))


def test_what_the_config_has_already_is_not_advised() -> None:
    watch = UniformRewardMonitor(filters_groups=True)
    hints = [watch.observe(step, 1.0, [0.0, 0.0]) for step in range(1, PATIENCE + 1)]
    assert "nothing is learnt" in hints[-1] and "algorithm.filter_groups=true" not in hints[-1]


def test_a_penalty_unties_a_group() -> None:
    """Rewards are compared as the advantages are made of them."""
    prompt, places = np.zeros(2, np.int32), ((0, 1), (0, 8), (1, 2), (1, 3))
    samples = [Sample(prompt, np.zeros(length, np.int32), reward=1.0, group=group) for group, length in places]
    assert tied_fraction(learnt_rewards(Config(), samples)) == 1
    algorithm = {"truncated": "penalise", "overlong_buffer": 4}
    penalised = Config.model_validate({"algorithm": algorithm, "rollout": {"max_new_tokens": 8}})
    assert learnt_rewards(penalised, samples) == [[[1.0], [0.0]], [[1.0], [1.0]]]
