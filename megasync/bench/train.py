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
from typing import TYPE_CHECKING, Any

from megasync.bench.machine import describe_machine
from megasync.bench.tables import print_table
from megasync.config.load import save_config
from megasync.devices import visible_devices
from megasync.files import write_atomically
from megasync.launch.processes import end_with_parent, torchrun
from megasync.model_shapes import SHAPES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from megasync.bench.config import BenchRoot

LOG_TAIL = 2500  # characters of a failed variant's output that are shown
TITLES = ("variant", "tokens/s/GPU", "model TFLOP/s/GPU", "attention TFLOP/s/GPU", "ceiling", "share", "peak GiB", "last loss")


def prepare(config: BenchRoot) -> BenchRoot:
    """The config with a model folder: one with only a config.json is written where model.path is empty."""
    if config.model.path:
        return config
    folder = config.run.folder / "model"
    bench = config.bench_train
    hf_config = {**SHAPES[bench.shapes].hf_config(bench.sequence_length), "torch_dtype": config.model.dtype}
    write_atomically(folder / "config.json", json.dumps(hf_config, indent=1))
    return config.model_copy(update={"model": config.model.model_copy(update={"path": str(folder)})})


class Ranks:
    """The processes of one variant. They import everything, then wait for `go`."""

    def __init__(self, config: BenchRoot, variant: str) -> None:
        folder = config.run.folder
        self.results, self.log, self.turn = (folder / f"{variant}.{kind}" for kind in ("json", "log", "go"))
        for path in (self.results, self.turn):
            path.unlink(missing_ok=True)
        arguments = [str(folder / "config.yaml"), variant, str(self.results), str(self.turn)]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                torchrun(config.bench_train.num_ranks, "megasync.bench.train_rank", *arguments),
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=end_with_parent,  # noqa: PLW1509  (no threads of ours run)
                env={"OMP_NUM_THREADS": "1", **os.environ},
            )

    def run(self, limit_seconds: float) -> dict[str, Any]:
        """Let them go and wait; what was measured, or `error` with the end of their output."""
        self.turn.touch()
        begin = time.monotonic()
        try:
            code = self.process.wait(limit_seconds)
            problem = f"exit code {code}" if code else ""
        except subprocess.TimeoutExpired:
            problem = f"not done after {limit_seconds:g} s"
        self.end()
        measured = json.loads(self.results.read_text(encoding="utf-8")) if self.results.exists() else {}
        measured["total_seconds"] = time.monotonic() - begin
        if problem:
            measured["error"] = f"{problem}:\n{self.log.read_text(errors='replace')[-LOG_TAIL:]}"
        return dict(measured)

    def end(self) -> None:
        """SIGTERM, and SIGKILL where that does not help. Safe to call when they are over."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(10)
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def measure_train(config: BenchRoot, paths: Sequence[Path]) -> dict[str, Any]:
    """All variants, one after another; what is known so far is written to `paths` after each.

    With GPUs the next variant's ranks import their libraries while one is measured, which needs only the CPU.
    """
    bench = config.bench_train
    save_config(config, config.run.folder / "config.yaml")
    results = {"bench": "train", **describe_machine(), "config": config.model_dump(), "variants": {}}
    waiting: list[Ranks] = []
    ahead = 1 if len(visible_devices()) else 0
    try:
        for index, variant in enumerate(bench.variants):
            started = index + len(waiting)
            waiting += [Ranks(config, name) for name in bench.variants[started : index + 1 + ahead]]
            results["variants"][variant] = waiting[0].run(bench.variant_seconds)
            waiting.pop(0)
            for path in paths:
                write_atomically(path, json.dumps(results, indent=1) + "\n")
            print(_line(variant, results["variants"][variant]), flush=True)
    finally:
        for ranks in waiting:
            ranks.end()
    return results


def _line(variant: str, measured: dict[str, Any]) -> str:
    if "error" in measured:
        print(f"{variant}: failed, {measured['error']}")
    if "share_of_ceiling" not in measured:
        return f"{variant}: not measured"
    share = f"{measured['share_of_ceiling']:.1%} of {measured['ceiling_flops'] / 1e12:.4g} TFLOP/s"
    tokens = f"{measured['tokens_per_second_per_gpu']:.0f} tokens/s/GPU"
    return f"{variant}: {tokens}, {share}, {measured['total_seconds']:.0f} s in all"


def show(results: dict[str, Any]) -> None:
    """Print the table."""
    print_table("training, medians", TITLES, ((variant, *_cells(of)) for variant, of in results["variants"].items()))


def _cells(measured: dict[str, Any]) -> list[str]:
    if "share_of_ceiling" not in measured:
        return ["failed"]
    flops = (measured[name] / 1e12 for name in ("model_flops_per_gpu", "attention_flops_per_gpu", "ceiling_flops"))
    return [
        f"{measured['tokens_per_second_per_gpu']:.0f}",
        *(f"{value:.4g}" for value in flops),
        f"{measured['share_of_ceiling']:.1%}",
        f"{measured['peak_bytes'] / 2**30:.1f}",
        f"{measured['steps'][-1]['loss']:.4f}",
    ]


def run(config: BenchRoot, json_path: Path | None) -> int:
    """Measure by a prepared config and show it. Exit code 0: all measured; 1: a variant failed, the others are there."""
    results = measure_train(config, [config.run.folder / "bench_train.json", *([json_path] if json_path is not None else [])])
    show(results)
    return int(any("error" in measured for measured in results["variants"].values()))
