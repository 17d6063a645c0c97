"""What a checkpoint may hold and whose it is; resuming is in test_resume.py, test_engine.py and test_lora.py."""

from __future__ import annotations

import itertools
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.checkpoint import newest, saving
from engine.checkpoint.shards import Dim, boxes, pieces
from megasync.checks.check import check_config
from megasync.config.errors import ConfigError
from megasync.config.load import load_config
from megasync.config.files import archive_folder
from tests.support.ranks import run_ranks
from tests.support.tiny_models import write_tiny_model
from tests.runs.train_cases import metrics, train, write_config


@pytest.mark.parametrize("how", ["whole", "one value", "tensors", "index"])
def test_no_code_in_a_checkpoint_is_executed(tmp_path: Path, how: str) -> None:
    model = str(write_tiny_model(tmp_path / "model", "qwen3", True, num_hidden_layers=1))
    arguments = {"path": model, "root": str(tmp_path / "checkpoints"), "how": how, "marker": str(tmp_path / "executed")}
    (reported,) = run_ranks(1, "tests.engine.step_cases:restore_planted", arguments)
    print(reported)
    assert not (tmp_path / "executed").exists()
    expected = {"tensors": "rank_00000-000.safetensors: cannot be read", "index": "index.json: is damaged"}
    assert expected.get(how, "random_00000.pt: holds objects that no checkpoint of this version has") in reported


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.data())
def test_a_range_of_elements_is_a_few_boxes(shape: list[int], data: st.DataObject) -> None:
    size = math.prod(shape)
    start = data.draw(st.integers(0, size))
    end = data.draw(st.integers(start, size))
    whole = np.arange(size).reshape(shape)
    found = [whole[tuple(slice(o, o + n) for o, n in zip(*box, strict=True))].ravel() for box in boxes(tuple(shape), start, end)]
    assert [value for part in found for value in part.tolist()] == list(range(start, end))
    assert len(found) <= 2 * len(shape) - 1


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.integers(0, 5), st.data())
def test_shards_of_any_layout_fill_the_tensor(rows: int, columns: int, ranks: int, padding: int, data: st.DataObject) -> None:
    """Two halves of rows, as gate and up are, over tensor-parallel ranks, each cut over data-parallel ranks; rows of padding."""
    padded = rows * ranks
    whole = max(1, padded - padding)
    filled = np.zeros((whole, 2, columns), int)
    for rank in range(ranks):
        dims = [Dim(rows, whole, rows * rank), Dim(2, 2, 0), Dim(columns, columns, 0)]
        size = rows * 2 * columns
        cuts = sorted(data.draw(st.lists(st.integers(0, size), max_size=3)))
        for start, end in itertools.pairwise([0, *cuts, size]):
            local = np.arange(size)[start:end]
            for (offsets, sizes), begin in pieces(dims, start, end):
                inside = tuple(slice(o - dim.offset, o - dim.offset + n) for o, n, dim in zip(offsets, sizes, dims, strict=True))
                expected = np.arange(size).reshape(rows, 2, columns)[inside].ravel()
                assert local[begin : begin + math.prod(sizes)].tolist() == expected.tolist()
                filled[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))] += 1
    assert (filled == 1).all()


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def steps_of(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step_")) for path in (folder / "checkpoints").iterdir())


def test_a_step_that_is_written_once_more_is_whole_at_any_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the process is killed as it removes the former one, or those that are too many."""

    def killed(path: Path) -> None:
        raise KeyboardInterrupt(str(path))

    written = tmp_path / ".partial_step_00000002"
    for folder, text in ((tmp_path / "step_00000001", "1"), (tmp_path / "step_00000002", "former"), (written, "2")):
        folder.mkdir()
        (folder / "index.json").write_text(text)
    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        saving._commit(written, tmp_path / "step_00000002", keep=1)
    found = newest(tmp_path)
    assert found == tmp_path / "step_00000002" and (found / "index.json").read_text() == "2"


def test_a_fresh_run_leaves_a_former_one_as_it_is(tmp_path: Path) -> None:
    """It is moved aside, as a whole; what resumes afterwards is the new one."""
    algorithm, checkpoint = {"name": "sft", "num_minibatches": 1}, {"every_steps": 1, "keep": 3}
    config = write_config(tmp_path, engine={"wrap": "ddp"}, algorithm=algorithm, checkpoint=checkpoint)
    folder, former = tmp_path / "runs" / "run", tmp_path / "runs" / "run.1"

    def run(*overrides: str) -> str:
        code, said = train(config, *overrides, ranks=1)
        assert code == 0, said
        return said

    run("run.steps=5")
    before = content(folder)
    reported = run("run.steps=2", "checkpoint.resume=never")
    print(steps_of(folder), sorted(path.name for path in folder.parent.iterdir()))
    assert steps_of(folder) == [1, 2] and len(metrics(folder)) == 2
    assert content(former) == before and steps_of(former) == [3, 4, 5]
    assert str(former) in reported
    run("run.steps=3", "checkpoint.resume=auto")
    assert steps_of(folder) == [1, 2, 3] and [line["step"] for line in metrics(folder)] == [1, 2, 3]
    assert content(former) == before
    overrides = ["checkpoint.resume=never", f"model.path={folder}/checkpoints/step_00000003/hf"]
    with pytest.raises(ConfigError, match=r"model\.path = .*: lies in the run's folder") as caught:
        check_config(load_config(str(config), overrides), 1)
    assert "run.name=NAME" in str(caught.value)


def test_results_are_archive_folder_under_the_first_free_name(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "metrics.jsonl").touch()
    assert archive_folder(folder) is None, "a run that died before its first step has no results"
    for number in (1, 2):
        folder.mkdir(exist_ok=True)
        (folder / "evaluations.jsonl").write_text(str(number))
        assert archive_folder(folder) == tmp_path / f"run.{number}"
        assert (tmp_path / f"run.{number}" / "evaluations.jsonl").read_text() == str(number)
    assert archive_folder(folder) is None
