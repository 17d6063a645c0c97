"""Judges before a start: keys that do not go together, prompts without a text, and endpoints that are tried with one call."""

from __future__ import annotations

from pathlib import Path

import pytest

from megasync.checks.check import check_config
from megasync.checks.own_answers import score_own_answers, try_judges
from megasync.config.errors import ConfigError
from megasync.config.load import load_config
from megasync.launch.num_ranks import num_teacher_gpus
from tests.support.config_files import refusal, write_runnable
from tests.support.judge_server import MODEL, expected, judge_server, requests_of

NOBODY = "http://127.0.0.1:9/v1"
REWARD = "rollout.reward={judge:quality: 0.5, exact_match: 1}"
QUALITY = ["judges.quality.prompt='{{ prompt }}{{ response }}'", f"judges.quality.model={MODEL}", REWARD]


def tried(path: Path, *overrides: str, world_size: int = 1) -> list[str]:
    config = load_config(path, [*QUALITY, *overrides])
    data = check_config(config, world_size)
    assert data is not None
    assert [scores.reward for scores in score_own_answers(config, data)] == ["exact_match"]
    return try_judges(config, data)


def test_an_endpoint_is_asked_once_about_an_answer_of_the_data(tmp_path: Path) -> None:
    path = write_runnable(tmp_path)
    with judge_server(tmp_path / "log") as (url, _):
        (line,) = tried(path, f"judges.quality.endpoint={url}")
    assert line.startswith(f"judges.quality.endpoint = {url}") and f"{expected('1+1=2')}" in line
    assert [one["text"] for one in requests_of(tmp_path / "log")] == ["1+1=2"]
    assert not (tmp_path / "runs").exists()


def test_an_endpoint_that_is_not_reachable_is_named(tmp_path: Path) -> None:
    path = write_runnable(tmp_path)
    with pytest.raises(ConfigError) as caught:
        tried(path, f"judges.quality.endpoint={NOBODY}")
    assert (caught.value.key, caught.value.value) == ("judges.quality.endpoint", NOBODY)
    assert caught.value.remedy
    with judge_server(tmp_path / "log") as (url, _):  # one of two
        lines = tried(path, f"judges.quality.endpoint=[{NOBODY},{url}]")
    assert [NOBODY in line for line in lines] == [True, False]


def test_a_reply_without_a_score_is_refused_where_it_would_stop_the_run(tmp_path: Path) -> None:
    path = write_runnable(tmp_path)
    with judge_server(tmp_path / "log", unparsed=1.0) as (url, _):
        with pytest.raises(ConfigError) as caught:
            tried(path, f"judges.quality.endpoint={url}")
        assert caught.value.lines["reply"] == "'I cannot say.'"
        (line,) = tried(path, f"judges.quality.endpoint={url}", "judges.quality.on_unparsed=zero")
        assert "I cannot say." in line


def test_a_prompt_that_reads_a_missing_column_is_refused(tmp_path: Path) -> None:
    path = write_runnable(tmp_path)
    with pytest.raises(ConfigError) as caught:
        tried(path, f"judges.quality.endpoint={NOBODY}", "judges.quality.prompt='{{ response }}{{ extra.rubric }}'")
    assert caught.value.key == "judges.quality.prompt"


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["rollout.reward=judge:qualty"], "rollout.reward"),
        ([], "judges.quality"),  # neither a path nor an endpoint
        ([f"judges.quality.endpoint={NOBODY}", "judges.quality.path=models/judge"], "judges.quality"),
        ([f"judges.quality.endpoint={NOBODY}", "judges.quality.prompt='{response}'"], "judges.quality.prompt"),
        ([f"judges.quality.endpoint={NOBODY}", "judges.quality.prompt="], "judges.quality.prompt"),
        (["judges.quality.path=models/judge"], "judges.quality.path"),
    ],
)
def test_keys_that_do_not_go_together_are_refused(tmp_path: Path, overrides: list[str], key: str) -> None:
    error = refusal(write_runnable(tmp_path), *QUALITY, *overrides, world_size=1)
    assert key in [part.key for part in error.parts]
    assert all(part.remedy for part in error.parts)


def test_replicas_of_a_judge_have_gpus_of_their_own_where_the_reward_names_it(tmp_path: Path) -> None:
    own = ["judges.quality.path=model", "judges.quality.replicas=2", "judges.quality.tensor_parallel=2"]
    own += ["judges.other.path=model"]
    config = load_config(write_runnable(tmp_path), [*QUALITY, *own])
    assert list(config.pooled_judges) == ["quality"] and num_teacher_gpus(config) == 4
    assert num_teacher_gpus(load_config(write_runnable(tmp_path), [*own, "algorithm.name=sft"])) == 0
