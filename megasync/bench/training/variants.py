"""Measures training speed and memory on this machine: tokens, model FLOP/s as a share of what matrix products reach, peak bytes.

Starts the ranks of one variant after another (rank.py has what they do); one that fails leaves the others alone.
Model FLOP/s count 6 for each token and each parameter that it meets, attention apart. Leaves out rollouts and weight sync.

    python -m megasync.bench train --config configs/bench_train.yaml [key=value ...] [--json FILE]
"""

from __future__ import annotations

import json
import time
from pathlib import Path

from engine.config import OFFLOAD_KINDS
from megasync.bench.common.model import write_config
from megasync.bench.common.processes import run_ranks
from megasync.bench.common.results import Results, describe, print_table, write_results
from megasync.bench.config import BenchRoot
from megasync.config.load import save_config

LOG_TAIL = 2500  # characters of a failed variant's output that are shown
SPEED_TITLES = (
    *("variant", "tokens/s/GPU", "model TFLOP/s/GPU", "attention TFLOP/s/GPU"),
    *("ceiling", "share", "with attention", "peak GiB", "last loss"),
)
MEMORY_TITLES = ("variant", "peak", "peak of a step", *OFFLOAD_KINDS, "gradients' dtype")
COMPARED = ("tokens_per_second_per_gpu", "peak_bytes", "step_peak_bytes")
GIB = 2**30


def prepare(config: BenchRoot) -> BenchRoot:
    """The config with a model folder: one with only a config.json is written where model.path is empty."""
    if config.model.path:
        return config
    folder, bench = config.run.folder / "model", config.bench_train
    write_config(folder, bench.shapes, config.model.dtype, bench.sequence_length)
    return config.model_copy(update={"model": config.model.model_copy(update={"path": str(folder)})})


def measure_variant(config: BenchRoot, variant: str) -> Results:
    """What the variant's ranks measured, and `error` with the end of their output where they failed."""
    folder, bench = config.run.folder, config.bench_train
    results, log = (folder / f"{variant}.{kind}" for kind in ("json", "log"))
    results.unlink(missing_ok=True)
    begin, arguments = time.monotonic(), (str(folder / "config.yaml"), variant, str(results))
    problem = run_ranks(bench.num_ranks, "megasync.bench.training.rank", *arguments, log=log, limit_seconds=bench.variant_seconds)
    measured: Results = json.loads(results.read_text(encoding="utf-8")) if results.exists() else {}
    measured["total_seconds"] = time.monotonic() - begin
    if problem:
        measured["error"] = f"{problem}:\n{log.read_text(errors='replace')[-LOG_TAIL:]}"
    return measured


def run(config: BenchRoot, json_path: Path | None) -> int:
    """Measure all variants by a prepared config; what is known so far is written after each. Exit code 1: a variant failed."""
    save_config(config, config.run.folder / "config.yaml")
    measured: dict[str, Results] = {}
    results = {**describe("train", config), "variants": measured}
    for variant in config.bench_train.variants:
        measured[variant] = measure_variant(config, variant)
        results["megatron_fsdp_times_ddp"] = compare(measured)
        write_results(results, config.run.folder / "bench_train.json", json_path)
        error, seconds = measured[variant].get("error"), measured[variant]["total_seconds"]
        print(f"{variant}: failed, {error}" if error else f"{variant}: done in {seconds:.0f} s", flush=True)
    show(results)
    return int(any("error" in of for of in measured.values()))


def compare(variants: dict[str, Results]) -> dict[str, float]:
    """Megatron-FSDP's figures over DDP's, where both were measured."""
    ddp, fsdp = (variants.get(name, {}) for name in ("ddp", "megatron_fsdp"))
    return {name: fsdp[name] / ddp[name] for name in COMPARED if name in ddp and name in fsdp}


def show(results: Results) -> None:
    """Tables for people."""
    variants: dict[str, Results] = results["variants"]
    print_table("training, medians", SPEED_TITLES, ([name, *_speed_cells(of)] for name, of in variants.items()))
    print_table(
        "memory of a rank, GiB: the most of all ranks",
        MEMORY_TITLES,
        ([name, *_memory_cells(of)] for name, of in variants.items()),
    )
    for name, ratio in results["megatron_fsdp_times_ddp"].items():
        print(f"megatron_fsdp over ddp, {name}: {ratio:.3f}")


def _speed_cells(measured: Results) -> list[str]:
    if "share_of_ceiling" not in measured:
        return ["failed"]
    flops = (measured[name] / 1e12 for name in ("model_flops_per_gpu", "attention_flops_per_gpu", "ceiling_flops"))
    return [
        f"{measured['tokens_per_second_per_gpu']:.0f}",
        *(f"{value:.4g}" for value in flops),
        f"{measured['share_of_ceiling']:.1%}",
        f"{measured['share_with_attention']:.1%}",
        f"{measured['peak_bytes'] / GIB:.1f}",
        f"{measured['steps'][-1]['loss']:.4f}",
    ]


def _memory_cells(measured: Results) -> list[str]:
    if "share_of_ceiling" not in measured:
        return ["failed"]
    sizes = (measured["peak_bytes"], measured["step_peak_bytes"], *measured["state_bytes"].values())
    return [*(f"{size / GIB:.4g}" for size in sizes), ", ".join(measured["gradient_dtypes"])]
