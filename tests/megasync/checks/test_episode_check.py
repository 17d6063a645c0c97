"""Configs with episodes: what is refused before anything starts, with key, value and remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from megasync.checks.check import check_config
from megasync.config.load import load_config
from tests.support.config_files import cannot_run, refused, write_runnable

EPISODE = "rollout.episode=tests.support.episodes:episode"


@pytest.fixture
def runnable(tmp_path: Path) -> Path:
    return write_runnable(tmp_path)


def test_an_episode_can_run_with_its_keys(runnable: Path) -> None:
    keys = ["episode_max_turns=3", "episode_timeout_seconds=5", "episode_on_failure=drop", "episode_processes=3"]
    own = [f"rollout.{key}" for key in (*keys, "episode_concurrency=7", "episode_memory_bytes=2GiB", "episode_open_files=99")]
    config = load_config(runnable, [EPISODE, *own])
    check_config(config, 1)
    assert config.rollout.max_sampled_tokens == 3 * config.rollout.max_new_tokens
    check_config(load_config(runnable, ["rollout.episode=tests.support.episodes:Guess"]), 1)


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("episode", "is not the name of an episode"),
        ("tests.support.episodes", "is not the name of an episode"),
        ("tests.support.nothing:episode", "cannot be imported: ModuleNotFoundError"),
        ("tests.support.episodes:episod", "nearest: episode"),
        ("tests.support.episodes:not_async", "not_async is no async function"),
        ("tests.support.episodes:one_argument", "one_argument cannot be called with a task and a model"),
        ("tests.support.episodes:NoSteps", "NoSteps has no methods reset and step"),
        ("tests.support.episodes:number", "number is no async function"),
    ],
)
def test_what_cannot_play_is_refused(runnable: Path, path: str, told: str) -> None:
    message = " ".join(cannot_run(runnable, f"rollout.episode={path}").split())
    assert f"rollout.episode = '{path}'" in message and told in message and "remedy: " in message


@pytest.mark.parametrize(
    "key",
    [
        *("max_turns=3", "timeout_seconds=5", "on_failure=zero", "processes=3", "placement=cluster"),
        *("concurrency=7", "memory_bytes=2GiB", "open_files=99"),
    ],
)
def test_keys_of_episodes_need_one(runnable: Path, key: str) -> None:
    name = key.partition("=")[0]
    message = cannot_run(runnable, f"rollout.episode_{key}")
    assert f"rollout.episode_{name} = " in message and "rollout.episode is empty" in message
    assert f"leave rollout.episode_{name} out" in message


@pytest.mark.parametrize(
    ("key", "told"),
    [
        ("max_turns=0", "rollout.episode_max_turns"),
        ("timeout_seconds=0", "rollout.episode_timeout_seconds"),
        ("on_failure=again", "choices:  retry, zero, drop, stop"),
        ("placement=everywhere", "choices:  local, cluster"),
        ("processes=0", "rollout.episode_processes"),
        ("concurrency=-1", "rollout.episode_concurrency"),
        ("memory_bytes=1MiB", "rollout.episode_memory_bytes"),
        ("open_files=9", "rollout.episode_open_files"),
        ("max_turn=3", "rollout.episode_max_turns"),
    ],
)
def test_wrong_values_are_refused(runnable: Path, key: str, told: str) -> None:
    assert told in refused(runnable, f"rollout.episode_{key}")
