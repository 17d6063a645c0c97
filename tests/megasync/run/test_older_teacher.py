"""A version of the run as its teacher: rebuilt from the log once, and there after the log is cut.

python -m pytest tests/megasync/run/test_older_teacher.py
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from bridge.versions.writer import VersionWriter
from megasync.checks.teacher import check_teacher
from megasync.config.errors import ConfigError
from megasync.config.files import CHECKPOINTS, VERSIONS
from megasync.config.load import load_config
from megasync.config.schema import Config
from megasync.run.teacher import version_folder
from tests.support.config_files import write_runnable


def config_of(tmp_path: Path, version: int) -> Config:
    return load_config(tmp_path / "run.yaml", ["run.name=rl", f"teacher.version={version}", "teacher.objective=full"])


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """Versions 0 to 6, and a checkpoint of step 4."""
    write_runnable(tmp_path)
    folder = tmp_path / "runs" / "rl"
    writer = VersionWriter(folder / VERSIONS, stage=0, num_stages=1, keeps_weights=True, full_every=3)
    for version in range(7):
        writer.write(version, iter([("model.embed_tokens.weight", torch.full((2, 3), float(version)))]))
    (folder / CHECKPOINTS / "step_00000004").mkdir(parents=True)
    return folder


def test_a_version_is_rebuilt_once_and_stays(run_folder: Path, tmp_path: Path) -> None:
    config = config_of(tmp_path, 3)
    check_teacher(config)
    folder = version_folder(config, 3)
    (file,) = folder.glob("*.safetensors")
    assert torch.equal(load_file(file)["model.embed_tokens.weight"], torch.full((2, 3), 3.0))
    assert (folder / "config.json").is_file() and folder.parent.parent == run_folder
    shutil.rmtree(run_folder / VERSIONS)
    check_teacher(config)
    assert version_folder(config, 3) == folder


def test_versions_after_the_resumed_step_are_refused(run_folder: Path, tmp_path: Path) -> None:
    check_teacher(config_of(tmp_path, 4))
    for version in (5, 9):
        with pytest.raises(ConfigError) as caught:
            check_teacher(config_of(tmp_path, version))
        assert str(caught.value).startswith(f"teacher.version = {version}: ") and "0, 1, 2, 3, 4\n" in str(caught.value)
    fresh = load_config(tmp_path / "run.yaml", ["run.name=rl", "teacher.version=4", "checkpoint.resume=never"])
    with pytest.raises(ConfigError) as caught:
        check_teacher(fresh)
    assert str(caught.value).startswith("teacher.version = 4: ")
    assert run_folder.is_dir()
