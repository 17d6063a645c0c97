"""Small whole runs: assets, configs, the commands that a user would type, and the same program on ranks that start sooner."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from uuid import uuid4

import psutil
import yaml
from safetensors.torch import load_file, save_file

from megasync.tools.assets.command import write_assets
from megasync.report.registry import metric
from megasync.rewards.functions import RewardInput, token_count
from tests.support.ranks import run_ranks
from tests.megasync.rewards.reward_cases import DEEDS
from tests.support.processes import command_of

END_SECONDS = 30.0
STARTS_PROCESSES = True  # see ranks.py
ROOT = Path(__file__).resolve().parents[2]
TEST_FOLDER, BROKEN = "MEGASYNC_TEST_FOLDER", "rewards are broken"
TORCHRUN = [str(ROOT / "launch" / "torchrun_one_node.sh")]
COMMAND = [sys.executable, "-m", "megasync"]
SUBMIT = [sys.executable, "-m", "megasync.submit", "--num-ranks", "2"]
# What a run calls its files in /tmp: its own folder, and what lies in that. Beside other tests only the first is surely its own.
OURS = ("ms-*",) if "PYTEST_XDIST_WORKER" in os.environ else ("ms-*", "ray-*", "megasync-vllm-*", "torchelastic_*", "vllm_dist_*")


def keep_layers(folder: Path, num_layers: int) -> None:
    """The first ones of a model folder: a step's time is mostly that of its layers."""
    fields, weights = json.loads((folder / "config.json").read_text()), folder / "model.safetensors"
    further = tuple(f"model.layers.{layer}." for layer in range(num_layers, fields["num_hidden_layers"]))
    kept = {name: tensor for name, tensor in load_file(weights).items() if not name.startswith(further)}
    save_file(kept, weights, {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(fields | {"num_hidden_layers": num_layers}))


def write_config(folder: Path, *, num_layers: int = 4, **sections: dict[str, Any]) -> Path:
    """A GRPO config on so many layers of the quickstart's untrained model; `sections` are laid over it."""
    assets = write_assets(folder / "assets", seed=0)
    keep_layers(assets.model, num_layers)
    config: dict[str, dict[str, Any]] = {
        "run": {"name": "run", "dir": str(folder / "runs"), "steps": 6, "progress": "plain"},
        "model": {"path": str(assets.model), "dtype": "float32"},
        "engine": {"wrap": "megatron_fsdp", "optimizer": {"learning_rate": 1e-4}, "tokens_per_microbatch": 400},
        "rollout": {
            "group_size": 4,
            "max_new_tokens": 8,
            "max_model_len": 32,
            "kv_cache_bytes": "64MiB",
            "reward": "token_count",
        },
        "sync": {"bucket_bytes": "1MiB"},
        "algorithm": {"name": "grpo", "num_minibatches": 2},
        "data": {"train": str(assets.train), "batch_size": 8},
        "checkpoint": {"every_steps": 3},
    }
    for name, values in sections.items():
        config.setdefault(name, {}).update(values)
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def write_supervised_config(folder: Path) -> Path:
    """A run without a Ray."""
    path = write_config(folder, algorithm={"name": "sft", "num_minibatches": 1})
    values = yaml.safe_load(path.read_text())
    del values["rollout"]
    path.write_text(yaml.safe_dump(values))
    return path


def environment(config: Path, **more: str) -> dict[str, str]:
    """This process's. Its TMPDIR, unless `more` has one, is so long that no socket's path below it would be short enough."""
    folder = config.parent / "such-a-long-folder-for-temporary-files-as-batch-systems-make-for-each-of-their-jobs"
    folder.mkdir(exist_ok=True)
    own = {"MEGASYNC_PYTHON": sys.executable, "PYTHONFAULTHANDLER": "1", "TMPDIR": str(folder), TEST_FOLDER: str(config.parent)}
    own["TORCHINDUCTOR_CACHE_DIR"] = str(config.parent / "torchinductor")  # stays after a run (megasync/launch/scope.py)
    return {**os.environ, **own, **more}


def launch(
    config: Path, *overrides: str, ranks: int = 2, timeout_seconds: float = 500, temporary: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """launch/torchrun_one_node.sh, with this Python in the place of a set-up of its own. Leaves nothing behind."""
    command = [*TORCHRUN, str(config), *overrides, "--nproc", str(ranks)]
    with leaves_nothing(config, temporary) as own:
        process = subprocess.Popen(command, env=own, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            said = process.communicate(timeout=timeout_seconds)
        except subprocess.TimeoutExpired:
            for each in processes_with(own["MEGASYNC_TEST_MARKER"]):
                each.send_signal(signal.SIGABRT)  # it says where it stands
            raise AssertionError("\n".join([f"not over after {timeout_seconds:g} s", *process.communicate()])) from None
        return subprocess.CompletedProcess(command, process.returncode, *said)


def train(config: Path, *overrides: str, ranks: int = 2) -> tuple[int, str]:
    """The program that the launchers start, without them: its exit code, and what rank 0 said."""
    arguments = {"arguments": [str(config), *overrides]}
    return run_ranks(ranks, "tests.runs.train_cases:run_program", arguments, alone=True)[0]


def run_program(arguments: list[str]) -> tuple[int, str]:
    """On one rank of `train`."""
    from megasync.train import main

    said = io.StringIO()
    with redirect_stdout(said), redirect_stderr(said):
        try:
            code = main(arguments)
        finally:
            print(said.getvalue(), file=sys.__stderr__, flush=True)
    return code, said.getvalue()


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def assert_metrics_have_rows(lines: Sequence[Mapping[str, Any]], *, at_least: int) -> None:
    """In the table that docs/metrics.md and the report's names are made of (megasync/report/registry.py)."""
    keys = {key for line in lines for key in line} - {"step"}
    assert len(keys) >= at_least and [key for key in sorted(keys) if metric(key) is None] == []


# everything in metrics.jsonl that is no measurement of time
EXACT = ("step", "version", "reward/mean", "loss/policy", "grad_norm", "response/tokens_mean", "logprob_gap/max")


def exact(folder: Path) -> list[dict[str, Any]]:
    return [{key: line[key] for key in EXACT} for line in metrics(folder)]


@contextmanager
def leaves_nothing(config: Path, temporary: Path | None = None) -> Iterator[dict[str, str]]:
    """The environment for a run. In the end none of its processes are left, nor files of theirs in TMPDIR, /tmp and /dev/shm.

    `temporary`: an empty folder of a short name that all of the run's files lie in; /tmp and /dev/shm are others' then.
    """
    more = {"MEGASYNC_TEST_MARKER": f"run-{uuid4().hex}"} | ({"TMPDIR": str(temporary)} if temporary else {})
    own, before = environment(config, **more), None if temporary else files()
    yield own
    deadline = time.monotonic() + 40  # other runs' files come and go, too; a killed launcher's go after 20 s (scope.py)
    while (left := left_of(own, before)) and time.monotonic() < deadline:
        time.sleep(0.5)
    assert not left, left


def left_of(environment: dict[str, str], before: set[Path] | None) -> list[str]:
    """Processes and files of a run. `before`: what else was there; None: its TMPDIR alone is looked at."""
    processes = list[str]()
    for each in processes_with(environment["MEGASYNC_TEST_MARKER"]):
        with suppress(psutil.Error):  # it has just ended
            processes.append(f"{each.pid} {each.cmdline()}")
    return [*processes, *map(str, Path(environment["TMPDIR"]).iterdir()), *map(str, [] if before is None else new_files(before))]


def files() -> set[Path]:
    """Those that a run may leave where other runs have theirs."""
    memory = Path("/dev/shm").glob("*")
    if "PYTEST_XDIST_WORKER" in os.environ:  # locks of another worker's ranks stay until that worker ends
        memory = (path for path in memory if not path.name.startswith("sem.mp-"))
    return {*memory, *(path for name in OURS for path in Path("/tmp").glob(name))}


def new_files(before: set[Path]) -> list[Path]:
    """Those that no process has open or as its folder: what is in use is of a run beside this one."""
    found = {path: path.stat() for path in files() - before if path.exists()}
    if not found:  # looking through all processes takes a tenth of a second of a core
        return []
    in_use = set()
    for process in psutil.process_iter():
        with suppress(OSError, psutil.Error):
            text = f"{Path(f'/proc/{process.pid}/maps').read_text()} {process.environ()} {process.cmdline()}"
            text += " ".join(str(link.readlink()) for link in Path(f"/proc/{process.pid}/fd").iterdir())
            in_use |= {path for path, stat in found.items() if str(path) in text or f" {stat.st_ino} " in text}
    return sorted(found.keys() - in_use)


def processes_with(marker: str) -> list[psutil.Process]:
    """By their environment: vLLM's and Ray's have other names than the run."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if marker in process.environ().values() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def left_running(marker: str) -> list[str]:
    """What is left of a run whose launcher was killed, after so long at most: processes, and folders of temporary files."""
    folders = set()
    for process in processes_with(marker):
        with suppress(psutil.Error):
            folders.add(process.environ().get("TMPDIR", ""))
    folders = {folder for folder in folders if Path(folder).name.startswith("ms-")}
    deadline = time.monotonic() + END_SECONDS
    while (left := [*processes_with(marker), *filter(os.path.exists, folders)]) and time.monotonic() < deadline:
        time.sleep(0.2)
    reported = [each if isinstance(each, str) else command_of(each) for each in left]
    return [text for text in reported if text]


def far_listeners(marker: str) -> list[str]:
    """Sockets of a run's processes that others than this machine could reach."""
    found = []
    for process in processes_with(marker):
        with suppress(psutil.Error):
            listening = [each.laddr for each in process.net_connections("inet") if each.status == psutil.CONN_LISTEN]
            far = [each for each in listening if each.ip.removeprefix("::ffff:") not in ("127.0.0.1", "::1")]
            found += [f"{process.name()} {' '.join(process.cmdline())[:200]}: {each.ip}:{each.port}" for each in far]
    return found


@dataclass
class Run:
    """A run that goes on until it is ended; `folder` is the run's."""

    process: subprocess.Popen[bytes]
    folder: Path
    marker: str
    said: Path

    def wait_for(self, steps: int, timeout_seconds: float = 500) -> None:
        """Until that many steps are in metrics.jsonl."""
        lines = self.folder / "metrics.jsonl"
        deadline = time.monotonic() + timeout_seconds
        while time.monotonic() < deadline and self.process.poll() is None:
            if lines.is_file() and lines.read_text().count("\n") >= steps:  # the last one may be in the midst of being written
                return
            time.sleep(0.1)
        raise AssertionError(self.said.read_text()[-4000:])

    def ranks(self) -> list[psutil.Process]:
        """The trainer's, in rank order under torchrun."""
        found: dict[str, psutil.Process] = {}
        for process in processes_with(self.marker):
            with suppress(psutil.Error):
                command, environment = process.cmdline(), process.environ()
                if command[0].startswith("ray::TrainerRank"):
                    found[str(process.pid)] = process
                elif "megasync.train" in command and "RANK" in environment:
                    found[environment["RANK"]] = process
        return [found[rank] for rank in sorted(found)]


@contextmanager
def endless_run(command: list[str], config: Path, *overrides: str) -> Iterator[Run]:
    """A run of two ranks that leaves nothing behind once it is ended within the block."""
    said = config.parent / "said"
    with leaves_nothing(config) as own, said.open("wb") as output:
        process = subprocess.Popen(
            [*command, str(config), "run.steps=100000", *overrides],
            cwd=ROOT, env=own, stdout=output, stderr=output, start_new_session=True,
        )  # fmt: skip
        run = Run(process, config.parent / "runs" / "run", own["MEGASYNC_TEST_MARKER"], said)
        try:
            yield run
            process.wait(timeout=300)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def cut_off_copy(run: Path, folder: Path) -> Path:
    """A finished run's folder as a kill after step 3 would have left it, half a checkpoint on top; for a config in `folder`."""
    copy = folder / "runs" / "run"
    shutil.copytree(run, copy)
    (copy / "checkpoints" / "step_00000006").rename(copy / "checkpoints" / ".partial_step_00000006")
    return copy


def breaking_reward(sample: RewardInput) -> float:
    """For `rollout.reward`: as token_count, until `break_rewards`."""
    if (Path(os.environ[TEST_FOLDER]) / BROKEN).exists():
        raise RuntimeError("broken on purpose")
    return token_count(sample)


def break_rewards(folder: Path) -> None:
    """Of the run whose config is in `folder`, from now on."""
    (folder / BROKEN).touch()


def parity_reward(sample: RewardInput) -> float:
    """Differs within most groups, also of a model that is not trained."""
    return float(sum(sample.response.encode()) % 2)


def troubled_reward(sample: RewardInput) -> float:
    """Fails in one of four ways on every eighth line of the data file."""
    deeds = ("raises", "nan", "is killed", "hangs")
    return cast(float, DEEDS[deeds[sample.line // 8 % 4]]()) if sample.line % 8 == 0 else 1.0
