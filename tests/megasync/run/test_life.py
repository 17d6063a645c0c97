"""The life of a run: alone in its folder, ended with its launcher in any way, with last words that say how to go on.

python -m pytest tests/megasync/run/test_life.py
"""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from bridge.versions.reader import VersionReader
from bridge.versions.writer import VersionWriter
from megasync.config.errors import ConfigError
from megasync.config.files import VERSIONS, lock
from megasync.run.session import ExitCallbacks
from megasync.tools.quickstart.command import MARKER, afresh
from megasync.train import close
from megasync.train import main as train_by_hand
from tests.runs.train_cases import TORCHRUN, endless_run, environment, launch, left_running, metrics, train, write_config

ROOT = Path(__file__).resolve().parents[3]


def sft_config(folder: Path, **checkpoint: Any) -> Path:
    """Of a run without replicas."""
    algorithm, every_step = {"name": "sft", "num_minibatches": 1}, {"every_steps": 1, "keep": 2, **checkpoint}
    return write_config(folder, num_layers=2, engine={"wrap": "ddp"}, algorithm=algorithm, checkpoint=every_step)


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# Alone in its folder.


def test_a_second_start_is_refused_and_ctrl_c_ends_the_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = sft_config(tmp_path)
    with endless_run(TORCHRUN, config, "--nproc", "1") as run:
        run.wait_for(2)
        (rank,) = run.ranks()
        done = launch(config, "run.steps=100000", "checkpoint.resume=never", ranks=1)
        assert done.returncode == 2, done.stdout + done.stderr
        assert done.stderr.splitlines()[0] == f"{run.folder}: a run is going on in this folder"
        assert f"process {rank.pid} on {socket.gethostname()}" in done.stderr and "run.name=NAME" in done.stderr
        assert "Traceback" not in done.stderr and len(done.stderr.splitlines()) < 6, done.stderr
        assert not run.folder.with_name("run.1").exists(), "nothing was moved aside"
        with pytest.raises(SystemExit) as left:
            train_by_hand(["--check", str(config)])
        assert (left.value.code, capsys.readouterr().err) == (2, done.stderr), "the check refuses what the run would"
        run.wait_for(len(metrics(run.folder)) + 1)
        os.killpg(run.process.pid, signal.SIGINT)
    assert run.process.returncode == 130
    steps = [line["step"] for line in metrics(run.folder)]
    assert steps == list(range(1, len(steps) + 1))
    cause, stop, report, newest, command = run.said.read_text().splitlines()[-5:]
    assert cause.endswith("ended by SIGINT")  # a library of a rank's may have left a line without an end
    assert stop.endswith(f"touch {run.folder}/stop") and "Traceback" not in run.said.read_text()
    assert report == f"report: {run.folder}/report.html" and (run.folder / "report.html").is_file()
    checkpoint = max((run.folder / "checkpoints").glob("step_*"))
    assert newest == f"newest checkpoint: {checkpoint}"
    assert command == f"go on from it: {TORCHRUN[0]} {config} run.steps=100000 --nproc 1"


HOLD = """
import os, subprocess, sys, time
from pathlib import Path
from megasync.config.files import lock
lock(Path(sys.argv[1]))
if os.fork() == 0:
    time.sleep(600)
child = subprocess.Popen(["sleep", "600"], close_fds=False)
print(child.pid, flush=True)
time.sleep(600)
"""


def test_children_that_live_on_do_not_hold_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "run"
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE, start_new_session=True)
    try:
        assert holder.stdout is not None and holder.stdout.readline()
        with pytest.raises(ConfigError, match=f"held by: +process {holder.pid} on {socket.gethostname()}"):
            lock(folder)
        holder.kill()
        holder.wait()
        descriptor = lock(folder)
        assert descriptor is not None
        os.close(descriptor)
    finally:
        os.killpg(holder.pid, signal.SIGKILL)


def test_a_quickstart_deletes_nothing_of_a_run_that_is_going_on(tmp_path: Path) -> None:
    folder = tmp_path / "quickstart"
    (folder / "rl").mkdir(parents=True)
    (folder / MARKER).touch()
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(folder / "rl")], stdout=subprocess.PIPE, start_new_session=True)
    try:
        assert holder.stdout is not None and holder.stdout.readline()
        with pytest.raises(ConfigError, match="rl: a run is going on in this folder"):
            afresh(folder, ["sft", "rl"]).__enter__()
        assert (folder / "rl").is_dir()
    finally:
        os.killpg(holder.pid, signal.SIGKILL)
        holder.wait()
    with afresh(folder, ["sft", "rl"]):
        pass
    assert not (folder / "rl").exists()


