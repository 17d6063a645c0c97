"""A run whose trainer is killed between two checkpoints goes on from the weights that its replicas had last.

Beside filters, evaluations and turns over updates, in another layout: no step is trained again, and each prompt once.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from bridge.versions.reader import VersionReader
from megasync.config.files import CHECKPOINTS, VERSIONS, newest_checkpoint
from megasync.report.log import read_evaluations
from megasync.rollouts.records import load_record, paths_of
from megasync.run.checkpoints import marked
from tests.runs.train_cases import TORCHRUN, endless_run, launch, left_running, metrics, write_config

pytestmark = [pytest.mark.long, pytest.mark.vllm_on_cpu]

BATCH, EVERY, WARMUP = 8, 8, 1000
NEWEST = "checkpoint.resume=newest_weights"


def config_of(folder: Path) -> Path:
    held_out = folder / "held_out.jsonl"
    held_out.write_text('{"question": "1+1=", "answer": "2"}\n')
    return write_config(
        folder,
        engine={"wrap": "megatron_fsdp", "optimizer": {"learning_rate": 1e-3, "warmup_steps": WARMUP}},
        rollout={"max_staleness": 2, "on_update": "continue", "evaluate_every_steps": 2, "record": "all"},
        sync={"log": "deltas", "log_full_every": 3, "log_keep": 4},
        algorithm={"filter_groups": True},
        model={"dtype": "bfloat16"},
        data={"eval": str(held_out)},
        checkpoint={"every_steps": EVERY},
    )


def test_no_step_is_trained_again(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    with endless_run(TORCHRUN, config) as run:
        run.wait_for(3)
        while (there := marked(run.folder)) is None or there[0] <= EVERY:  # the next checkpoint is some steps away
            run.wait_for(len(metrics(run.folder)) + 1)
        run.ranks()[0].kill()
        assert run.process.wait(300) != 0
        assert left_running(run.marker) == []
    folder, checkpoint = run.folder, newest_checkpoint(run.folder)
    there = marked(folder)
    assert checkpoint is not None and there is not None
    before, progress = there
    assert max(VersionReader(folder / VERSIONS).versions) - before in (0, 1)
    assert int(checkpoint.name.removeprefix("step_")) < before and progress.num_trained == BATCH * before
    digests = VersionReader(folder / VERSIONS).digests(before)

    again = launch(config, "engine.wrap=ddp", NEWEST, f"run.steps={before + 3}", ranks=1)
    assert again.returncode == 0, again.stdout + again.stderr
    since = before - int(checkpoint.name.removeprefix("step_"))
    assert f"from {checkpoint}, with the weights of step {before}\n" in again.stdout
    assert f"resumed with weights of {since} steps after {checkpoint.name}" in again.stdout + again.stderr
    assert VersionReader(folder / VERSIONS).digests(before) == digests, "bit for bit those that the replicas had"
    lines, records = metrics(folder), [load_record(path) for path in paths_of(folder).values()]
    assert [line["step"] for line in lines] == [record.step for record in records] == list(range(1, before + 4))
    assert [line["learning_rate"] for line in lines] == pytest.approx([1e-3 * line["step"] * 2 / WARMUP for line in lines])
    keys = [group.key for record in records for group in record.groups]
    assert len(keys) == len(set(keys)) == BATCH * (before + 3)
    steps = [line["step"] for line in read_evaluations(folder)]
    assert steps == sorted(set(steps)) and set(range(2, before + 4, 2)) <= set(steps)
    assert not list((folder / CHECKPOINTS).glob(".newer*"))
    assert newest_checkpoint(folder) == folder / CHECKPOINTS / f"step_{before + 3:08d}"
