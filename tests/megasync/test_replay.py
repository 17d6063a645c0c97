"""What replay says of records, weights and environments. With replicas: tests/runs/test_episode_runs.py."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from bridge.versions.file import path_of
from bridge.versions.writer import VersionWriter
from megasync import replay
from megasync.config.errors import ConfigError
from megasync.config.load import load_config, save_config
from megasync.config.schema import Config
from megasync.data.load import load_data
from megasync.episodes.pool import EpisodePool
from megasync.episodes.record import Asked, History, recorded
from megasync.episodes.segments import Turn
from megasync.episodes.task import Played
from megasync.episodes.wire import Ask
from megasync.rollouts.group import Group
from megasync.rollouts.records import Records
from megasync.rollouts.requests import task_of, training_request
from megasync.serving.source import Weights, versions_there
from tests.support.config_files import write_runnable
from tests.support.tiny_models import write_tiny_model

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


def test_versions_that_the_log_has_lost_are_left_out_and_named(tmp_path: Path) -> None:
    """Those after a file that is lost or damaged, up to the next whole one; what was never kept is no loss."""
    config = load_config(write_runnable(tmp_path), ["run.name=rl", "sync.log=deltas", "rollout.max_new_tokens=8"])
    run, log = config.run.folder, config.run.folder / "versions"
    save_config(config, run / "config.yaml")
    weights = load_file(write_tiny_model(tmp_path / "model", "qwen3") / "model.safetensors")
    writer = VersionWriter(log, stage=0, num_stages=1, keeps_weights=True, full_every=4)
    for version in range(1, 10):  # 1, 5 and 9 whole
        weights["model.norm.weight"] += 1
        writer.write(version, iter(weights.items()))
    path_of(log, 2, 0).unlink()
    damaged = path_of(log, 7, 0)
    damaged.write_bytes(b"x" + damaged.read_bytes()[1:])
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    needed = list(range(12))
    found = Weights(run, scratch, [], needed)
    assert [version for version, _ in found.each(sorted(versions_there(run) & set(needed)))] == [0, 1, 5, 6, 9]
    assert sorted(found.missing) == [2, 3, 4, 7, 8]
    assert "version 2 of stage 0 is missing, which version 3 was added to" in found.missing[3]
    assert f"{damaged}: model.norm.weight is damaged" in found.missing[8]
    done = [replay.Replayed(step, 1, compared_tokens=5 * (step == 2)) for step in (2, 3, 4, 11)]
    for each in done:
        each.leave_out({each.step - 1: 7}, found.missing)
    assert [each.without_weights for each in done] == [{}, {2: 7}, {3: 7}, {}]
    told = replay.not_compared(done, found.missing)
    assert told[0] == "not compared: 2 of 4 steps, whose weights are not there: 3, 4" and len(told) == 6
    for path in log.glob("version_*"):
        path.write_bytes(b"")
    assert versions_there(run) == {0}
    with pytest.raises(ConfigError, match=r"version_00000007\.stage_000: is torn"):
        list(Weights(run, scratch, [], [7]).each([7]))


def test_versions_of_steps_without_a_log_are_told_from_lost_ones(tmp_path: Path) -> None:
    """Deltas, then a stretch with sync.log=off, then deltas again: metrics tell which versions were logged."""
    config = load_config(write_runnable(tmp_path), ["run.name=rl", "sync.log=deltas"])
    run, log = config.run.folder, config.run.folder / "versions"
    save_config(config, run / "config.yaml")
    weights = load_file(write_tiny_model(tmp_path / "model", "qwen3") / "model.safetensors")
    for versions in (range(3), range(5, 8)):
        writer = VersionWriter(log, stage=0, num_stages=1, keeps_weights=True, full_every=1)
        for version in versions:
            writer.write(version, iter(weights.items()))
    path_of(log, 6, 0).unlink()
    found = Weights(run, tmp_path / "scratch", [], range(9))
    assert not found.unlogged and set(found.missing) == {3, 4, 6}
    assert all("it is lost, or sync.log was off then (metrics.jsonl does not tell)" in why for why in found.missing.values())
    lines = [{"step": step, "sync/seconds": 1.0, **({} if step in (3, 4) else {"sync/log_seconds": 0.1})} for step in range(1, 8)]
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    found = Weights(run, tmp_path / "scratch", [], range(9))
    assert found.missing == {6: "the run's log has no file of it, but earlier and later ones"} and found.unlogged == [3, 4]
    done = [replay.Replayed(step, 1, without_weights={step - 1: 7}) for step in (4, 5, 7)]
    assert replay.not_compared(done, found.missing, found.unlogged)[1:] == [
        "never logged, as sync.log was off then: versions 3, 4",
        "version 6 cannot be made: the run's log has no file of it, but earlier and later ones",
    ]
    (run / "metrics.jsonl").write_text("{\n{}\n")
    assert set(Weights(run, tmp_path / "scratch", [], range(9)).missing) == {3, 4, 6}, "a damaged file tells nothing"


@pytest.mark.parametrize("last", ["off", "digests", "deltas"])
def test_the_logs_weights_are_found_whatever_log_the_run_went_on_with(tmp_path: Path, last: str) -> None:
    """Versions 0 and 1 by digests, 2 and 3 whole, 4 by its digests, 5 whole."""
    config = load_config(write_runnable(tmp_path), ["run.name=rl", f"sync.log={last}"])
    run, log = config.run.folder, config.run.folder / "versions"
    save_config(config, run / "config.yaml")
    weights = load_file(write_tiny_model(tmp_path / "model", "qwen3") / "model.safetensors")
    for version, keeps_weights in enumerate((False, False, True, True, False, True)):
        writer = VersionWriter(log, stage=0, num_stages=1, keeps_weights=keeps_weights, full_every=4)
        writer.write(version, iter(weights.items()))
    assert versions_there(run) == {0, 2, 3, 5}
    assert not Weights(run, tmp_path / "scratch", [], [1, 2, 4, 5]).missing, "what was kept by digests is not lost"