# Done.


def test_a_run_that_is_done_starts_nothing_and_goes_on_for_more_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, folder = sft_config(tmp_path), tmp_path / "runs" / "run"
    assert train(config, "run.steps=1", ranks=1)[0] == 0
    before = content(folder)
    code, said = train(config, "run.steps=1", ranks=1)
    more = "for more of them write run.steps=NUMBER, for another run run.name=NAME"
    assert (code, said) == (0, f"{folder}: all 1 steps are done; {more}\n")
    assert content(folder) == before
    (folder / "summary.json").write_text("{")
    with pytest.raises(SystemExit) as left:
        train_by_hand([str(config), "run.steps=1", "--nproc", "1"])
    assert left.value.code == 2 and capsys.readouterr().err.startswith(f"{folder}/summary.json: not JSON: ")
    (folder / "summary.json").unlink()
    assert train(config, "run.steps=1", ranks=1)[0] == 0
    assert (folder / "summary.json").exists(), "a run that was killed while it ended comes to its end"
    # a checkpoint that cannot be read costs no version of the log
    later = VersionWriter(folder / VERSIONS, stage=0, num_stages=1, keeps_weights=True, full_every=2)
    for version in (1, 2, 3):
        later.write(version, iter([("weight", torch.full((2,), float(version)))]))
    (tensors,) = (folder / "checkpoints").glob("*/rank_*.safetensors")
    whole = tensors.read_bytes()
    tensors.write_bytes(whole[: len(whole) // 2])
    refused = launch(config, "run.steps=2", ranks=1)
    assert refused.returncode == 2 and f"{tensors.name}: cannot be read" in refused.stderr, refused.stderr
    assert VersionReader(folder / VERSIONS).versions == [1, 2, 3]
    tensors.write_bytes(whole)
    assert train(config, "run.steps=2", ranks=1)[0] == 0 and len(metrics(folder)) == 2
    assert VersionReader(folder / VERSIONS).versions == [1], "versions of steps that were trained again are gone"


# Failed.


def test_the_last_words_are_the_error_the_checkpoint_and_the_command(tmp_path: Path) -> None:
    config = sft_config(tmp_path, resume="never")
    overrides = ["engine.optimizer.learning_rate=1e30", "engine.optimizer.clip_grad_norm=0.0", "run.steps=20"]
    done = launch(config, *overrides, ranks=1)
    assert done.returncode == 1, done.stderr
    cause, report, newest, command = done.stderr.splitlines()[-4:]
    assert cause.startswith("rank 0 failed: NonFiniteError: ") and "is not finite" in cause
    assert report == f"report: {tmp_path}/runs/run/report.html"
    shown = [line for line in done.stderr.splitlines() if line.startswith("newest checkpoint")]
    assert shown == [newest, newest], "rank 0 and the launcher say the same"
    assert newest.startswith(f"newest checkpoint: {tmp_path}/runs/run/checkpoints/step_0000000")
    assert command == f"go on from it: {TORCHRUN[0]} {config} {' '.join(overrides)} --nproc 1 checkpoint.resume=auto"
    assert "ChildFailedError" not in done.stderr and "Traceback" not in done.stderr


# Ended with its launcher.


def test_ranks_that_hear_nothing_end_with_their_launcher(tmp_path: Path) -> None:
    own = environment(write_config(tmp_path), MEGASYNC_TEST_MARKER=tmp_path.name)
    command = [sys.executable, "-m", "megasync.launch.torchrun", "--nproc-per-node", "2", "-m", "tests.megasync.run.deaf_rank"]
    with subprocess.Popen(command, cwd=ROOT, env=own, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        try:
            assert [launcher.stdout.readline() for _ in range(2)] == ["there\n"] * 2
        finally:
            launcher.kill()
        assert left_running(tmp_path.name) == []


@pytest.mark.parametrize(
    ("number", "is_done", "is_reported"), [(errno.ENOSPC, False, False), (errno.ENOSPC, True, True), (errno.EIO, False, True)]
)
def test_a_full_disk_does_not_bury_why_a_run_failed(number: int, is_done: bool, is_reported: bool) -> None:
    """The report of a run that stopped for want of room needs room, too."""

    def full() -> None:
        raise OSError(number, os.strerror(number), "report.html")

    ends = ExitCallbacks()
    ends.is_done = is_done
    ends.callback(full)
    with pytest.raises(OSError, match=r"report\.html") if is_reported else nullcontext():
        close(ends)
