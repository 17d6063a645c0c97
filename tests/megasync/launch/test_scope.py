"""What is left of a launcher that is killed."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from engine.algorithm import AlgorithmConfig
from megasync.config.errors import ConfigError
from megasync.config.schema import Config, RolloutConfig
from megasync.launch import scope
from megasync.launch.scope import RAY_ADDRESS, check_ray

STARTS_PROCESSES = True  # see ranks.py
LAUNCHER = """
import subprocess, tempfile
from megasync.launch.scope import run_scope
with run_scope():
    subprocess.Popen(["sleep", "300"])
    print(tempfile.gettempdir(), flush=True)
    print("ends", flush=True)
"""


def test_temporary_files_go_after_a_launcher_that_is_killed_while_it_ends_its_processes() -> None:
    with subprocess.Popen([sys.executable, "-c", LAUNCHER], stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        folder = Path(launcher.stdout.readline().strip())
        assert folder.name.startswith("ms-") and folder.is_dir()
        (child,) = [each for each in psutil.Process(launcher.pid).children() if each.name() == "sleep"]
        assert launcher.stdout.readline() == "ends\n"
        time.sleep(1)  # within the 10 s that its processes have to end
        launcher.kill()
    child.kill()
    deadline = time.monotonic() + 60
    while folder.exists() and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not folder.exists()


@pytest.mark.parametrize("holds", [False, True])
@pytest.mark.parametrize("command", ["run_scope()", "scratch_folder(), run_scope(): pass\nwith scratch_folder()"])
def test_the_cache_of_kernels_stays_where_there_are_some(tmp_path: Path, holds: bool, command: str) -> None:
    """torch makes its folder where nothing is compiled, too: in bisect after the replicas have ended."""
    code = f"""
import os
from pathlib import Path
from megasync.launch.scope import run_scope
from megasync.tools.serving.replicas import scratch_folder
with {command}:
    cache = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    cache.mkdir()
    if {holds}:
        (cache / "kernel.so").touch()
"""
    without = {name: value for name, value in os.environ.items() if name != "TORCHINDUCTOR_CACHE_DIR"}
    subprocess.run([sys.executable, "-c", code], env=without | {"TMPDIR": str(tmp_path)}, check=True)
    assert [path.name for path in tmp_path.rglob("*")] == [f"torchinductor_{os.getuid()}", "kernel.so"] * holds


def test_a_ray_that_does_not_answer_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(RAY_ADDRESS, raising=False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        for there in (address, f"ray://{address}", "local", "auto"):
            check_ray(Config(rollout=RolloutConfig(ray_address=there)))
    with pytest.raises(ConfigError, match=f"rollout.ray_address = {address}: Connection refused"):
        check_ray(Config(rollout=RolloutConfig(ray_address=address)))
    with pytest.raises(ConfigError, match=r"rollout.ray_address = no..host:6379: .*label empty or too long"):
        check_ray(Config(rollout=RolloutConfig(ray_address="no..host:6379")))
    check_ray(Config(rollout=RolloutConfig(ray_address=address), algorithm=AlgorithmConfig(name="sft")))  # starts no replica


OF_RUN = "--temp_dir=/tmp/ms-7fruaoq5/ray-sw0imdn9"


@pytest.mark.parametrize(
    ("folders", "reported"),
    [
        ((), "no Ray runs here"),
        ((OF_RUN,), "is of another run"),
        (("--temp_dir=/tmp/ray-n8_78as7",), "is of another run"),
        (("--temp_dir=/tmp/ray",), ""),
        ((OF_RUN, "--temp_dir=/scratch/ray-of-mine"), ""),
    ],
)
def test_auto_takes_no_ray_of_another_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, folders: tuple[str, ...], reported: str
) -> None:
    """Which lets nobody in: `ray.init` would wait for many minutes."""
    commands = [["/lib/ray/core/src/ray/raylet/raylet", folder, "--port=1"] for folder in folders]
    there = [SimpleNamespace(info={"cmdline": each}) for each in (["sleep", OF_RUN], None, *commands)]
    monkeypatch.setattr(psutil, "process_iter", lambda _: there)
    monkeypatch.setattr(scope, "CURRENT_CLUSTER", tmp_path / "none")
    for name in (RAY_ADDRESS, "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    config = Config(rollout=RolloutConfig(ray_address="auto"))
    with pytest.raises(ConfigError, match=f"rollout.ray_address = auto: .*{reported}") if reported else nullcontext():
        check_ray(config)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{closed.getsockname()[1]}"
        (tmp_path / "none").write_text(address)
        with pytest.raises(ConfigError, match=f"rollout.ray_address = auto: {address}: "):
            check_ray(config)
