"""Losses, advantages, filters, callbacks and loggers of the user's own: named in a config, tried, refused by key and shape."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from bridge.generation import Completion, GenerationRequest
from megasync.checks.own_functions import own_functions
from megasync.config.errors import ConfigError
from megasync.config.load import load_config
from megasync.config.schema import Config
from megasync.checks.check import check_config
from megasync.report.callbacks import StepResult, call_back, resolve_callbacks
from megasync.report.log import RunLog
from megasync.rewards.pool import Scored
from megasync.rollouts.filters import filter_input, resolve_filter
from megasync.rollouts.group import Group
from megasync.rollouts.requests import training_request, with_trainer_log_probs
from megasync.rollouts.samples import samples_of
from megasync.data.data import Example
from tests.support.config_files import refusal, write_runnable

OWN = """
import torch

NOTED = []

def loss(tokens): return -tokens.ratio() * tokens.advantages, {"kept": tokens.mask}
def summed(tokens): return (-tokens.ratio() * tokens.advantages).sum()
def no_number(tokens): return -tokens.log_probs * tokens.advantages / (tokens.advantages > 0)
def two(tokens, weights): return tokens.log_probs
def centred(batch): return batch.rewards - 0.5
def short(batch): return batch.rewards[:-1]
def some_right(group): return 0 < sum(group.rewards) < len(group.rewards)
def as_number(group): return 1
def note(result): NOTED.append((result.step, dict(result.metrics), result.folder))
def fails(result): raise KeyError("reward/best")
number = 3

class Log:
    def __init__(self, config, first_step): NOTED.append(("open", config.run.name, first_step))
    def metrics(self, step, values): NOTED.append((step, dict(values)))
    def samples(self, step, lines): NOTED.append((step, len(lines)))
    def close(self): NOTED.append("closed")

class NoSamples:
    def __init__(self, config, first_step): pass
    def metrics(self, step, values): pass
    def close(self): pass
