"""A run of episodes whose trainer is killed while tools run, beside all else that may go on; it goes on with other keys.

Filters, evaluations, adapters, turns over updates at staleness 2 and a second replica in its midst: each prompt once, each reward
its own episode's, and no program of a tool is left.
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from megasync.tools.scale import command as scale
from megasync.episodes.task import EpisodeResult
from megasync.report.log import read_evaluations, read_samples
from megasync.rollouts.progress import load_progress
from megasync.config.files import newest_checkpoint
from megasync.rollouts.records import StepRecord, load_record, paths_of
from tests.runs.train_cases import TORCHRUN, endless_run, launch, left_running, metrics, processes_with, write_config
from tests.support.fuzzed import worth
from tests.support.processes import name_of

pytestmark = [pytest.mark.long, pytest.mark.vllm_on_cpu]

STALENESS, BATCH, EPISODES = 2, 8, "tests.support.fuzzed"
OTHER = {"data.batch_size": 4, "rollout.max_staleness": 1, "rollout.group_size": 3, "engine.tokens_per_microbatch": 300}


def config_of(folder: Path) -> Path:
    held_out = folder / "held_out.jsonl"
    held_out.write_text('{"question": "1+1=", "answer": "2"}\n')
    episode = {"episode": f"{EPISODES}:long", "episode_max_turns": 2, "record": "episodes", "evaluate_every_steps": 2}
    return write_config(
        folder,
        run={"log_samples": 8},
        engine={"wrap": "ddp", "lora": {"rank": 4}},
        rollout={**episode, "max_staleness": STALENESS, "on_update": "continue", "max_model_len": 48},
        algorithm={"filter_groups": True},
        data={"eval": str(held_out)},
        checkpoint={"every_steps": 1},
    )


def test_each_prompt_is_trained_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = config_of(tmp_path)
    with endless_run(TORCHRUN, config, "--nproc", "2") as run:
        run.wait_for(2)
        code = scale.main([str(run.folder), "--replicas", "2"])
        assert code == 0, capsys.readouterr()
        run.wait_for(len(metrics(run.folder)) + 2)
        while not any("sleep" in name_of(process) for process in processes_with(run.marker)):
            time.sleep(0.02)
        run.ranks()[0].kill()
        assert run.process.wait(150) != 0
        assert left_running(run.marker) == []
    checkpoint = newest_checkpoint(run.folder)
    assert checkpoint is not None
    kept, done = load_progress(checkpoint), int(checkpoint.name.removeprefix("step_"))
    assert kept is not None and any(not sample.is_over for group in kept.groups for sample in group.samples)
    assert any(line["staleness/max"] > 0 for line in metrics(run.folder))

    others = [f"{key}={value}" for key, value in {**OTHER, "rollout.episode": f"{EPISODES}:short"}.items()]
    again = launch(config, *others, f"run.steps={done + 4}", ranks=1)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "sampling parameters or episode have changed" in again.stdout + again.stderr
    lines, records = metrics(run.folder), [load_record(path) for path in paths_of(run.folder).values()]
    assert [line["step"] for line in lines] == [record.step for record in records] == list(range(1, done + 5))
    keys = [group.key for record in records for group in record.groups]
    assert len(keys) == len(set(keys)) == BATCH * done + OTHER["data.batch_size"] * 4
    for record in records:
        check(record, is_other=record.step > done)
    for line in (line for line in read_samples(run.folder) if line["set"] == "train"):
        assert line["reward"] == pytest.approx(worth("short" if line["step"] > done else "long", line, 0.0)), line
    steps = [line["step"] for line in read_evaluations(run.folder)]
    assert steps == sorted(set(steps)) and {0, *range(2, done + 5, 2)} <= set(steps)


def check(record: StepRecord, *, is_other: bool) -> None:
    """Its groups are whole, of the episode of that time, and fresh enough."""
    for group in record.groups:
        played = [one for one in group.members.values() if isinstance(one, EpisodeResult)]
        assert len(played) == (OTHER["rollout.group_size"] if is_other else 4)
        answers = {one.info["answer"] for one in played}
        assert len(answers) == 1
        for member, one in group.members.items():
            assert isinstance(one, EpisodeResult) and one.num_turns == 2
            name = "short" if is_other else "long"
            line = {"tokens": one.num_sampled, "answer": one.info["answer"]}
            assert group.rewards[member] == pytest.approx(worth(name, line, 0.0))
            versions = np.concatenate([branch.weight_versions[branch.is_sampled] for branch in one.branches])
            oldest = record.step - 1 - (OTHER["rollout.max_staleness"] if is_other else STALENESS)
            assert oldest <= versions.min() and versions.max() < record.step
