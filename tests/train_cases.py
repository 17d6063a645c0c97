"""Small whole runs for tests/test_train.py: assets, configs, and the commands that a user would type."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml

from megasync.assets import write_assets

ROOT = Path(__file__).resolve().parents[1]


def write_config(folder: Path, **sections: dict[str, Any]) -> Path:
    """A GRPO config on the quickstart's untrained model; `sections` are laid over it."""
    assets = write_assets(folder / "assets", seed=0)
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


def environment(config: Path, **more: str) -> dict[str, str]:
    """This process's, with a TMPDIR below which no socket's path would be short enough."""
    folder = config.parent / "such-a-long-folder-for-temporary-files-as-batch-systems-make-for-each-of-their-jobs"
    folder.mkdir(exist_ok=True)
    return {**os.environ, "MEGASYNC_PYTHON": sys.executable, "TMPDIR": str(folder), **more}


def launch(config: Path, *overrides: str, ranks: int = 2, timeout_seconds: float = 300) -> subprocess.CompletedProcess[str]:
    """launch/torchrun_one_node.sh, with this Python in the place of a set-up of its own."""
    return subprocess.run(
        [ROOT / "launch" / "torchrun_one_node.sh", str(config), *overrides, "--nproc", str(ranks)],
        env=environment(config),
        capture_output=True,
        text=True,
        timeout=timeout_seconds,
        check=False,
    )


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


# everything in metrics.jsonl that is no measurement of time
EXACT = ("step", "version", "reward/mean", "loss/policy", "grad_norm", "response/tokens_mean", "logprob_gap/max")


def exact(folder: Path) -> list[dict[str, Any]]:
    return [{key: line[key] for key in EXACT} for line in metrics(folder)]


def processes_with(text: str) -> list[str]:
    """Command lines that contain `text`, and vLLM's and Ray's, which name themselves otherwise, by their environment."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            environment = (entry / "environ").read_bytes().decode(errors="replace")
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        if text in environment or text in command:
            found.append(f"{entry.name} {command}")
    return found


def interrupt_after(lines: int, config: Path, marker: str, timeout_seconds: float = 200) -> tuple[int, list[str]]:
    """Start a run, press Ctrl-C once `lines` steps are in metrics.jsonl; exit code and what is left running."""
    command = [str(ROOT / "launch" / "torchrun_one_node.sh"), str(config), "run.steps=100000", "--nproc", "2"]
    own = environment(config, MEGASYNC_TEST_MARKER=marker)
    said = config.parent / "said"
    with said.open("wb") as output:
        process = subprocess.Popen(command, env=own, stdout=output, stderr=output, start_new_session=True)
    written = config.parent / "runs" / "run" / "metrics.jsonl"
    deadline = time.monotonic() + timeout_seconds
    while time.monotonic() < deadline and process.poll() is None:
        if written.is_file() and len(written.read_text().splitlines()) >= lines:
            break
        time.sleep(0.1)
    assert process.poll() is None, said.read_text()[-4000:]
    os.killpg(process.pid, signal.SIGINT)
    code = process.wait(timeout=120)
    deadline = time.monotonic() + 20
    while (left := processes_with(marker)) and time.monotonic() < deadline:
        time.sleep(0.5)
    return code, left
