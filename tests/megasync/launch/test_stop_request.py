"""Which `stop` is a former run's: by the launcher's word, and without a launcher of ours by when torchrun began.

python -m pytest tests/megasync/launch/test_stop_request.py
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megasync.config.errors import ConfigError
from megasync.config.files import STOP_FILE, is_asked_to_stop, lock
from megasync.config.load import load_config
from megasync.launch.exit_summary import exit_summary
from megasync.launch.processes import INTERRUPTED, TERMINATED
from megasync.launch.stop_request import LAUNCHED, forget_former_stop, forget_stop_before_launch, launch_time, launched
from tests.support.config_files import write_runnable

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LAUNCHED, "")
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)


def ask(folder: Path, seconds: float = 0.0) -> Path:
    """A `stop` of so many seconds after now."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / STOP_FILE).touch()
    os.utime(folder / STOP_FILE, (time.time() + seconds,) * 2)
    return folder


def test_a_launcher_forgets_once(tmp_path: Path) -> None:
    """What comes after that is this run's, whatever its time is: another node's clock may be behind."""
    folder = ask(tmp_path / "run")
    forget_former_stop(folder)
    assert not is_asked_to_stop(folder) and os.environ[LAUNCHED] == str(folder)
    ask(folder, -3600)
    forget_former_stop(folder)
    forget_stop_before_launch(folder)
    assert is_asked_to_stop(folder)
    other = ask(tmp_path / "other", -3600)
    forget_stop_before_launch(other)
    assert not is_asked_to_stop(other), "a run that this one has started"


@pytest.mark.parametrize("code", [1, INTERRUPTED, TERMINATED])
def test_an_interrupted_launcher_names_the_stop_that_writes_a_checkpoint(tmp_path: Path, code: int) -> None:
    config = load_config(write_runnable(tmp_path))
    text = exit_summary(config, "megasync train run.yaml", code)
    assert (f"touch {config.run.folder}/{STOP_FILE}" in text) == (code != 1)
    assert text.endswith(f"newest checkpoint: none in {config.run.folder}\nbegin again: megasync train run.yaml")


def test_the_stop_of_a_run_that_goes_on_stays(tmp_path: Path) -> None:
    folder = ask(tmp_path / "run")
    script = "import sys, pathlib; from megasync.config.files import lock; lock(pathlib.Path(sys.argv[1])); print(); input()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", script, str(folder)], cwd=ROOT, **pipes) as process:  # type: ignore[call-overload]
        assert process.stdout.readline() == b"\n"
        with pytest.raises(ConfigError, match="a run is going on in this folder"):
            forget_former_stop(folder)
        assert is_asked_to_stop(folder) and not os.environ[LAUNCHED]
        process.communicate(b"\n")
    forget_former_stop(folder)
    assert not is_asked_to_stop(folder)
    held = lock(folder)
    assert held is not None
    os.close(held)


def test_without_a_launcher_a_stop_since_this_rank_began_is_its_own(tmp_path: Path) -> None:
    folder = ask(tmp_path / "run")
    forget_stop_before_launch(folder)
    assert is_asked_to_stop(folder)
    ask(folder, launch_time() - time.time() - 0.1)
    forget_stop_before_launch(folder)
    assert not is_asked_to_stop(folder)
    forget_stop_before_launch(folder)


# Of the first round: asked to stop, it fails. Of the second: the `stop` is there, and one from before torchrun is forgotten.
ROUNDS = """
import os, pathlib, sys
from megasync.launch.stop_request import forget_stop_before_launch
folder = pathlib.Path(sys.argv[1])
forget_stop_before_launch(folder)
print((folder / "stop").exists(), flush=True)
(folder / "stop").touch()
sys.exit(os.environ["TORCHELASTIC_RESTART_COUNT"] == "0")
"""


def test_a_stop_outlives_the_rounds_of_plain_torchrun(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(ROUNDS)
    folder = ask(tmp_path / "run", -1.0)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "1", str(program), str(folder)]
    own = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=own, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0 and done.stdout.split() == ["False", "True"], done.stdout + done.stderr


def test_the_ranks_of_a_launcher_are_notified(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    assert launched(link / "run") == launched(tmp_path / "run") == {LAUNCHED: str(tmp_path / "run")}
