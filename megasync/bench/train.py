"""Measures training speed on this machine: tokens and model FLOP/s, as a share of what matrix products reach here.

Starts the ranks of one variant after another (train_rank.py has what they do); one that fails leaves the others alone.
Model FLOP/s count 6 for each token and each parameter that it meets, attention apart. Leaves out rollouts and weight sync.

    python -m megasync.bench train --config configs/bench_train.yaml [key=value ...] [--json FILE]
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

from megasync.bench.config import BenchRoot
from megasync.bench.machine import describe_machine
from megasync.bench.model import write_config
from megasync.bench.tables import print_table
from megasync.config.load import save_config
from megasync.files import write_atomically
from megasync.launch.processes import end_with_parent, torchrun

LOG_TAIL = 2500  # characters of a failed variant's output that are shown
TITLES = (
    *("variant", "tokens/s/GPU", "model TFLOP/s/GPU", "attention TFLOP/s/GPU"),
    *("ceiling", "share", "with attention", "peak GiB", "last loss"),
)


def prepare(config: BenchRoot) -> BenchRoot:
    """The config with a model folder: one with only a config.json is written where model.path is empty."""
    if config.model.path:
        return config
    folder, bench = config.run.folder / "model", config.bench_train
    write_config(folder, bench.shapes, config.model.dtype, bench.sequence_length)
    return config.model_copy(update={"model": config.model.model_copy(update={"path": str(folder)})})


def measure_variant(config: BenchRoot, variant: str) -> dict[str, Any]:
    """What the variant's ranks measured, and `error` with the end of their output where they failed."""
    folder, bench = config.run.folder, config.bench_train
    results, log = (folder / f"{variant}.{kind}" for kind in ("json", "log"))
    results.unlink(missing_ok=True)
    begin, problem = time.monotonic(), ""
    with log.open("wb") as output:
        process = subprocess.Popen(
            torchrun(bench.num_ranks, "megasync.bench.train_rank", str(folder / "config.yaml"), variant, str(results)),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=end_with_parent,  # noqa: PLW1509  (no threads of ours run)
            env={"OMP_NUM_THREADS": "1", **os.environ},
        )
    try:
        if code := process.wait(bench.variant_seconds):
            problem = f"exit code {code}"
    except subprocess.TimeoutExpired:
        problem = f"not done after {bench.variant_seconds:g} s"
    finally:
        end_session(process)
    measured: dict[str, Any] = json.loads(results.read_text(encoding="utf-8")) if results.exists() else {}
    measured["total_seconds"] = time.monotonic() - begin
    if problem:
        measured["error"] = f"{problem}:\n{log.read_text(errors='replace')[-LOG_TAIL:]}"
    return measured


def end_session(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM to all of its processes, and SIGKILL where that does not help; nothing where they are over."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _cells(measured: dict[str, Any]) -> list[str]:
    if "share_of_ceiling" not in measured:
        return ["failed"]
    flops = (measured[name] / 1e12 for name in ("model_flops_per_gpu", "attention_flops_per_gpu", "ceiling_flops"))
    return [
        f"{measured['tokens_per_second_per_gpu']:.0f}",
        *(f"{value:.4g}" for value in flops),
        f"{measured['share_of_ceiling']:.1%}",
        f"{measured['share_with_attention']:.1%}",
        f"{measured['peak_bytes'] / 2**30:.1f}",
        f"{measured['steps'][-1]['loss']:.4f}",
    ]


def run(config: BenchRoot, json_path: Path | None) -> int:
    """Measure all variants by a prepared config; what is known so far is written after each. Exit code 1: a variant failed."""
    save_config(config, config.run.folder / "config.yaml")
    measured: dict[str, dict[str, Any]] = {}
    results = {"bench": "train", **describe_machine(), "config": config.model_dump(), "variants": measured}
    for variant in config.bench_train.variants:
        measured[variant] = measure_variant(config, variant)
        for path in filter(None, (config.run.folder / "bench_train.json", json_path)):
            write_atomically(path, json.dumps(results, indent=1) + "\n")
        error, seconds = measured[variant].get("error"), measured[variant]["total_seconds"]
        print(f"{variant}: failed, {error}" if error else f"{variant}: done in {seconds:.0f} s", flush=True)
    print_table("training, medians", TITLES, ([variant, *_cells(of)] for variant, of in measured.items()))
    return int(any("error" in of for of in measured.values()))