"""


@pytest.fixture
def runnable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "own_of_test.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    yield write_runnable(tmp_path)
    sys.modules.pop("own_of_test", None)


OF_TURNS = ("rollout.episode=tests.support.episodes:Guess", "algorithm.credit=turn")
GOOD = (
    *("algorithm.loss=own_of_test:loss", "algorithm.advantage=own_of_test:centred", "rollout.filter=own_of_test:some_right"),
    *("run.callbacks=[own_of_test:note]", "run.loggers=[own_of_test:Log]"),
)


def test_functions_of_the_users_own_can_run(runnable: Path) -> None:
    """Beside keys that they may read and that no named one would."""
    config = load_config(runnable, [*GOOD, "algorithm.pass_k=3", "algorithm.dual_clip=3", "algorithm.filter_factor=2"])
    check_config(config, 2)
    own = own_functions(config)
    assert own.loss is not None and own.loss.__name__ == "loss" and own.advantage is not None
    assert own_functions(load_config(runnable, [])).loss is None


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("algorithm.loss=own_of_test:summed", "returned shape [], not [12], one number a token"),
        ("algorithm.loss=own_of_test:no_number", "inf at token"),
        ("algorithm.loss=own_of_test:two", "cannot be called with the tokens"),
        ("algorithm.loss=own_of_test:missing", "missing is not in"),
        ("algorithm.loss=own_of_test:number", "number is no function"),
        ("algorithm.loss=no_module_of_ours:loss", "cannot be imported"),
        ("algorithm.advantage=own_of_test:short", "returned shape [5], not [6]"),
        ("rollout.filter=own_of_test:as_number", "returned int 1, not a bool"),
        ("rollout.filter=own_of_test:two", "cannot be called with a FilterInput"),
        ("run.callbacks=own_of_test:two", "cannot be called with a StepResult"),
        ("run.loggers=own_of_test:NoSamples", "samples(step, lines)"),
        ("run.loggers=own_of_test:note", "cannot be called with config, first_step"),
    ],
)
def test_what_cannot_be_is_refused_by_name_and_shape(runnable: Path, override: str, words: str) -> None:
    error = refusal(runnable, override)
    key, _, value = override.partition("=")
    assert (error.key, error.value) == (key, value) and words in error.headline and error.remedy


@pytest.mark.parametrize(
    ("override", "example"),
    [
        ("algorithm.loss=cipso", "cispo"),
        ("algorithm.advantage=pass_at_k2", "pass_at_k"),
        ("run.loggers=[wandbb]", "wandb"),
        ("rollout.filter=close", "my_package.my_module:my_function"),
    ],
)
def test_names_that_there_are_not(runnable: Path, override: str, example: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(runnable, [override])
    error, key = caught.value, override.partition("=")[0]
    assert error.key == key and error.remedy == f"write for example {key}={example}"


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["algorithm.kl_coefficient=0.1", "algorithm.kl_estimator=k1"], "algorithm.kl_estimator"),
        (["algorithm.advantage=gdpo"], "algorithm.advantage"),
        (["algorithm.advantage=pass_at_k", "algorithm.pass_k=99"], "algorithm.pass_k"),
        (["algorithm.credit=turn"], "algorithm.credit"),
        ([*OF_TURNS, "algorithm.advantage=reinforce_plus_plus_baseline"], "algorithm.credit"),
        ([*OF_TURNS, "algorithm.advantage=own_of_test:centred"], "algorithm.credit"),
        ([*OF_TURNS, "teacher.version=start", "teacher.reward_weight=0"], "algorithm.credit"),
        (["algorithm.name=sft", "algorithm.credit=turn"], "algorithm.credit"),
    ],
)
def test_keys_that_do_not_go_together(runnable: Path, overrides: list[str], key: str) -> None:
    error = refusal(runnable, *overrides)
    assert error.key == key and error.remedy


def test_rewards_of_turns_are_learnt_from_where_episodes_have_them(runnable: Path) -> None:
    for more in ([], ["algorithm.preset=rloo"], ["teacher.version=start"], ["rollout.episode_max_turns=1"]):
        check_config(load_config(runnable, [*OF_TURNS, *more]), 2)


def test_groups_of_one_are_trained_where_the_baseline_is_not_the_groups(runnable: Path) -> None:
    for name in ("reinforce_plus_plus", "remax"):
        check_config(load_config(runnable, [f"algorithm.advantage={name}", "rollout.group_size=1"]), 2)
    assert refusal(runnable, "rollout.group_size=1").key == "rollout.group_size"


def test_callbacks_and_loggers_get_steps(runnable: Path) -> None:
    """And one that raises names itself."""
    config = load_config(runnable, [*GOOD, "run.progress=none"])
    log = RunLog(config, first_step=0, write=True)
    log.step(1, {"reward/mean": 0.5})
    log.samples(1, [{"prompt": "a", "response": "b"}])
    log.close()
    names = config.run.callbacks
    result = StepResult(1, {"reward/mean": 0.5}, config.run.folder, config)
    call_back(dict(zip(names, resolve_callbacks(names), strict=True)), result)
    noted = sys.modules["own_of_test"].NOTED
    assert noted == [
        ("open", config.run.name, 0), (1, {"reward/mean": 0.5}), (1, 1), "closed",
        (1, {"reward/mean": 0.5}, config.run.folder),
    ]  # fmt: skip
    with pytest.raises(RuntimeError, match=r"run.callbacks: own_of_test:fails raised KeyError"):
        call_back({"own_of_test:fails": resolve_callbacks(["own_of_test:fails"])[0]}, result)


PARTS = ("exact_match", "short", "of_another_source")


def group_of(rewards: list[float], *, greedy: bool, part_names: tuple[str, ...] = ()) -> Group:
    request = GenerationRequest(num_samples=len(rewards), prompt_ids=(1, 2), first_is_greedy=greedy)
    group = Group(0, request, part_names=part_names)
    for index, reward in enumerate(rewards):
        group.complete(index, Completion(np.arange(index + 1), np.zeros(index + 1), np.zeros(index + 1)))
        group.scored[index] = Scored(reward, {"exact_match": reward, "short": 0.5})
    return group


def test_a_filter_sees_what_would_be_trained(runnable: Path) -> None:
    """Not the greedy sample."""
    keep, example = resolve_filter("own_of_test:some_right"), Example("12+34=", "46", 1, extra={"level": 2}, source="sums")
    found = filter_input(group_of([1.0, 0.0, 0.0], greedy=True), example)
    assert found.rewards == (0.0, 0.0) and found.num_tokens == (2, 3) and found.extra == {"level": 2} and found.source == "sums"
    assert found.parts[0] == {"exact_match": 0.0, "short": 0.5}
    assert not keep(found) and keep(filter_input(group_of([0.0, 1.0, 0.0], greedy=True), example))


def test_a_line_of_a_refused_group_has_no_log_probs_of_the_trainer() -> None:
    for line in ({"response": "46"}, {"response": "46", "branches": [[{"tokens": 2}]]}):
        assert with_trainer_log_probs(line, []) == line


def test_the_greedy_sample_is_a_baseline_and_not_trained() -> None:
    group = group_of([0.25, 1.0, 0.0], greedy=True)
    assert group.own_rewards == [1.0, 0.0]
    samples = samples_of(group, 0)
    assert [(one.reward, one.greedy_reward, one.member) for one in samples] == [(1.0, 0.25, 0), (0.0, 0.25, 1)]
    assert all(np.isnan(one.greedy_reward) for one in samples_of(group_of([0.25, 1.0], greedy=False), 0))


def test_parts_of_rewards_reach_samples_where_the_advantage_needs_them() -> None:
    """A checkpoint has none: a resumed run scores such samples again."""
    group = group_of([1.0, 0.0], greedy=False, part_names=PARTS)
    found = [one.reward_parts for one in samples_of(group, 0)]
    assert [own[:2] for own in found] == [(1.0, 0.5), (0.0, 0.5)] and all(np.isnan(own[2]) for own in found)
    assert [one.reward_parts for one in samples_of(group_of([1.0], greedy=False), 0)] == [()]
    for part_names, is_known in ((PARTS, False), ((), True)):
        again = group_of([1.0, 0.0], greedy=False, part_names=part_names)
        again.scored = [None, None]
        again.restore(group.saved())
        assert again.is_done is is_known


def test_a_greedy_first_sample_is_asked_for(runnable: Path) -> None:
    class Prompts:
        stop_token_ids = (1,)

        def prompt_ids(self, example: Example) -> tuple[int, ...]:
            return (1, 2)

    def asked(*overrides: str) -> GenerationRequest:
        config: Config = load_config(runnable, overrides)
        return training_request(config, Prompts(), Example("a", "b", 1), 3)  # type: ignore[arg-type]

    plain, remax = asked("rollout.group_size=4"), asked("rollout.group_size=4", "algorithm.advantage=remax")
    assert (plain.num_samples, plain.first_is_greedy) == (4, False) and (remax.num_samples, remax.first_is_greedy) == (5, True)
    assert plain.seed == remax.seed
    assert plain.of_sample(0) is plain and [remax.of_sample(one).temperature for one in range(5)] == [0.0, 1.0, 1.0, 1.0, 1.0]
