"""A Ray of a run's own (megasync/launch/ray_cluster.py)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megasync.launch import ray_cluster
from tests.support.ranks import ROOT

TWICE = """
import ray, os, time
from megasync.launch.ray_cluster import start_ray
def ours():
    import bridge
    return bridge.__file__

for named in ({"RAY_AUTH_MODE": "token"}, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "a" * 32}):
    os.environ.update(named)
    stop = start_ray("local")
    print(ray.get(ray.remote(num_cpus=1)(lambda: os.nice(0)).remote()), len(os.environ.get("RAY_AUTH_TOKEN", "")))
    print(ray.get(ray.remote(num_cpus=0)(ours).remote()))
    time.sleep(1.5)  # longer than its processes wait with what they report
    print(len(ray.timeline()))
    stop()
    try:
        ray.remote(lambda: 1).remote()
    except Exception as error:
        print(type(error).__name__, ray.is_initialized())
    print(sorted(name for name in os.environ if name.startswith("RAY_AUTH")))
"""

NAMED = ((64, ["RAY_AUTH_MODE"]), (32, ["RAY_AUTH_MODE", "RAY_AUTH_TOKEN"]))  # digits of the token, and what stays set


def test_a_ray_of_our_own_has_a_token_of_its_own(tmp_path: Path) -> None:
    """Twice in one process, whatever the user set after ray had been imported: a mode alone, and a token; in ~/.ray nothing is
    written or read.

    What it runs has this process's priority: a replica would starve beside a trainer's rank on the same cores. It keeps no
    record of calls, which would grow with each sample. Once it has ended, no call starts another one.
    """
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    (tmp_path / "bridge.py").write_text("raise RuntimeError('a file of the user's')")  # where it starts
    run = subprocess.run(
        [sys.executable, "-c", TWICE],
        cwd=tmp_path,
        env={**inherited, "HOME": str(tmp_path), "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    ours = str(ROOT / "bridge" / "__init__.py")
    reported = [([f"{os.nice(0)} {digits}", ours, "0", "RaySystemError False"], names) for digits, names in NAMED]
    assert run.stdout.splitlines() == [line for lines, names in reported for line in (*lines, str(names))]
    assert not (tmp_path / ".ray").exists()


def test_a_ray_that_does_not_start_is_a_runtime_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's own has any type: commands would print a traceback."""
    monkeypatch.setattr(ray_cluster, "OBJECT_STORE_BYTES", 1)
    with pytest.raises(RuntimeError, match=r"^Ray did not start: .* 1 bytes"):
        ray_cluster.start_ray("local")
