"""What the driver of a Ray job does until its ranks run. What it does then is in tests/megasync/test_submit.py.

python -m pytest tests/megasync/launch/test_driver.py
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from megasync.config.errors import ConfigError
from megasync.config.files import STOP_FILE, is_asked_to_stop
from megasync.launch import driver
from megasync.launch.driver import PROGRAM, TrainerRank, begin_run, drive, main
from megasync.launch.processes import REFUSED
from megasync.launch.ray_cluster import start_ray
from megasync.launch.stop_request import LAUNCHED


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(LAUNCHED, "")
    path = tmp_path / "config.yaml"
    path.write_text(f"run: {{name: first, dir: {tmp_path}}}\n")
    return path


def test_the_folder_is_that_of_the_start_and_a_former_stop_is_forgotten(config: Path) -> None:
    folder = config.parent / "first"
    folder.mkdir()
    (folder / STOP_FILE).touch()
    assert begin_run("tests.megasync.rank_program:main", [str(config)]) is None
    assert is_asked_to_stop(folder), "the trainer alone"
    assert begin_run(PROGRAM, [str(config)]) == folder
    assert not is_asked_to_stop(folder)
    config.write_text("run: [")
    with pytest.raises(ConfigError, match="did not find expected node"):
        begin_run(PROGRAM, [str(config)])


def test_a_stop_since_the_job_was_submitted_is_its_own(config: Path) -> None:
    """A job may wait for a cluster's node for a long time."""
    folder = config.parent / "first"
    folder.mkdir()
    (folder / STOP_FILE).touch()
    made = (folder / STOP_FILE).stat().st_mtime
    assert begin_run(PROGRAM, [str(config)], made - 60) == folder and is_asked_to_stop(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(LAUNCHED, "")
        assert begin_run(PROGRAM, [str(config)], made + 60) == folder and not is_asked_to_stop(folder)


def test_a_config_that_cannot_be_read_is_refused_before_ray_starts(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        main(["--num-ranks", "1", "--", str(config), "run.steps=-1"])
    assert refused.value.code == REFUSED and "run.steps = -1: out of range" in capsys.readouterr().err


def test_a_rank_that_dies_before_it_runs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def die(_: TrainerRank) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    stop = start_ray("local")
    assert stop is not None
    try:
        for method in ("place", "open_store"):
            monkeypatch.setattr(driver, "TrainerRank", type("DyingRank", (TrainerRank,), {method: die}))
            with pytest.raises(RuntimeError, match=r"(?s)^a trainer rank did not start: ActorDiedError: .*name: trainer-rank-\d"):
                drive(2, "tests.megasync.rank_program:main", [], 0, 0, {})
    finally:
        stop()
