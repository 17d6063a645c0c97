"""What the rewards give to the data's own answers before a run starts: real reward processes, real files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megasync.checks.own_answers import score_own_answers
from megasync.checks.preview import preview
from megasync.config.errors import ConfigError
from megasync.config.load import load_config
from megasync.data.load import load_data
from tests.support.tiny_models import write_tiny_model
from tests.support.config_files import command, write, write_runnable

REWARDS = '''
from megasync.rewards.functions import RewardInput

def boxed(sample: RewardInput) -> float:
    """A reward that wants more than the data's answers have."""
    return float(sample.response == f"\\\\boxed{{{sample.answer}}}")

def none(sample: RewardInput):
    return None

def ranks(samples: list[RewardInput]) -> list[float]:
    return [float(len(samples) == 2) for _ in samples]

def sees(sample: RewardInput) -> float:
    return {"0": 1.0, "1": 0.25}.get(sample.response, 0.5)
'''


@pytest.fixture
def runnable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write(tmp_path / "own_answers_rewards.py", REWARDS)
    monkeypatch.syspath_prepend(tmp_path)
    lines = [{"question": f"{number}+0=", "answer": str(number)} for number in range(6)]
    write(tmp_path / "numbers.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    return write_runnable(tmp_path)


def scores(runnable: Path, *overrides: str):
    data = f"data.train={runnable.parent / 'numbers.jsonl'}"
    config = load_config(runnable, [data, "data.batch_size=2", *overrides])
    return score_own_answers(config, load_data(config))


@pytest.mark.parametrize("reward", ["exact_match", "math_verify"])
def test_own_answers_are_worth_all(runnable: Path, reward: str) -> None:
    for of_set in scores(runnable, f"rollout.reward={reward}"):
        assert of_set.values == [1.0] * len(of_set.inputs)
        assert not of_set.below


def test_answers_below_the_best_come_with_the_least_first(runnable: Path) -> None:
    train = scores(runnable, "rollout.reward=own_answers_rewards:sees")[0]
    assert [(given.line, value) for value, given in train.below] == [(2, 0.25), (3, 0.5), (4, 0.5), (5, 0.5), (6, 0.5)]
    assert [given.response for _, given in train.below] == ["1", "2", "3", "4", "5"]
    assert len(train.lines()) == 4  # the counts, and three answers
    assert not train.is_wrong  # its scale is its own


def test_an_answer_of_several_files_is_named_with_its_file(runnable: Path) -> None:
    folder = runnable.parent / "shards"
    folder.mkdir()
    for number in range(2):
        lines = [{"question": f"{number}+{line}=", "answer": f"x{number}{line}"} for line in range(2)]
        write(folder / f"train-0000{number}-of-00002.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    reward = "rollout.reward=own_answers_rewards:boxed"
    train = scores(runnable, f"data.train={folder}", "data.split=train", reward)[0]
    places = [f"line {line} of train-0000{number}-of-00002.jsonl" for number in range(2) for line in (1, 2)]
    assert [given.place for given in train.inputs] == places and f"data {places[0]}: 0 for" in train.lines()[1]


def test_weights_and_rewards_that_ignore_the_text(runnable: Path) -> None:
    weighted = "rollout.reward={exact_match: 0.5, own_answers_rewards:boxed: 2, token_count: 1}"
    exact, boxed = scores(runnable, weighted)[:2]
    assert (exact.best, len(exact.below), exact.is_wrong) == (1.0, 0, False)
    assert (boxed.best, len(boxed.below), boxed.is_wrong) == (0.0, 6, True)
    assert scores(runnable, "rollout.reward=token_count") == []


def test_a_reward_of_a_group_gets_a_group(runnable: Path) -> None:
    assert not scores(runnable, "rollout.reward=own_answers_rewards:ranks", "rollout.group_size=2")[0].below


def test_a_stop_text_cuts_the_answer_where_vllm_would(runnable: Path) -> None:
    lines = [{"question": "1+0=", "answer": "1=1=1"}]
    write(runnable.parent / "numbers.jsonl", "".join(json.dumps(line) + "\n" for line in lines * 2))
    train = scores(runnable, 'rollout.stop=["="]')[0]
    assert [given.response for given in train.inputs] == ["1=", "1="]
    assert len(train.below) == 2 and train.is_wrong


def test_a_value_that_is_no_number_is_refused_before_a_run_starts(runnable: Path) -> None:
    with pytest.raises(ConfigError, match=r"own_answers_rewards:none returned None"):
        scores(runnable, "rollout.reward=own_answers_rewards:none")
    assert scores(runnable, "rollout.reward=own_answers_rewards:none", "rollout.reward_on_failure=zero")[0].below


@pytest.mark.parametrize(("answer", "is_noted"), [("2", True), ("1+1 is 2</think>2", False)])
def test_answers_within_the_thinking_of_their_prompts_are_noted(runnable: Path, answer: str, is_noted: bool) -> None:
    """As of a template whose prompts begin the thinking, and data without any."""
    lines = [{"question": "1+1=<think>", "answer": answer}]
    write(runnable.parent / "numbers.jsonl", json.dumps(lines[0]) + "\n")
    model = write_tiny_model(runnable.parent / "ascii", num_hidden_layers=1)
    overrides = [f"data.train={runnable.parent / 'numbers.jsonl'}", "data.batch_size=1", "algorithm.name=sft"]
    config = load_config(runnable, [*overrides, f"model.path={model}"])
    text = preview(config, load_data(config))
    assert ("data line 1: the prompt begins the thinking, and the answer does not end it" in text) == is_noted


def test_check_shows_prompts_stops_and_what_answers_are_worth(runnable: Path) -> None:
    config = load_config(runnable, [f"data.train={runnable.parent / 'numbers.jsonl'}", "data.batch_size=2", "data.shuffle=false"])
    text = preview(config, load_data(config))
    assert "'0+0=' (4 tokens; answer '0', the reward sees '0')" in text and "<eos>" in text
    done = command("-m", "megasync.train", str(runnable), "--check")
    assert done.returncode == 0 and "the first 2 prompts" in done.stdout
    done = command("-m", "megasync.train", str(runnable), "algorithm.name=sft", "--check")
    assert done.returncode == 0 and "«<eos>»" in done.stdout
