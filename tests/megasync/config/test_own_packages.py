"""A user's files with the names of our packages: every process imports ours, and theirs are refused with the remedy."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megasync.cli import OF_LANES
from megasync.config.errors import ConfigError
from megasync.config.own_packages import LIBRARIES
from megasync.launch.included import included_modules
from megasync.rewards.resolve import resolve_rewards
from tests.support.config_files import ROOT, write, write_runnable


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_runnable(tmp_path)
    for name in ("engine.py", "bridge/__init__.py", "exact.py"):
        write(tmp_path / name, f"raise RuntimeError('the user\\'s {name}')")
    write(tmp_path / "mine.py", "from helpers import worth\n\ndef score(sample): return worth\n")
    write(tmp_path / "helpers.py", "worth = 1.0\n")
    write(tmp_path / "lost.py", "from exact import close\n\ndef score(sample): return close\n")
    return tmp_path


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    own = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *command], cwd=folder, env=own, capture_output=True, text=True, check=False, timeout=400
    )


def test_a_run_is_checked_beside_files_of_our_names(folder: Path) -> None:
    checked = run(folder, "-m", "megasync", "train", "run.yaml", "--check", "rollout.reward=mine:score")
    assert checked.returncode == 0 and "mine:score" in checked.stdout, checked.stderr
    named = run(folder, "-m", "megasync", "train", "run.yaml", "--check", "rollout.reward=engine:score")
    assert named.returncode == 2 and "rename engine.py" in named.stderr and "Traceback" not in named.stderr
    lost = run(folder, "-m", "megasync", "train", "run.yaml", "--check", "rollout.reward=lost:score")
    assert lost.returncode == 2 and "cannot import name 'close' from 'exact'" in lost.stderr and "rename" in lost.stderr


HIDING = ["megasync.py", "random.py", "requests.py", "torch.py", "typing_extensions.py", "yaml/__init__.py"]


@pytest.mark.parametrize("name", HIDING)
def test_a_file_that_hides_what_every_process_imports_is_refused_by_the_command(folder: Path, name: str) -> None:
    write(folder / name, "raise RuntimeError('the user\\'s')")
    started = f"import sys; sys.path[:] = ['{ROOT}', *sys.path[1:]]; from megasync.cli import entry; entry()"
    done = run(folder, "-c", started, "plan", "run.yaml")
    assert done.returncode == 2 and f"rename {name}" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.long
def test_each_library_that_a_run_imports_is_among_those_that_must_not_be_hidden(tmp_path: Path) -> None:
    """By the launcher, a rank, or a replica."""
    program = (
        "import sys, sysconfig, megasync.launch.torchrun, megasync.train, megasync.run.loop, bridge.replicas.replica\n"
        "import vllm.v1.engine.async_llm, vllm.v1.engine.core, vllm.v1.worker.gpu_worker\n"
        "for name in sorted({each.partition('.')[0] for each in sys.modules}):\n"
        "    file, own = getattr(sys.modules.get(name), '__file__', None) or '', sysconfig.get_path('purelib') + '/' + name\n"
        "    if file.startswith((own + '/', own + '.')): print(name)"
    )
    done = run(tmp_path, "-c", program)
    assert done.returncode == 0, done.stderr
    imported = {name for name in done.stdout.split() if not name.startswith("_")} - sys.stdlib_module_names
    assert "vllm" in imported and sorted(imported - {*LIBRARIES, *OF_LANES}) == []


def test_other_processes_find_ours(folder: Path) -> None:
    """As ranks, reward processes and vLLM's plug-in are started."""
    for program in (
        "import megasync, engine, bridge, exact; print(engine.__file__, bridge.__file__, exact.__file__)",
        "import sys; sys.path.insert(0, ''); import megasync.rewards.program, engine, bridge, exact; print(engine.__file__)",
    ):
        done = run(folder, "-c", program)
        assert done.returncode == 0 and str(ROOT / "engine" / "__init__.py") in done.stdout, done.stderr


def test_what_travels_with_a_job_has_other_names(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"rename bridge, engine\.py, exact\.py"):
        included_modules([folder])
    assert included_modules([folder / "mine.py"]) == [folder / "mine.py"]


@pytest.mark.parametrize("name", ["engine", "bridge.replicas", "exact"])
def test_a_package_of_ours_is_no_reward(name: str) -> None:
    with pytest.raises(ConfigError, match=f"rollout.reward = .*{name}:score.*megasync's packages"):
        resolve_rewards(f"{name}:score")
