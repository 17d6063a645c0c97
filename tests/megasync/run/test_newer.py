"""Which weights newer than a checkpoint a run can go on from, and what is said where it cannot.

python -m pytest tests/megasync/run/test_newer.py
"""

from __future__ import annotations

import resource
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from bridge.versions.file import PARTIAL, path_of, there
from bridge.versions.reader import VersionReader
from bridge.versions.writer import VersionWriter
from megasync.checks.check import check_config
from megasync.checks.resume import check_resume
from megasync.config.errors import ConfigError
from megasync.config.files import CHECKPOINTS, VERSIONS
from megasync.config.load import load_config
from megasync.data.data import PromptOrder
from megasync.rollouts.progress import Progress, SavedGroup
from megasync.run.checkpoints import Checkpoints, NewerWeights, find_newer, forget, mark, marked, unmark
from tests.support.config_files import write_runnable

COUNTS = st.integers(0, 2**40)


ORDERS = st.none() | st.builds(PromptOrder, COUNTS, COUNTS, st.booleans())


@given(COUNTS, COUNTS, COUNTS, st.none() | st.floats(0, 1e9), st.lists(COUNTS, unique=True), ORDERS)
def test_a_marker_tells_where_prompts_were(
    step: int, trained: int, begun: int, tokens: float | None, keys: list[int], order: PromptOrder | None
) -> None:
    progress = Progress(trained, begun, tokens, tuple(map(SavedGroup, keys)), order)
    with tempfile.TemporaryDirectory() as folder:
        assert marked(Path(folder)) is None
        mark(Path(folder), step, progress)
        assert marked(Path(folder)) == (step, progress)
        unmark(Path(folder))
        assert marked(Path(folder)) is None


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """Versions 8 to 12, the last marked."""
    write_runnable(tmp_path)
    folder = tmp_path / "runs" / "rl"
    writer = VersionWriter(folder / VERSIONS, stage=0, num_stages=1, keeps_weights=True, full_every=3)
    for version in range(8, 13):
        writer.write(version, iter([("model.embed_tokens.weight", torch.full((2, 3), float(version)))]))
    mark(folder, 12, Progress(num_trained=48))
    return folder


def found(run_folder: Path, than: int) -> tuple[NewerWeights | None, str]:
    return find_newer(run_folder, run_folder.parents[1] / "model", than)


def test_what_is_marked_is_rebuilt(run_folder: Path) -> None:
    newer, note = found(run_folder, 10)
    assert newer is not None and (newer.step, newer.progress.num_trained, note) == (12, 48, "")
    (file,) = newer.folder.glob("*.safetensors")
    assert torch.equal(load_file(file)["model.embed_tokens.weight"], torch.full((2, 3), 12.0))
    assert (newer.folder / "config.json").is_file()
    again, _ = found(run_folder, 10)
    assert again == newer, "also where a start that was killed has left the folder"
    forget(run_folder)
    assert not list((run_folder / CHECKPOINTS).iterdir())


def test_where_there_is_nothing_newer_the_checkpoint_is_gone_on_from(run_folder: Path) -> None:
    folder = run_folder / VERSIONS
    assert found(run_folder, 12) == (None, f"{folder}: has no weights that are newer than the checkpoint of step 12")
    path_of(folder, 11, 0).unlink()  # version 12 was added to it
    newer, note = found(run_folder, 10)
    assert newer is None and "version 11 of stage 0 is missing, which version 12 was added to" in note
    path = path_of(folder, 12, 0)
    path.write_bytes(path.read_bytes()[:-5])
    newer, note = found(run_folder, 10)
    assert newer is None and "is torn" in note
    unmark(run_folder)
    assert found(run_folder, 10)[1].endswith("newer than the checkpoint of step 10")
    assert not list((run_folder / CHECKPOINTS).iterdir())


