"""Which variables make a process a rank: all of torchrun's; what job controllers set, or a shell has left, does not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megasync.config.errors import ConfigError
from megasync.launch import launcher
from megasync.launch.ray_cluster import free_port
from tests.support.config_files import ROOT, write_runnable

WHOLE = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
JOB = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "pod-0", "MASTER_PORT": "23456", "PET_NNODES": "1"}  # of one pod


@pytest.mark.parametrize(
    ("environment", "nproc", "expected"),
    [
        ({}, None, False),
        ({}, 2, False),
        (JOB, 2, False),
        ({"WORLD_SIZE": "8"}, None, False),
        ({"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, None, False),  # of sbatch
        ({"SLURM_STEP_NUM_TASKS": "1"}, None, False),
        (WHOLE | {"SLURM_STEP_NUM_TASKS": "2"}, None, True),
        ({"OMPI_COMM_WORLD_SIZE": "1", "PMI_SIZE": "1"}, None, False),
        ({"OMPI_COMM_WORLD_SIZE": "", "SLURM_STEP_NUM_TASKS": ""}, None, False),
        ({"PMI_SIZE": "2", "SLURM_STEP_NUM_TASKS": "1"}, None, False),
        (WHOLE | {"OMPI_COMM_WORLD_SIZE": "2"}, None, True),
        (WHOLE, None, True),
        (WHOLE, 2, True),
    ],
)
def test_a_rank_has_all_of_the_variables(environment: dict[str, str], nproc: int | None, expected: bool) -> None:
    assert launcher.is_rank(environment, nproc) is expected


@pytest.mark.parametrize(
    ("environment", "nproc", "words"),
    [
        ({"RANK": "3", "WORLD_SIZE": "8"}, None, ["RANK=3, WORLD_SIZE=8", "LOCAL_RANK"]),
        ({"RANK": "3", "WORLD_SIZE": "8"}, None, ["env -u RANK -u WORLD_SIZE", "--node-rank 3"]),
        ({**JOB, "RANK": "1", "WORLD_SIZE": "2"}, 2, ["RANK=1, WORLD_SIZE=2", "--nodes 2", "MASTER_ADDR=pod-0"]),
        ({"RANK": "1"}, None, ["RANK=1", "WORLD_SIZE"]),
        (WHOLE, 4, ["--nproc 4: this process is rank 1 of 2"]),
        ({**WHOLE, "RANK": "2"}, None, ["no rank of so many"]),
        ({"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3"}, None, ["SLURM_STEP_NUM_TASKS = 4", "srun --ntasks=1"]),
        ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "0"}, 2, ["OMPI_COMM_WORLD_SIZE = 4", "mpirun -np 1"]),
        ({"SLURM_STEP_NUM_TASKS": "2", "PMI_SIZE": "2"}, None, ["env -u SLURM_STEP_NUM_TASKS -u PMI_SIZE megasync"]),
        ({"SLURM_STEP_NUM_TASKS": "", "PMI_SIZE": "2"}, None, ["env -u PMI_SIZE megasync"]),
        ({"PMI_SIZE": "2", "PMI_RANK": "1"}, None, ["PMI_SIZE = 2", "mpiexec -n 1"]),
        ({"JSM_NAMESPACE_SIZE": "6"}, None, ["JSM_NAMESPACE_SIZE = 6", "jsrun --nrs 1"]),
        ({**WHOLE, "RANK": "x"}, None, ["RANK = 'x': a whole number"]),
    ],
)  # fmt: skip
def test_a_part_of_them_is_refused_by_name(environment: dict[str, str], nproc: int | None, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        launcher.is_rank(environment, nproc)
    assert all(word in str(caught.value) for word in [*words, "remedy:"]), str(caught.value)


def test_a_store_that_nobody_has_opened_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "FIRST_RANK_SECONDS", 0.5)
    port = str(free_port())
    launcher.await_store({**WHOLE, "RANK": "0", "MASTER_PORT": port})  # its own
    with pytest.raises(ConfigError) as caught:
        launcher.await_store({**WHOLE, "MASTER_PORT": port})
    assert f"127.0.0.1:{port}, within 0.5 s" in str(caught.value) and "RANK=1" in str(caught.value)


def test_what_is_forgotten() -> None:
    environment = {**WHOLE, **JOB, "HOME": "/x"}
    assert launcher.forget(environment) == "RANK=0, WORLD_SIZE=1" and environment == {"HOME": "/x"}


def test_a_command_under_a_job_controller(tmp_path: Path) -> None:
    config = str(write_runnable(tmp_path))

    def train(own: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "megasync", "train", config, *arguments]
        return subprocess.run(command, env=os.environ | own, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)

    refused = train({"RANK": "3", "WORLD_SIZE": "8"})
    assert refused.returncode == 2 and "RANK=3, WORLD_SIZE=8" in refused.stderr and not (tmp_path / "runs").exists()
    checked = train(JOB, "--nproc", "2", "--check")
    assert checked.returncode == 0 and "2 ranks" in checked.stdout, checked.stderr
    assert "RANK=0, WORLD_SIZE=1 in the environment" in checked.stderr
    left = train({"LOCAL_RANK": "1"}, "--check")  # of no rank
    assert left.returncode == 0 and "2 ranks" in left.stdout, left.stderr
