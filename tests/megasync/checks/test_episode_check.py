"""Configs with episodes: what is refused before anything starts, with key, value and remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from megasync.checks.check import check_config
from megasync.config.load import load_config
from tests.support.config_files import refusal, refused

EPISODE = "rollout.episode=tests.support.episodes:episode"


def test_an_episode_can_run_with_its_keys(runnable: Path) -> None:
    keys = ["episode_max_turns=3", "episode_timeout_seconds=5", "episode_on_failure=drop", "episode_processes=3"]
    own = [f"rollout.{key}" for key in (*keys, "episode_concurrency=7", "episode_memory_bytes=2GiB", "episode_open_files=99")]
    config = load_config(runnable, [EPISODE, *own])
    check_config(config, 1)
    assert config.rollout.max_sampled_tokens == 3 * config.rollout.max_new_tokens
    check_config(load_config(runnable, ["rollout.episode=tests.support.episodes:Guess"]), 1)


@pytest.mark.parametrize(
    "path",
    [
        *("episode", "tests.support.episodes", "tests.support.nothing:episode", "tests.support.episodes:episod"),
        *(f"tests.support.episodes:{name}" for name in ("not_async", "one_argument", "NoSteps", "number")),
    ],
)
def test_what_cannot_play_is_refused(runnable: Path, path: str) -> None:
    error = refusal(runnable, f"rollout.episode={path}")
    assert (error.key, error.value) == ("rollout.episode", repr(path)) and error.remedy


@pytest.mark.parametrize(
    "key",
    [
        *("max_turns=3", "timeout_seconds=5", "on_failure=zero", "processes=3", "placement=cluster"),
        *("concurrency=7", "memory_bytes=2GiB", "open_files=99"),
    ],
)
def test_keys_of_episodes_need_one(runnable: Path, key: str) -> None:
    name = f"rollout.episode_{key.partition('=')[0]}"
    error = refusal(runnable, f"rollout.episode_{key}")
    assert error.key == name and f"leave {name} out" in error.remedy


@pytest.mark.parametrize(
    ("key", "text"),
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
def test_wrong_values_are_refused(runnable: Path, key: str, text: str) -> None:
    assert text in refused(runnable, f"rollout.episode_{key}")
