"""What the launcher of a machine's ranks says of those that fail.

python -m pytest tests/megasync/launch/test_torchrun.py
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from bridge.processes import MALLOC, MALLOC_ON_CPU
from megasync.config.errors import ConfigError
from megasync.config.files import STOP_FILE
from megasync.launch.processes import REFUSED, STOPPED
from megasync.launch.torchrun import TRAINER, late_ranks_ended, likely_cause, trainer_config

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
TERMINATED, BY_HANDLER, KILLED = -signal.SIGTERM, 128 + signal.SIGTERM, -signal.SIGKILL


def test_a_trainer_without_a_config_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"megasync\.train: no config is given"):
        trainer_config(["--nproc-per-node", "2", "-m", TRAINER])


@pytest.mark.parametrize(
    ("codes", "code", "word"),
    [
        ((TERMINATED, REFUSED), REFUSED, "rank 1"),  # torchrun ended the other
        ((BY_HANDLER, 1), 1, "rank 1"),
        ((1, KILLED), 1, "rank 1 was ended by SIGKILL"),  # the other lost its partner
        ((KILLED, TERMINATED), 1, "rank 0 was ended by SIGKILL"),
        ((TERMINATED,), 1, "SIGTERM"),
    ],
)
def test_the_cause_is_not_a_rank_that_was_ended_with_the_others(codes: tuple[int, ...], code: int, word: str) -> None:
    failures = {rank: ProcessFailure(rank, 1000 + rank, int(each), "<N/A>") for rank, each in enumerate(codes)}
    reported = likely_cause(failures)
    assert reported[0] == code and word in reported[1]


def test_a_rank_that_says_why_it_failed_was_not_ended_for_want_of_memory() -> None:
    """Whoever was killed while it took down its replicas, torchrun's patience being over."""
    said = {rank: {"message": f"RankZeroError: {rank} has failed\nand more"} for rank in range(2)}

    def reported(codes: tuple[int, int], *with_words: int) -> tuple[int, str]:
        words = [said[rank] if rank in with_words else "<N/A>" for rank in range(2)]
        failures = {rank: ProcessFailure(rank, 1000 + rank, int(codes[rank]), "<N/A>") for rank in range(2)}
        for rank, failure in failures.items():
            failure.message, failure.timestamp = words[rank], 10 - rank
        return likely_cause(failures)

    assert reported((KILLED, 1), 0, 1) == (1, "rank 1 failed: RankZeroError: 1 has failed")
    assert reported((KILLED, TERMINATED), 0) == (1, "rank 0 failed: RankZeroError: 0 has failed")
    assert reported((KILLED, 1), 1)[1].startswith("rank 0 was ended by SIGKILL: is there too little memory?")


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("run.steps=-1", "run.steps = -1: out of range"),  # by the launcher
        ("model.path=/not/there", "model.path = /not/there: "),  # by the ranks
    ],
)
def test_a_config_error_is_said_once_by_two_ranks(override: str, said: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "megasync.launch.torchrun", "--nproc-per-node", "2", "-m", TRAINER]
    config = str(CONFIGS / "quickstart.yaml")
    arguments = [*command, config, override, f"run.dir={tmp_path}"]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False, timeout=400)
    assert done.returncode == REFUSED, done.stderr
    assert done.stderr.count(said) == 1 and "Traceback" not in done.stderr, done.stderr


# In the place of the trainer: the user edits the config, and asks the run to stop, while it goes on.
EDITED = """
import os, pathlib, sys
from megasync.config.load import load_config
_, given, *overrides = sys.argv[1:]
folder, config = pathlib.Path(os.environ["FOLDER"]), pathlib.Path(os.environ["CONFIG"])
folder.mkdir(parents=True, exist_ok=True)
left = (folder / "stop").exists()
config.write_text(os.environ["EDIT"])
(folder / "stop").touch()
print(load_config(given, overrides).run.name, "stop" if left else "no stop", os.environ[os.environ["MALLOC"]])
sys.exit(int(os.environ["CODE"]))
"""


