"""Which records and weights replay takes, and its errors. With replicas: tests/runs/test_episode_runs.py."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from bridge.generation import Completion
from bridge.versions.file import path_of
from bridge.versions.writer import VersionWriter
from megasync.config.errors import ConfigError
from megasync.config.load import load_config, save_config
from megasync.config.schema import Config
from megasync.data.load import load_data
from megasync.rewards.pool import Scored
from megasync.rollouts.group import Group
from megasync.rollouts.records import Records
from megasync.rollouts.requests import training_request
from megasync.tools.replay import command as replay
from megasync.tools.replay.results import as_lines
from megasync.tools.replay.sampled import Sampled
from megasync.tools.serving.source import each_version, versions_of
from tests.support.config_files import write_runnable
from tests.support.tiny_models import write_tiny_model


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its first step, of two groups of one, is recorded, sampled by version 3; the weights of its step 5 are there."""
    config = load_config(write_runnable(tmp_path_factory.mktemp("run")), ["run.name=rl", "rollout.record=all"])
    path = config.run.folder
    save_config(config, path / "config.yaml")
    records, data = Records(path, 0), load_data(config)
    groups = [Group(key, training_request(config, data.prompts, data.train[key], key)) for key in range(2)]
    for group in groups:
        arrays = np.array([5, 6], np.int32), np.array([-0.5, -0.5], np.float32), np.array([3, 3], np.int32)
        group.complete(0, Completion(*arrays, "stop"))
        group.scored[0] = Scored(1.0, {})
    records.write(1, groups, {"version": 0})
    records.close()
    (path / "checkpoints" / "step_00000005" / "hf").mkdir(parents=True)
    return path


@contextmanager
def none_is_started(config: Config) -> Iterator[Any]:
    raise AssertionError(config)
    yield


def output(capsys: pytest.CaptureFixture[str], run: Path, *arguments: str) -> tuple[int, str]:
    try:
        code = replay.main([str(run), *arguments], none_is_started)
    except SystemExit as error:
        code = int(str(error.code))
    printed = capsys.readouterr()
    return code, printed.out + printed.err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--step", "2"], "there is no record of step 2"),
        (["--step", "1-90000000000000"], "there is no record of step 2"),
        (["--step", "1", "--trainer", "model.path=none"], "there is no such folder"),
        (["--step", "1", "model.path=none"], "there is no such folder"),
        (["--step", "3-1"], "is no range"),
        (["--step", "first"], "is no step"),
        (["--step", "1", "--episode", "7"], "step 1 has no such episode"),
        (["--step", "1", "rollout.temprature=1"], "rollout.temperature"),
        (["--step", "1"], "needed: 3\n"),
    ],
)
def test_what_cannot_be_sampled_again_is_refused(
    run: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], expected: str
) -> None:
    code, text = output(capsys, run, *arguments)
    assert code == 2 and expected in single_spaced(text)


def single_spaced(text: str) -> str:
    return "\n".join(" ".join(line.split()) for line in text.splitlines()) + "\n"


def test_the_remedy_names_steps_and_keys(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = single_spaced(output(capsys, run, "--step", "1")[1])
    assert "there: 0, 5 (0: the model folder)" in text and "steps with weights: 1" in text
    assert "sync.log=deltas" in text and "checkpoint.every_steps=1 and checkpoint.keep=N" in text


def test_a_run_without_records_is_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = output(capsys, run / "nowhere", "--step", "all")
    assert code == 2 and "is no run" in text
    (run / "episodes" / "step_00000001.npz").unlink()
    code, text = output(capsys, run, "--step", "all")
    assert code == 2 and "rollout.record=all" in text


def test_versions_that_cannot_be_read_are_left_out_and_named(tmp_path: Path) -> None:
    """A damaged one, and those after a damaged or lost one, up to the next whole one."""
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
    unreadable = dict[int, str]()
    there = sorted(versions_of(run) & set(range(12)))
    assert [version for version, _ in each_version(run, scratch, [], there, unreadable)] == [0, 1, 5, 6, 9]
    assert sorted(unreadable) == [3, 4, 7, 8]
    assert "version 2 of stage 0 is missing, which version 3 was added to" in unreadable[3]
    assert f"{damaged}: model.norm.weight is damaged" in unreadable[8]
    assert len(list(scratch.iterdir())) == 1, "the first folder alone, from which replicas have started"
    done = [Sampled(step, 1, {step - 1: 7}, 0, compared_tokens=5 * (step == 2)) for step in (2, 3, 4, 11)]
    for each in done:
        each.leave_out({1, 10})
    assert [each.without_weights for each in done] == [{}, {2: 7}, {3: 7}, {}]
    text = as_lines(done, unreadable, str)
    assert text[-5] == "not compared: 2 of 4 steps, whose weights are not there: 3, 4"
    for path in log.glob("version_*"):
        path.write_bytes(b"")
    assert versions_of(run) == {0}
    with pytest.raises(ConfigError, match=r"version_00000007\.stage_000: is torn"):
        list(each_version(run, scratch, [], [7], unreadable))


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
    assert versions_of(run) == {0, 2, 3, 5}
