"""Wherever the program lies, it is whole: in a clone, in what travels to a cluster, and as a package that pip installed.

python -m pytest tests/megasync/config/test_shipped.py
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from setuptools import find_packages

from megasync.config.own_packages import PACKAGES
from megasync.config.shipped import CLONE, FOLDERS, shipped
from megasync.submit import UPLOADED

NAMES = ("configs/quickstart.yaml", "configs/quickstart_sft.yaml", "locks/smollm2.txt", "launch/templates/slurm.sh")
LOOK = """
from importlib import import_module
import sys
from megasync.config.own_packages import PACKAGES
from megasync.config.shipped import shipped
for module in ("bridge.replicas.pool", "exact.machine", "megasync.run.session"):  # the last imports engine, too
    print(import_module(module).__file__)
for name in sys.argv[1:]:
    assert shipped(name).is_file(), shipped(name)
    print(shipped(name))
"""


def run(root: Path, *command: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """With nothing of this clone on the import path."""
    environment = os.environ | {"PYTHONPATH": str(root), "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [sys.executable, "-P", *command], cwd=cwd or root, env=environment, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the clone, installed by pip."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("site")
    for name in ("setup.py", "pyproject.toml", "README.md"):
        shutil.copy(CLONE / name, source)
    for folder in (*PACKAGES, *FOLDERS):
        shutil.copytree(CLONE / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    options = ("--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--target", str(target))
    done = run(source, "-m", "pip", "install", *options, str(source))
    assert done.returncode == 0, done.stderr
    return target


def test_all_packages_are_shipped() -> None:
    assert {name.partition(".")[0] for name in find_packages(str(CLONE))} - {"tests", "examples", "bench"} == set(PACKAGES)
    assert all(shipped(name).is_file() for name in NAMES)


def test_files_uploaded_to_a_cluster_are_complete(tmp_path: Path) -> None:
    for name in UPLOADED:
        (tmp_path / name).symlink_to(CLONE / name)
    done = run(tmp_path, "-c", LOOK.replace(".resolve()", ""))
    assert done.returncode == 0, done.stderr
    assert {Path(name).parts[0] for name in NAMES} <= set(UPLOADED)


@pytest.mark.long
def test_an_installed_package_is_complete(installed: Path, tmp_path: Path) -> None:
    done = run(installed, "-c", LOOK, *NAMES, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert all(line.startswith(str(installed)) for line in done.stdout.splitlines())


@pytest.mark.long
def test_commands_that_need_a_clone_are_refused(installed: Path, tmp_path: Path) -> None:
    config = str(installed / "megasync/shipped/configs/quickstart.yaml")
    for command in (
        ["render", "slurm", config, "--nodes", "2", "checkpoint.resume=auto"],
        ["submit", config, "--address", "http://localhost:1", "--num-ranks", "1"],
    ):
        done = run(installed, "-m", "megasync", *command, cwd=tmp_path)
        assert done.returncode == 2
        assert "needs a clone" in done.stderr, done.stderr
