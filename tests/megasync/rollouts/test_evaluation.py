"""avg@k and pass@k, and what data.eval may say. Real generation: test_train.py.

python -m pytest tests/megasync/rollouts/test_evaluation.py
"""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megasync.config.load import load_config
from megasync.config.errors import ConfigError
from megasync.rollouts.evaluation import error_metric, evaluations, pass_at_k, requests_of, set_metrics
from megasync.data.load import load_data
from megasync.rollouts.requests import training_request
from megasync.submit import absolute_paths
from tests.support.config_files import cannot_run, write, write_runnable


@settings(deadline=None)
@given(num_samples=st.integers(1, 9), data=st.data())
def test_pass_at_k_is_the_share_of_choices_with_one_that_passes(num_samples: int, data: st.DataObject) -> None:
    num_passed, k = data.draw(st.integers(0, num_samples)), data.draw(st.integers(1, num_samples))
    choices = list(combinations([index < num_passed for index in range(num_samples)], k))
    assert pass_at_k(num_samples, num_passed, k) == pytest.approx(sum(map(any, choices)) / len(choices), abs=1e-12)


@settings(deadline=None)
@given(rewards=st.lists(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=6, max_size=6), min_size=1, max_size=5))
def test_metrics_of_a_set(rewards: list[list[float]]) -> None:
    metrics = set_metrics("a", rewards, pass_reward=1.0)
    assert list(metrics) == ["eval/a/avg@6", "eval/a/pass@1", "eval/a/pass@2", "eval/a/pass@4", "eval/a/pass@6"]
    values = list(metrics.values())
    assert values[1:] == sorted(values[1:]), "the more samples, the likelier one passes"
    assert values[0] >= values[1] - 1e-12 and values[4] == sum(1.0 in group for group in rewards) / len(rewards)
    halves = set_metrics("a", rewards, pass_reward=0.5)
    assert all(halves[key] >= metrics[key] - 1e-12 for key in metrics)


def test_one_sample_has_one_figure_each() -> None:
    assert set_metrics("a", [[1.0], [0.0]], 1.0) == {"eval/a/avg@1": 0.5, "eval/a/pass@1": 0.5}


def test_the_error_of_a_mean_is_over_the_prompts() -> None:
    assert error_metric("e", [1.0, 0.0, 1.0, 1.0]) == {"e": 0.25} and error_metric("e", [1.0]) == {}


# -------------------------------------------------------------------------------------------------------- data.eval


@pytest.fixture
def runnable(tmp_path: Path) -> Path:
    write(tmp_path / "math.jsonl", '{"problem": "1+3=", "solution": "4"}\n')
    return write_runnable(tmp_path)


MATH = "{path: MATH, prompt_key: problem, answer_key: solution, samples: 4, temperature: 0.8, top_k: 5, max_new_tokens: 9}"


def with_math(runnable: Path, *more: str) -> list[str]:
    return [f"data.eval.math={MATH.replace('MATH', str(runnable.parent / 'math.jsonl'))}", *more]


def test_sets_have_their_own_files_keys_and_sampling(runnable: Path) -> None:
    sums = f"data.eval.sums={{path: {runnable.parent / 'train.jsonl'}}}"
    config = load_config(runnable, with_math(runnable, sums, "rollout.stop=;", "rollout.max_new_tokens=7"))
    data = load_data(config)
    assert data.held_out == [] and list(data.eval_sets) == ["math", "sums"]
    math, plain = evaluations(config, data)
    (request,) = requests_of(math, data.prompts, run_seed=3)
    assert (request.num_samples, request.temperature, request.top_k, request.max_new_tokens) == (4, 0.8, 5, 9)
    assert request.stop == (";",) and math.pass_reward == 1.0
    greedy = requests_of(plain, data.prompts, run_seed=3)
    assert [(each.num_samples, each.temperature, each.max_new_tokens) for each in greedy] == [(1, 0.0, 7)] * 2
    assert len({each.seed for each in (*greedy, request)}) == 3
    assert requests_of(math, data.prompts, run_seed=3) == [request] != requests_of(math, data.prompts, run_seed=4)


