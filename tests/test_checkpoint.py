"""What a checkpoint may hold and whose it is; that resuming is bit for bit is in test_engine.py and test_lora.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from megasync.config.check import check_config
from megasync.config.errors import ConfigError
from megasync.config.load import load_config
from megasync.files import set_aside
from tests.ranks import run_ranks
from tests.tiny_models import write_tiny_model
from tests.train_cases import launch, metrics, write_config


@pytest.mark.parametrize("how", ["whole", "one value"])
def test_no_code_in_a_checkpoint_is_executed(tmp_path: Path, how: str) -> None:
    model = str(write_tiny_model(tmp_path / "model", "qwen3", True, num_hidden_layers=1))
    arguments = {"path": model, "root": str(tmp_path / "checkpoints"), "how": how, "marker": str(tmp_path / "executed")}
    (told,) = run_ranks(1, "tests.step_cases:restore_planted", arguments)
    print(told)
    assert not (tmp_path / "executed").exists()
    assert "rank_00000.pt" in told and "none of which was loaded" in told and "model.path=" in told


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def steps_of(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step_")) for path in (folder / "checkpoints").iterdir())


def test_a_fresh_run_leaves_a_former_one_as_it_is(tmp_path: Path) -> None:
    """It is moved aside, as a whole; what resumes afterwards is the new one."""
    algorithm, checkpoint = {"name": "sft", "num_minibatches": 1}, {"every_steps": 1, "keep": 3}
    config = write_config(tmp_path, engine={"wrap": "ddp"}, algorithm=algorithm, checkpoint=checkpoint)
    folder, former = tmp_path / "runs" / "run", tmp_path / "runs" / "run.1"

    def run(*overrides: str) -> str:
        done = launch(config, *overrides, ranks=1)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    run("run.steps=5")
    before = content(folder)
    told = run("run.steps=2", "checkpoint.resume=never")
    print(steps_of(folder), sorted(path.name for path in folder.parent.iterdir()))
    assert steps_of(folder) == [1, 2] and len(metrics(folder)) == 2
    assert content(former) == before and steps_of(former) == [3, 4, 5]
    assert str(former) in told
    run("run.steps=3", "checkpoint.resume=auto")
    assert steps_of(folder) == [1, 2, 3] and [line["step"] for line in metrics(folder)] == [0, 1, 2]
    assert content(former) == before
    overrides = ["checkpoint.resume=never", f"model.path={folder}/checkpoints/step_00000003/hf"]
    with pytest.raises(ConfigError, match=r"model\.path = .*: lies in the run's folder") as caught:
        check_config(load_config(str(config), overrides), 1)
    assert "run.name=NAME" in str(caught.value)


def test_results_are_set_aside_under_the_first_free_name(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "metrics.jsonl").touch()
    assert set_aside(folder) is None, "a run that died before its first step has no results"
    for number in (1, 2):
        folder.mkdir(exist_ok=True)
        (folder / "evaluations.jsonl").write_text(str(number))
        assert set_aside(folder) == tmp_path / f"run.{number}"
        assert (tmp_path / f"run.{number}" / "evaluations.jsonl").read_text() == str(number)
    assert set_aside(folder) is None
