"""A run that gets a second replica in its midst and gives it up again: each prompt once, no token too old, nothing left."""

from __future__ import annotations

import socket
from pathlib import Path

import numpy as np
import pytest

from megasync.tools.scale import command as scale
from megasync.config.files import STOP_FILE, newest_checkpoint
from megasync.config.load import load_config, save_config
from megasync.launch.processes import REFUSED, STOPPED
from megasync.report.log import read_evaluations
from megasync.rollouts.progress import load_progress
from megasync.rollouts.records import load_record, paths_of
from tests.support.config_files import write_runnable
from tests.runs.train_cases import TORCHRUN, Run, endless_run, metrics, processes_with, write_config
from tests.support.processes import name_of

pytestmark = [pytest.mark.long, pytest.mark.vllm_on_cpu]


def asked(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """Exit code and words of the command."""
    capsys.readouterr()
    code = scale.main(list(arguments))
    said = capsys.readouterr()
    return code, said.out + said.err


def num_engines(run: Run) -> int:
    return sum("EngineCor" in name_of(process) for process in processes_with(run.marker))


# What else goes on in the run: groups that are replaced, and evaluations; deltas of merged adapters, which a replica that comes
# late reads out of the log of versions.
BESIDE = ("algorithm.filter_groups=true", "rollout.evaluate_every_steps=2")
BESIDE += ("sync.transport=delta", "sync.log=deltas", "engine.lora.rank=4")


def test_a_replica_comes_and_goes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And the run is stopped and goes on with two."""
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text('{"question": "1+1=", "answer": "2"}\n')
    rollout = {"max_staleness": 2, "record": "all", "reward": "tests.runs.train_cases:parity_reward"}
    config = write_config(tmp_path, rollout=rollout, engine={"wrap": "ddp"}, data={"eval": str(held_out)})
    with endless_run(TORCHRUN, config, "checkpoint.every_steps=3", *BESIDE, "--nproc", "1") as run:
        folder = str(run.folder)

        def ask(*arguments: str) -> tuple[int, str]:
            return asked(capsys, folder, *arguments)

        run.wait_for(2)
        code, said = ask("--replicas", "2")
        assert code == 0 and "replica 1 in the sync from version" in said and "done: 2 replicas" in said, said
        assert num_engines(run) == 2
        run.wait_for(len(metrics(run.folder)) + 3)
        code, said = ask("--without", socket.gethostname())
        assert code == REFUSED and "0 replicas would be left, rollout.min_replicas = 1 are needed" in said
        code, said = ask("--replicas", "1")
        assert code == 0 and "replica 1 to leave" in said and "done: 1 replicas" in said, said
        code, said = ask("--replicas", "99")
        assert code == REFUSED and "rollout.replicas=99 times rollout.tensor_parallel=1 needs 99 CPUs, Ray has" in said
        run.wait_for(len(metrics(run.folder)) + 3)
        assert num_engines(run) == 1
        assert ask("--replicas", "2", "--no-wait")[0] == 0
        run.wait_for(len(metrics(run.folder)) + 1)
        (run.folder / STOP_FILE).touch()
    assert run.process.returncode == STOPPED, run.said.read_text()
    check_run(run.folder, run.said.read_text())
    with endless_run(TORCHRUN, config, "checkpoint.every_steps=3", *BESIDE, "--nproc", "1") as again:
        again.wait_for(len(metrics(run.folder)) + 1)
        while metrics(run.folder)[-1]["sync/replicas"] < 2:
            again.wait_for(len(metrics(run.folder)) + 1)
        (run.folder / STOP_FILE).touch()
    assert again.process.returncode == STOPPED, again.said.read_text()
    check_run(run.folder, again.said.read_text(), is_resumed=True)
    steps, num_steps = [line["step"] for line in read_evaluations(run.folder)], len(metrics(run.folder))
    assert steps == sorted(set(steps)) and {0, *range(2, num_steps, 2)} <= set(steps)


def test_a_replica_gets_the_adapter_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Over the base model that it starts with; what each replica holds is read back and compared at every sync."""
    rollout = {"max_staleness": 2, "record": "all", "reward": "tests.runs.train_cases:parity_reward"}
    lora = {"rank": 4, "sync": "adapter"}
    config = write_config(tmp_path, rollout=rollout, engine={"wrap": "ddp", "lora": lora}, sync={"verify": "readback"})
    with endless_run(TORCHRUN, config, "--nproc", "1") as run:
        run.wait_for(2)
        code, said = asked(capsys, str(run.folder), "--replicas", "2")
        assert code == 0 and "done: 2 replicas" in said, said
        run.wait_for(len(metrics(run.folder)) + 3)
        code, said = asked(capsys, str(run.folder), "--replicas", "1")
        assert code == 0 and "done: 1 replicas" in said, said
        run.wait_for(len(metrics(run.folder)) + 2)
        (run.folder / STOP_FILE).touch()
    assert run.process.returncode == STOPPED, run.said.read_text()
    check_run(run.folder, run.said.read_text())
    assert all(line["sync/verified"] == 1 for line in metrics(run.folder))


def check_run(folder: Path, said: str, *, is_resumed: bool = False) -> None:
    """That each prompt was trained once, and by fresh enough weights."""
    assert "is lost and is restarted" not in said, said
    lines, trained = metrics(folder), list[int]()
    counts = [int(line["sync/replicas"]) for line in lines]
    assert [count for count, before in zip(counts, [0, *counts], strict=False) if count != before][:3] == [1, 2, 1]
    assert not is_resumed or counts[-1] == 2
    assert all(0 <= line["staleness/max"] <= 2 for line in lines)
    assert [line["version"] for line in lines] == list(range(1, len(lines) + 1))
    for step, path in sorted(paths_of(folder).items()):
        record = load_record(path)
        trained += [group.key for group in record.groups]
        versions = np.concatenate([done.weight_versions for group in record.groups for done in group.members.values()])
        assert step - 3 <= versions.min() and versions.max() <= step - 1
    checkpoint = newest_checkpoint(folder)
    assert checkpoint is not None
    progress = load_progress(checkpoint)
    assert progress is not None and len(trained) == len(set(trained)) == progress.num_trained == 8 * len(lines)
    known = {*trained, *(group.key for group in progress.groups)}
    replaced = sum(int(line.get("rollout/filtered_groups", 0)) for line in lines)
    assert len(known) == len(trained) + len(progress.groups) and known <= set(range(progress.num_begun))
    assert (replaced > 0) == (len(known) < progress.num_begun)


def test_what_cannot_be_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit) as left:
        scale.main([str(tmp_path / "nothing"), "--replicas", "2"])
    assert left.value.code == REFUSED and "there is no such run folder" in capsys.readouterr().err
    save_config(load_config(write_runnable(tmp_path)), tmp_path / "config.yaml")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as left:
        scale.main([".", "--replicas", "2"])
    assert left.value.code == REFUSED and ".: no run goes on in this folder" in capsys.readouterr().err