@pytest.fixture
def rank() -> Iterator[None]:
    """The only one of a group."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.usefixtures("rank")
@pytest.mark.parametrize("log", ["off", "digests", "deltas"])
def test_versions_of_steps_that_are_trained_again_go_whatever_log_the_run_has(log: str, run_folder: Path) -> None:
    (run_folder / CHECKPOINTS / "step_00000010").mkdir(parents=True)
    config = load_config(run_folder.parents[1] / "run.yaml", ["run.name=rl", f"sync.log={log}"])
    checkpoints = Checkpoints(config)
    assert checkpoints.begin_folder() is None
    assert VersionReader(run_folder / VERSIONS).versions == [8, 9, 10, 11, 12] and marked(run_folder) is not None
    checkpoints.forget_later_steps()
    assert VersionReader(run_folder / VERSIONS).versions == [8, 9, 10] and marked(run_folder) is None


@pytest.mark.usefixtures("rank")
def test_what_a_run_of_another_layout_left_after_the_checkpoint_goes_too(run_folder: Path) -> None:
    (run_folder / CHECKPOINTS / "step_00000010").mkdir(parents=True)
    folder = run_folder / VERSIONS
    left = VersionWriter(folder, stage=5, num_stages=9, keeps_weights=True, full_every=3)
    for version in range(10, 14):
        left.write(version, iter([("x", torch.zeros(2))]))
    (folder / f"{PARTIAL}version_00000009.stage_005").write_bytes(b"half")
    Checkpoints(load_config(run_folder.parents[1] / "run.yaml", ["run.name=rl"])).forget_later_steps()
    assert {version: list(files) for version, files in there(folder).items()} == {8: [0], 9: [0], 10: [0, 5]}
    assert not list(folder.glob(f"{PARTIAL}*"))


@pytest.mark.usefixtures("rank")
def test_versions_of_a_start_that_was_killed_before_its_first_result_go(run_folder: Path) -> None:
    """A new run begins in the same folder, perhaps with another model and another number of stages."""
    assert Checkpoints(load_config(run_folder.parents[1] / "run.yaml", ["run.name=rl"])).begin_folder() is None
    assert not list((run_folder / VERSIONS).iterdir())


@pytest.mark.usefixtures("rank")
def test_versions_that_a_run_goes_on_from_stay(run_folder: Path) -> None:
    (run_folder / CHECKPOINTS / "step_00000010").mkdir(parents=True)
    own = ["run.name=rl", "sync.log=deltas", "checkpoint.resume=newest_weights"]
    checkpoints = Checkpoints(load_config(run_folder.parents[1] / "run.yaml", own))
    assert checkpoints.begin_folder() is None
    checkpoints.forget_later_steps()
    assert VersionReader(run_folder / VERSIONS).versions == [8, 9, 10, 11, 12] and marked(run_folder) is not None


def test_where_the_disk_is_full_the_checkpoint_is_gone_on_from(run_folder: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, hard))
    try:
        newer, note = found(run_folder, 10)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert newer is None and note.startswith("the weights of step 12 cannot be read: ") and "File too large" in note
    assert not list((run_folder / CHECKPOINTS).iterdir())


@pytest.mark.parametrize(
    ("overrides", "needs"),
    [
        ([], "algorithm.name=grpo, sync.log=deltas"),
        (["sync.log=digests"], "algorithm.name=grpo, sync.log=deltas"),
        (["sync.log=deltas", "checkpoint.every_steps=0"], "checkpoint.every_steps above 0"),
        (["sync.log=deltas", "engine.lora.rank=4", "checkpoint.every_steps=5"], "engine.lora.rank=0"),
    ],
)
def test_a_run_without_such_weights_is_refused(tmp_path: Path, overrides: list[str], needs: str) -> None:
    path = write_runnable(tmp_path)
    with pytest.raises(ConfigError) as caught:
        check_config(load_config(path, ["checkpoint.resume=newest_weights", *overrides]), 1)
    found = caught.value.parts[0]
    assert (found.key, found.lines["needs"]) == ("checkpoint.resume", needs) and "checkpoint.resume=auto" in found.remedy
    check_config(load_config(path, ["checkpoint.resume=newest_weights", "sync.log=deltas", "checkpoint.every_steps=5"]), 1)


@pytest.mark.parametrize("text", ["", "{", "[1]", "{}", '{"step": "12", "num_trained": 48, "num_begun": 48, "begun": []}'])
def test_a_damaged_marker_is_refused_by_its_name(text: str, run_folder: Path) -> None:
    """Before anything starts: a machine that loses its power may leave an empty file."""
    path = run_folder / VERSIONS / "trained.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"trained\.json: cannot be read: [\s\S]*delete it, or write checkpoint\.resume=auto"):
        marked(run_folder)
    config = load_config(run_folder.parents[1] / "run.yaml", ["run.name=rl", "checkpoint.resume=newest_weights"])
    (config.run.folder / CHECKPOINTS / "step_00000010").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"trained\.json: cannot be read"):
        check_resume(config)


def test_a_log_of_another_model_is_refused_before_the_start(run_folder: Path) -> None:
    """Also where the weights of all its versions are whole."""
    own = ["run.name=rl", "checkpoint.resume=newest_weights"]
    config = load_config(run_folder.parents[1] / "run.yaml", own)
    checkpoint = config.run.folder / CHECKPOINTS / "step_00000010"
    checkpoint.mkdir(parents=True)
    pattern = r"versions, version 12: the weights lack \d+ of the tensors[\s\S]*checkpoint\.resume=auto"
    with pytest.raises(ConfigError, match=pattern):
        check_resume(config)
    newer = checkpoint.rename(checkpoint.with_name("step_00000012"))
    with pytest.raises(ConfigError, match=r"step_00000012"):  # which is empty: the log is not looked at
        check_resume(config)
    newer.rename(checkpoint)
    path_of(run_folder / VERSIONS, 12, 0).unlink()  # an error at the start; the run resumes from the checkpoint
    with pytest.raises(ConfigError, match=r"step_00000010"):
        check_resume(config)