@pytest.mark.parametrize(
    ("edit", "code", "expected", "malloc"),
    [("run: [", 1, 1, {}), ("run: {name: another}", 0, STOPPED, {MALLOC: "glibc.malloc.arena_max=2"})],
)
def test_the_config_is_that_of_the_start(edit: str, code: int, expected: int, malloc: dict[str, str], tmp_path: Path) -> None:
    """Whatever is written into the file since; and the `stop` of a former run is none of this one's.

    Ranks on CPUs get settings of malloc where there are none.
    """
    (tmp_path / "reported.py").write_text(EDITED)
    config, folder = tmp_path / "config.yaml", tmp_path / "runs" / "first"
    config.write_text("run: {name: first}")
    (folder / "checkpoints" / "step_00000003").mkdir(parents=True)
    (folder / STOP_FILE).touch()
    reported = {"FOLDER": str(folder), "CONFIG": str(config), "EDIT": edit, "CODE": str(code), "MALLOC": MALLOC}
    own = {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(CONFIGS.parent)]), "PET_NNODES": "2", "CUDA_VISIBLE_DEVICES": ""}
    inherited = {key: value for key, value in os.environ.items() if key != MALLOC}
    environment = inherited | reported | own | malloc
    command = [sys.executable, "-m", "megasync.launch.torchrun", "--nproc-per-node", "1", "-m", "reported", TRAINER]
    command += [str(config), f"run.dir={tmp_path / 'runs'}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=400, env=environment)
    assert done.returncode == expected and "ConfigError" not in done.stderr, done.stderr
    assert done.stdout.splitlines() == [f"first no stop {malloc.get(MALLOC, MALLOC_ON_CPU)}"]
    if code:
        assert f"newest checkpoint: {folder}/checkpoints/step_00000003\ngo on from it: " in done.stderr
        assert f"{TRAINER} {config} run.dir=" in done.stderr, "the user's file"


def test_a_rank_that_is_stopped_at_its_very_end_is_missed_once_another_has_ended(tmp_path: Path) -> None:
    """Rank 1 of a run that was done stayed for ever, and its launcher with it: it had said that it was leaving."""
    program = "import sys, time; time.sleep(float(sys.argv[2]))"

    def rank(seconds: float) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", program, TRAINER, str(seconds)])

    with late_ranks_ended(1.5):
        both = [rank(600), rank(600)]
        with pytest.raises(subprocess.TimeoutExpired):
            both[1].wait(4)
        for each in both:  # and others start in their place
            each.kill()
            each.wait()
        both = [rank(600), rank(600)]
        with pytest.raises(subprocess.TimeoutExpired):
            both[1].wait(4)
        both[1].send_signal(signal.SIGSTOP)
        both[0].kill()
        both[0].wait()
        assert both[1].wait(300) == -signal.SIGKILL


def test_a_python_of_an_old_linux_is_refused_by_name() -> None:
    program = f"import os; del os.pidfd_open; from megasync.launch.torchrun import main; main(['-m', '{TRAINER}', 'config.yaml'])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == REFUSED and "has no os.pidfd_open" in done.stderr and "Traceback" not in done.stderr


def test_ranks_that_start_again_meet(tmp_path: Path) -> None:
    """With a store that keeps the addresses of the ranks before them they would wait for each other for ever."""
    ranks = tmp_path / "ranks.py"
    ranks.write_text(
        "import os, signal, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "dist.barrier()\n"
        "if os.environ['TORCHELASTIC_RESTART_COUNT'] < '2' and dist.get_rank() == 0:\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "dist.barrier()\n"
        "os.write(1, f\"met after {os.environ['TORCHELASTIC_RESTART_COUNT']}\\n\".encode())\n"  # whole, beside the other's
    )
    launcher = [sys.executable, "-m", "megasync.launch.torchrun", "--nproc-per-node", "2", "--max-restarts", "2"]
    done = subprocess.run([*launcher, str(ranks)], capture_output=True, text=True, check=False, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("met after 2") == 2


EARLY = """
import os, signal, sys
from megasync.launch.processes import hold_signals, torchrun

hold_signals()
os.kill(os.getpid(), int(sys.argv[1]))
command = torchrun(1, "megasync.train", *sys.argv[2:])
os.execv(command[0], command)
"""


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.long)])
def test_a_signal_that_comes_while_the_launcher_starts_ends_it(kind: signal.Signals, tmp_path: Path) -> None:
    """Its imports take seconds; Ctrl-C in one of them printed its traceback."""
    command = [sys.executable, "-c", EARLY, str(int(kind)), str(CONFIGS / "quickstart.yaml"), f"run.dir={tmp_path / 'runs'}"]
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    environment = os.environ | {"TMPDIR": str(temporary)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=400, env=environment)
    assert done.returncode == 128 + kind and f"ended by {kind.name}\n" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr and not any(temporary.iterdir())


@pytest.mark.parametrize("kind", [pytest.param(signal.SIGTERM, marks=pytest.mark.long), signal.SIGHUP])
def test_a_closed_terminal_does_not_end_ranks_under_nohup(kind: signal.Signals, tmp_path: Path) -> None:
    """torch's launcher handles SIGHUP, also where it was ignored."""
    (tmp_path / "hung_up.py").write_text(f"import os, time\nos.kill(os.getppid(), {int(kind)})\ntime.sleep(1)\n")
    command = ["nohup", sys.executable, "-m", "megasync.launch.torchrun", "--nproc-per-node", "1", "-m", "hung_up"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(CONFIGS.parent)])}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=400, env=environment)
    assert done.returncode == (0 if kind == signal.SIGHUP else 128 + kind), done.stderr
