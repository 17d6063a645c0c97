"""What a batch makes of episodes: samples of their branches, statistics by member, metrics."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bridge.generation import Completion, GenerationRequest
from engine.batch.batch import SampleTable
from megasync.config.schema import Config
from megasync.data.data import Example
from megasync.episodes.record import Asked, recorded
from megasync.episodes.segments import Branch, Recorder, Turn
from megasync.episodes.task import EpisodeResult
from megasync.episodes.exchange import EpisodeEnd
from megasync.rewards.functions import token_count
from megasync.rewards.pool import Scored, reward_metrics
from megasync.workers.failure import Failure
from megasync.rollouts.group import Group
from megasync.rollouts.turns import EpisodeSettings, Episodes
from megasync.rollouts.requests import reward_inputs
from megasync.rollouts.metrics import batch_metrics, episode_metrics, learnt_rewards, tied_fraction
from megasync.rollouts.samples import members_of, samples_of

PROMPT = (1, 2, 3)


def turn(length: int, version: int) -> Turn:
    return Turn([7] * length, [-0.5] * length, [version] * length)


def branches() -> tuple[Branch, ...]:
    """Of two turns and a third one that has forgotten the second: two branches, the first turn in the first one alone."""
    recorder = Recorder()
    recorder.add(PROMPT, turn(2, 4))
    recorder.add([*PROMPT, 7, 7, 9], turn(3, 5))
    recorder.add([*PROMPT, 7, 7, 8, 8], turn(1, 6))
    return tuple(recorder.branches())


def group() -> Group:
    made = Group(0, GenerationRequest(PROMPT, num_samples=4))
    first = EpisodeResult(branches(), 1.0, num_turns=3, seconds=4.0, tool_seconds=1.0, metrics={"calls": 2.0})
    arrays = np.full(3, 7, np.int32), np.full(3, -0.5, np.float32), np.full(3, 5, np.int32)
    dropped = EpisodeResult(reward=0.0, is_dropped=True, num_failures=1, finish_reason="length")
    failed = EpisodeResult(reward=0.0, num_failures=1, finish_reason="length", seconds=1.0, tool_seconds=1.0)
    for member, done in enumerate((first, Completion(*arrays, "stop"), dropped, failed)):
        made.complete(member, done)
        made.scored[member] = Scored(1.0 if member == 0 else 0.0, {})
    return made


def test_branches_become_samples_of_one_member() -> None:
    samples = samples_of(group(), 5)
    assert [(sample.member, sample.reward) for sample in samples] == [(0, 1.0), (0, 1.0), (1, 0.0), (3, 0.0)]
    assert {sample.group for sample in samples} == {5}
    assert [[len(sample.prompt_ids), sample.num_sampled] for sample in samples] == [[3, 5], [7, 1], [3, 3], [3, 0]]
    assert samples[0].is_sampled.tolist() == [True, True, False, True, True, True] and not len(samples[1].is_sampled)
    assert SampleTable.from_samples(samples).members.tolist() == [0, 0, 1, 2]
    assert [len(member) for member in members_of(samples)] == [2, 1, 1]


def of_turns(rewards: Sequence[float], numbers: Sequence[int] = (0, 1, 2)) -> EpisodeResult:
    """The episode of `branches`, whose requests had these numbers, and ended in another order."""
    prompts = PROMPT, [*PROMPT, 7, 7, 9], [*PROMPT, 7, 7, 8, 8]
    turns = zip(numbers, prompts, (turn(2, 4), turn(3, 5), turn(1, 6)), strict=True)
    made, records = recorded((Asked(number, 0, 8, ()), prompt, one) for number, prompt, one in turns)
    return EpisodeResult(made, 1.0, num_turns=3, turns=records, turn_rewards=tuple(rewards))


def test_samples_have_the_turns_of_their_tokens_and_what_these_got() -> None:
    """In the order of requests, whichever ended first; without rewards of turns the last one has the reward."""
    made = Group(0, GenerationRequest(PROMPT, num_samples=3), credits_turns=True)
    played = [of_turns((0.5, 0.25, 0.25)), of_turns((), (0, 4, 2)), EpisodeResult(reward=0.0, num_failures=1)]
    for member, done in enumerate(played):
        made.complete(member, done)
        made.scored[member] = Scored(0.0 if member == 2 else 1.0, {})
    samples = samples_of(made, 0)
    returns = [*[(1.0, 0.5, 0.25)] * 2, *[(1.0, 1.0, 1.0)] * 2, (0.0,)]
    assert [sample.turn_returns for sample in samples] == returns
    spans = [[(0, 0, 2), (1, 3, 3)], [(2, 0, 1)], [(0, 0, 2), (2, 3, 3)], [(1, 0, 1)], []]
    assert [list(sample.turn_spans) for sample in samples] == spans
    made.credits_turns = False
    assert all(not len(sample.turn_returns) and not len(sample.turn_spans) for sample in samples_of(made, 0))


def test_a_group_of_equal_rewards_is_worth_training_where_its_turns_differ() -> None:
    """As the metric counts it."""
    for rewards, differs in (((0.5, 0.25, 0.25), True), ((0.0, 0.0, 1.0), False), ((), False)):
        made = Group(0, GenerationRequest(PROMPT, num_samples=2), credits_turns=True)
        for member, own in enumerate((rewards, ())):
            made.complete(member, of_turns(own))
            made.scored[member] = Scored(1.0, {})
        config = Config.model_validate({"algorithm": {"credit": "turn"}})
        assert made.is_worth_training == differs
        assert tied_fraction(learnt_rewards(config, samples_of(made, 0))) == 1 - differs
        made.credits_turns = False
        assert not made.is_worth_training and tied_fraction(learnt_rewards(Config(), samples_of(made, 0))) == 1


def test_metrics_count_members_and_sampled_tokens() -> None:
    found = batch_metrics(samples_of(group(), 0), 6, 2.0, 0.0)
    assert found["reward/mean"] == pytest.approx(1 / 3) and found["response/tokens_mean"] == 3
    assert found["response/truncated_fraction"] == pytest.approx(1 / 3)
    assert found["staleness/max"] == 2 and found["staleness/mean"] == pytest.approx((2 * 2 + 3 * 1 + 0 + 3 * 1) / 9)
    played = [done for done in group().completions if isinstance(done, EpisodeResult)]
    of_episodes = episode_metrics(played)
    assert (of_episodes["episode/turns_mean"], of_episodes["episode/branches"]) == (1.0, pytest.approx(2 / 3))
    assert of_episodes["episode/given_tokens"] == pytest.approx(1 / 3) and of_episodes["episode/sampled_tokens"] == 2
    assert of_episodes["episode/failures"] == 2 and of_episodes["episode/dropped"] == 1 and of_episodes["episode/calls"] == 2
    assert of_episodes["episode/tool_share"] == pytest.approx(2 / 5)
    assert episode_metrics([]) == {}


def test_a_metric_of_an_episode_hides_none_of_ours() -> None:
    found = episode_metrics([EpisodeResult(num_turns=3, metrics={"turns_mean": 7.0, "failures": 2.0, "tools/calls": 1.0})])
    assert (found["episode/turns_mean"], found["episode/turns_mean_returned"]) == (3.0, 7.0)
    assert (found["episode/failures"], found["episode/failures_returned"], found["episode/tools/calls"]) == (0.0, 2.0, 1.0)


def test_rewards_that_have_a_name_are_means_over_what_they_scored() -> None:
    """Beside episodes that say themselves what they are worth."""
    by_rewards = [Scored(1.5, {"a": 1.0, "b": 0.5}), Scored(0.0, {"a": 0.0, "b": 0.0}, ("b",))]
    found = reward_metrics([Scored(0.25, {}), *by_rewards, Scored(1.0, {})])
    assert found == {"reward/a": 0.5, "reward/b": 0.25, "reward/failures": 1.0}
    assert reward_metrics([Scored(0.25, {})]) == {"reward/failures": 0.0}


def test_a_reward_is_reported_the_length_of_the_turn_that_it_scores() -> None:
    """Of at most `rollout.max_new_tokens`: it gets the text of the last turn."""
    turns = [(Asked(number, 0, 3, ()), PROMPT, turn(length, 0)) for number, length in enumerate((3, 3, 2))]
    made, records = recorded(turns)
    (asked,) = reward_inputs(Example("1+1=", "2", 1), [EpisodeResult(made, turns=records)], ["2"], 3)
    assert (asked.num_tokens, asked.max_tokens, token_count(asked)) == (2, 3, pytest.approx(2 / 3))


def test_a_dropped_member_has_no_part_in_its_group() -> None:
    made = group()
    assert made.own_rewards == [1.0, 0.0, 0.0] and made.is_done
    assert made.oldest == 4


def test_the_last_turn_may_be_of_the_first_branch() -> None:
    """A sub-agent has begun another one meanwhile; and a turn may go on from another without a token between them."""
    prompts = [1, 2], [5, 6], [1, 2, 10, 11, 3], [1, 2, 10, 11, 3, 30, 31]
    sampled = [10, 11], [20], [30, 31], [40]
    turns = [
        (Asked(number, 0, 8, ()), prompt, Turn(ids, [-0.5] * len(ids), [1] * len(ids)))
        for number, (prompt, ids) in enumerate(zip(prompts, sampled, strict=True))
    ]
    for number, ids in enumerate(sampled, start=1):
        made, records = recorded(turns[:number])
        assert EpisodeResult(made, turns=records).final_ids == ids
    assert len(made) == 2 and EpisodeResult().final_ids == []


def test_failures_are_logged_by_their_kind(caplog: pytest.LogCaptureFixture) -> None:
    """Many of one kind hide none of another, and the last logged one says that others are counted."""
    nothing: Any = SimpleNamespace()
    episodes = Episodes(nothing, EpisodeSettings(1, 10, "zero"), nothing)
    attempt: Any = SimpleNamespace(group=SimpleNamespace(key=1, task=SimpleNamespace(prompt="1+1=")), waited_seconds=0.0)
    for what in [*["raised KeyError: 'x'"] * 5, "returned nan, a finite number is expected"]:
        episodes._after_failure(attempt, EpisodeEnd(failure=Failure(what)), 1)
    logged = [record.getMessage().splitlines()[0] for record in caplog.records]
    counted = "zero, others of this kind are only counted: an episode raised KeyError: 'x'"
    assert logged[:2] == ["zero: an episode raised KeyError: 'x'"] * 2 and logged[2] == counted
    assert logged[3:] == ["zero: an episode returned nan, a finite number is expected"]