def test_a_path_is_greedy_and_training_samples_by_the_keys_of_rollout(runnable: Path) -> None:
    chosen = [f"data.eval={runnable.parent / 'train.jsonl'}", "rollout.top_k=3", "rollout.min_p=0.1", "rollout.top_p=0.5"]
    config = load_config(runnable, [*chosen, "run.seed=2"])
    data = load_data(config)
    (evaluation,) = evaluations(config, data)
    assert evaluation.examples == data.held_out == data.train and data.eval_sets == {}
    assert all(each.temperature == 0 and each.top_k == 0 for each in requests_of(evaluation, data.prompts, 2))
    request = training_request(config, data.prompts, data.train[0], ordinal=5)
    assert (request.top_k, request.min_p, request.top_p, request.num_samples) == (3, 0.1, 0.5, 8)
    assert request.seed == 2 * 1_000_003 + 5 * 8
    assert evaluations(load_config(runnable), data) == []


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("data.eval.math.path=", "data.eval.math.path is not set"),
        ("data.eval.math.path=/no", "data.eval.math: /no: there is no such data file"),
        ("data.eval.math.prompt_key=problems", "write data.eval.math.prompt_key=problem"),
        ("data.eval.math.temperature=0", "write data.eval.math.temperature=1.0 or data.eval.math.samples=1"),
        ("data.eval.math={samples: 1, temperature: 0}", "or leave data.eval.math.top_k out"),
        ("data.eval.math={max_new_tokens: 64}", "data.eval.math.max_new_tokens = 64: leaves no room for a prompt"),
        ("data.eval.math={max_new_tokens: 29}", "data.eval.math: 1 of 1 examples are too long"),
        ("algorithm.name=sft", "data.eval = math: sets are for algorithm.name = grpo"),
        ("run.stop_at_accuracy=0.5", "the accuracy is not measured"),
    ],
)
def test_sets_that_could_not_work_are_refused(runnable: Path, override: str, words: str) -> None:
    limits = ["rollout.max_model_len=32", "rollout.max_new_tokens=8"]
    message = cannot_run(runnable, *with_math(runnable, *limits, override))
    assert words in message and "remedy:" in message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{math: a.jsonl}", "data.eval.math = 'a.jsonl': a mapping"),
        ("{math: {paht: a}}", "data.eval.math.paht: there is no such key"),
        ("{ma/th: {path: a}}", "data.eval = {'ma/th': "),
        ("{on: {path: a}}", "the name of a set as True"),
        ("{24: {path: a, samples: 0}}", "data.eval.24.samples = 0: out of range"),
        ("{train: {path: a}}", "data.eval = {'train': "),
        ("{math: {path: a, temperature: 0.001}}", "data.eval.math.temperature = 0.001: "),
        ("{math: {path: a, temperature: 3.0}}", "data.eval.math.temperature = 3.0: out of range"),
        ("{math: {path: a, samples: 0}}", "data.eval.math.samples = 0: out of range"),
        ("{math: {path: a, limit: 0}}", "data.eval.math.limit = 0: out of range"),
        ("{math: {path: a, top_p: high}}", "data.eval.math.top_p = 'high': a number is expected"),
        ("[a.jsonl]", "data.eval = ['a.jsonl']: a text is expected"),
    ],
)
def test_malformed_sets_are_named_with_their_set(tmp_path: Path, text: str, words: str) -> None:
    path = write(tmp_path / "a.yaml", f"data: {{eval: {text}}}")
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert words in str(caught.value) and "remedy:" in str(caught.value) and str(path) in str(caught.value)


def test_a_set_may_have_a_name_of_digits(tmp_path: Path) -> None:
    """YAML has a number there; keys on the command line reach the same set."""
    path = write(tmp_path / "a.yaml", "data: {eval: {24: {path: a.jsonl}, 25: {path: b.jsonl}}}")
    sets = load_config(path, ["data.eval.24.limit=3", "data.eval.25.limit=4"]).data.eval_sets
    assert {name: (each.path, each.limit) for name, each in sets.items()} == {"24": ("a.jsonl", 3), "25": ("b.jsonl", 4)}
    sets = load_config(path, ["data.eval={25: {limit: 4}}"]).data.eval_sets  # a mapping of the user's names replaces
    assert {name: (each.path, each.limit) for name, each in sets.items()} == {"25": ("b.jsonl", 4)}


def test_a_folder_with_several_splits_is_evaluated_on_one(runnable: Path) -> None:
    folder = runnable.parent / "gsm"
    for split in ("train", "test"):
        write(folder / f"{split}.jsonl", json.dumps({"question": split, "answer": "1"}))
    config = load_config(runnable, [f"data.train={folder}", "data.split=train", f"data.eval.gsm={{path: {folder}, split: test}}"])
    data = load_data(config)
    assert [e.prompt for e in (*data.train, *data.eval_sets["gsm"])] == ["train", "test"]
    assert "write data.split=train" in cannot_run(runnable, f"data.train={folder}")
    message = cannot_run(runnable, f"data.eval={folder}")
    assert f"write data.eval='{{NAME: {{path: {folder}, split: test}}}}'" in message
    load_data(load_config(runnable, [message.partition("write ")[2].replace("'", "").replace("NAME", "gsm")]))
    limited = [f"data.eval={{gsm: {{path: {runnable.parent / 'train.jsonl'}, limit: 1}}}}"]
    data = load_data(load_config(runnable, limited))
    assert data.eval_sets["gsm"] == data.train[:1] and data.counts["data.eval.gsm"] == (1, 1)
    assert "write data.eval.gsm.split=test" in cannot_run(runnable, f"data.eval.gsm={{path: {folder}, split: tets}}")


def test_files_of_sets_are_inputs_as_the_others_are(runnable: Path) -> None:
    """Submitted by their whole paths; not taken from the folder of a former run."""
    config = load_config(runnable, with_math(runnable))
    assert f'data.eval.math.path="{runnable.parent}/math.jsonl"' in absolute_paths(config)
    (config.run.folder / "metrics.jsonl").parent.mkdir(parents=True)
    (config.run.folder / "metrics.jsonl").write_text('{"step": 0}\n')
    (runnable.parent / "math.jsonl").rename(config.run.folder / "math.jsonl")
    message = cannot_run(runnable, *with_math(runnable), f"data.eval.math.path={config.run.folder}/math.jsonl")
    assert message.startswith("data.eval.math.path = ") and "lies in the run's folder" in message
