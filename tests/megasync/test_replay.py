"""What replay says of records, weights and environments. With replicas: tests/runs/test_episode_runs.py."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from megasync import replay
from megasync.config.load import load_config, save_config
from megasync.config.schema import Config
from megasync.data.prompts import load_data
from megasync.episodes.pool import EpisodePool
from megasync.episodes.record import Asked, History, recorded
from megasync.episodes.segments import Turn
from megasync.episodes.task import Played
from megasync.episodes.wire import Ask
from megasync.rollouts.group import Group
from megasync.rollouts.records import Records
from megasync.rollouts.requests import task_of, training_request
from tests.support.config_files import write_runnable

EPISODE = """
from megasync.episodes.task import Result

TOOL = "=7"

def look(number):
    return number

async def episode(task, model):
    first = await model.complete(task.prompt_ids)
    await model.call(look, 3)
    await model.complete([*task.prompt_ids, *first.token_ids, *model.encode(TOOL if task.line == 1 else "=9")])
    return 1.0


class Count:
    def __init__(self, task):
        self.number = task.line

    def reset(self):
        return "="

    def step(self, action):
        self.number += 1
        return str(self.number), 0.5, self.number > 3, False, {}
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Its first step, of two groups of one, is recorded; the weights of its step 5 are there."""
    with pytest.MonkeyPatch.context() as patch:
        yield make_run(tmp_path_factory.mktemp("function"), patch, "episode")


def make_run(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> Path:
    module = f"episode_of_{folder.name}".replace("-", "_")
    monkeypatch.syspath_prepend(str(folder))
    (folder / f"{module}.py").write_text(EPISODE)
    own = [f"rollout.episode={module}:{name}", "rollout.episode_processes=1", "rollout.group_size=1", "data.shuffle=false"]
    config = load_config(write_runnable(folder), own)
    path = folder / "runs" / "rl"
    save_config(config, path / "config.yaml")
    records = Records(path, 0)
    records.write(1, played(config), {"episode": replay.episode_identity(config), "version": 0})
    records.close()
    (path / "checkpoints" / "step_00000005" / "hf").mkdir(parents=True)
    return path


def played(config: Config) -> list[Group]:
    """By a replica that always says the same."""
    data, pool, groups = load_data(config), EpisodePool(config), list[Group]()

    async def ask(asked: Ask) -> Turn:
        return Turn([5, 6], [-0.5, -0.5], [3, 3])

    async def play(key: int) -> None:
        example, history = data.train[key], History()
        group = Group(key, training_request(config, data.prompts, example, key))
        ended, turns = await pool.run(task_of(data.prompts, example, group.request), ask, history)
        how = [Asked(number, number, 8, ()) for number in ended.kept]
        branches, records = recorded((one, *turn) for one, turn in zip(how, turns, strict=True))
        answers = history.answers_in_order
        group.complete(0, Played(branches, ended.reward, num_turns=len(turns), turns=records, answers=answers))
        group.rewards = [1.0]
        groups.append(group)

    async def all_of_them() -> None:
        for key in range(2):
            await play(key)

    try:
        asyncio.run(all_of_them())
    finally:
        pool.close()
    return groups


@contextmanager
def none_is_started(config: Config) -> Iterator[Any]:
    raise AssertionError(config)
    yield


def said(capsys: pytest.CaptureFixture[str], run: Path, *arguments: str) -> tuple[int, str]:
    try:
        code = replay.main([str(run), *arguments], none_is_started)
    except SystemExit as error:
        code = int(str(error.code))
    told = capsys.readouterr()
    return code, told.out + told.err


def test_a_tool_that_was_changed_on_purpose_is_named(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, told = said(capsys, run, "--step", "1", "--rerun-environments")
    assert (code, told) == (0, "step 1: 2 episodes: every answer of their environments is the same\n")
    (file,) = run.parents[1].glob("episode_of_*.py")
    file.write_text(EPISODE.replace('"=7"', '"=8"'))
    code, told = said(capsys, run, "--step", "1", "--rerun-environments")
    assert code == 1 and "is another one than it was" in told and "1 of 2 episodes are answered otherwise" in told
    where = "episode 0/0, after turn 1: the prompt of turn 2 differs from token "
    assert where in told and "it went on '7'" in told and "and does '8'" in told
    file.write_text(EPISODE.replace("return number", "return number + (number == 3)"))
    code, told = said(capsys, run, "--step", "1", "--rerun-environments", "--episode", "1", "--json")
    (change,) = json.loads(told[: told.rindex("}") + 1])["steps"][0]["changes"]
    assert (code, change["group"], change["turn"], change["what"]) == (1, 1, 1, "call look([[3], {}]) answered 3, and answers 4")
    file.write_text(EPISODE.replace("return 1.0", "return 0.0"))
    assert "after turn 2: its reward was 1.0, and is 0.0" in said(capsys, run, "--step", "1", "--rerun-environments")[1]
    file.write_text(EPISODE.replace("return 1.0", "raise OSError(3)"))
    assert "after turn 2: it raised OSError: 3" in said(capsys, run, "--step", "1", "--rerun-environments")[1]


def test_an_environment_that_was_changed_on_purpose_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path, monkeypatch, "Count")
    assert said(capsys, run, "--step", "all", "--rerun-environments")[0] == 0
    (file,) = run.parents[1].glob("episode_of_*.py")
    file.write_text(EPISODE.replace("0.5, self", "0.5 + (self.number == 3), self"))
    code, told = said(capsys, run, "--step", "all", "--rerun-environments")
    assert code == 1 and "2 of 2 episodes are answered otherwise" in told
    assert "episode 0/0, after turn 2: step(" in told
    assert "answered ['3', 0.5, False, {}], and answers ['3', 1.5, False, {}]" in told
    assert "episode 1/0, after turn 1: step(" in told
    file.write_text(EPISODE.replace("self.number > 3", "self.number > 2"))
    assert "answers ['3', 0.5, True, {}]" in said(capsys, run, "--step", "all", "--rerun-environments")[1]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--step", "2"], "there is no record of step 2"),
        (["--step", "1-90000000000000"], "there is no record of step 2"),
        (["--step", "1", "--trainer", "model.path=none"], "there is no such folder"),
        (["--step", "3-1"], "is no range"),
        (["--step", "first"], "is no step"),
        (["--step", "1", "--episode", "7"], "step 1 has no such episode"),
        (["--step", "1", "rollout.temprature=1"], "rollout.temperature"),
        (["--step", "1"], "needed: 3\n"),
    ],
)
def test_what_cannot_be_sampled_again_is_refused(
    run: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], told: str
) -> None:
    code, text = said(capsys, run, *arguments)
    assert code == 2 and told in squeezed(text)


def squeezed(text: str) -> str:
    return "\n".join(" ".join(line.split()) for line in text.splitlines()) + "\n"


def test_the_remedy_names_steps_and_keys(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = squeezed(said(capsys, run, "--step", "1")[1])
    assert "there: 0, 5 (0: the model folder)" in text and "steps with weights: 1" in text
    assert "sync.log=deltas" in text and "checkpoint.every_steps=1 and checkpoint.keep=N" in text


def test_a_run_without_records_or_environments_is_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = said(capsys, run, "--step", "1", "--rerun-environments", "rollout.episode=")
    assert code == 2 and "no environment" in text
    code, text = said(capsys, run / "nowhere", "--step", "all")
    assert code == 2 and "is no run" in text
    (run / "episodes" / "step_00000001.npz").unlink()
    code, text = said(capsys, run, "--step", "all")
    assert code == 2 and "rollout.record=all" in text
