"""Launchers of several nodes before ranks start: missing nodes, differing ones, a stop. Without root.

Whole runs on nodes that are namespaces are in tests/runs/test_nodes.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megasync.launch.ray_cluster import free_port
from tests.runs.train_cases import write_supervised_config
from tests.support.rewards import until

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a supervised run."""
    return write_supervised_config(tmp_path_factory.mktemp("sft"))


def start(config: Path, port: int, *arguments: str) -> subprocess.Popen[str]:
    flags = ["--nodes", "2", "--head", f"127.0.0.1:{port}"]
    command = [sys.executable, "-m", "megasync.nodes", str(config), *flags, *arguments]
    return subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def end(*launchers: subprocess.Popen[str]) -> list[tuple[int, str]]:
    """Exit codes and output."""
    outputs = [launcher.communicate(timeout=600)[0] for launcher in launchers]
    return [(launcher.returncode, output) for launcher, output in zip(launchers, outputs, strict=True)]


def test_a_node_that_does_not_come_is_named(config: Path) -> None:
    host = os.uname().nodename
    ((code, output),) = end(start(config, free_port(), "--nodes", f"{host},other", "--wait-seconds", "3"))
    assert code == 1, output
    assert f"gave up after 3 s: 1 of 2 nodes are here: {host} (" in output and "not here: other" in output


def test_without_a_head_a_node_gives_up(config: Path) -> None:
    port = free_port()
    ((code, output),) = end(start(config, port, "--wait-seconds", "2", "--node-rank", "1"))
    assert code == 1, output
    assert f"waiting: the head node 127.0.0.1:{port} is not here: Connection refused" in output
    assert f"gave up after 2 s: nothing answers at 127.0.0.1:{port}: Connection refused" in output


def test_a_node_that_differs_ends_both_before_the_start(config: Path) -> None:
    port = free_port()
    for code, output in end(start(config, port, "run.name=refused"), start(config, port, "run.name=refused", "run.seed=1")):
        assert code == 2, output
        assert ": another config\n" in output and "run.seed" in output
    assert not (config.parent / "runs" / "refused" / "metrics.jsonl").exists()


@pytest.mark.long
def test_a_stop_while_nodes_are_waited_for_and_a_node_that_leaves(config: Path) -> None:
    """The member that leaves is not here any more; the head ends by the stop, with the exit code of a run that can resume."""
    port, folder = free_port(), config.parent / "runs" / "stopped"
    flags = ["--nodes", "3", "run.name=stopped"]
    head, member = start(config, port, *flags), start(config, port, *flags, "--node-rank", "1")
    assert head.stdout is not None
    lines = iter(head.stdout.readline, "")
    assert any("2 of 3 nodes are here" in line for line in lines)
    member.terminate()
    assert end(member)[0][0] == 143
    assert any("1 of 3 nodes are here" in line for line in lines)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "stop").touch()
    begin = time.monotonic()
    until(lambda: head.poll() is not None, 120.0)
    assert head.returncode == 75 and time.monotonic() - begin < 20
