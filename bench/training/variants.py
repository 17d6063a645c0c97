"""Measures training speed and memory on this machine: tokens, model FLOP/s as a share of what matrix products reach, peak bytes.

Starts the ranks of one variant after another (rank.py has what they do); one that fails leaves the others alone.
Model FLOP/s count 6 for each token and each parameter that it meets, attention apart. Leaves out rollouts and weight sync.

    python -m bench train --config configs/bench_train.yaml [key=value ...] [--json FILE]
"""

from __future__ import annotations

import time
from pathlib import Path

from bench.common.processes import run_logged
from bench.common.results import Results, describe, print_figures, write_results
from bench.config import BenchRoot
from engine.config import OFFLOAD_KINDS
from megasync.config.load import with_changes

LOG_TAIL = 2500  # characters of a failed variant's output that are shown
SPEED = (
    "tokens/s/GPU: {tokens_per_second_per_gpu:.0f} | model TFLOP/s/GPU: {tera[0]:.4g} | attention TFLOP/s/GPU: {tera[1]:.4g}"
    "| ceiling: {tera[2]:.4g} | share: {share_of_ceiling:.1%} | with attention: {share_with_attention:.1%}"
    "| peak GiB: {gib[0]:.1f} | last loss: {steps[0][loss]:.4f}"
)
MEMORY = "peak: {gib[0]:.4g} | peak of a step: {gib[1]:.4g}"
FLOPS = ("model_flops_per_gpu", "attention_flops_per_gpu", "ceiling_flops")
COMPARED = ("tokens_per_second_per_gpu", "peak_bytes", "step_peak_bytes")
GIB = 2**30


def measure_variant(config: BenchRoot, variant: str) -> Results:
    """What the variant's ranks measured, and `error` with the end of their output where they failed."""
    own = with_changes(config, {"bench_train.variants": [variant]})
    begin, limit = time.monotonic(), config.bench_train.variant_seconds
    measured, log = run_logged("train", own, config.run.folder / variant, config.bench_train.num_ranks, limit)
    measured["total_seconds"] = time.monotonic() - begin
    if "problem" in measured:
        measured["error"] = f"{measured.pop('problem')}:\n{log.read_text(errors='replace')[-LOG_TAIL:]}"
    return measured


def run(config: BenchRoot, json_path: Path | None) -> int:
    """Measure all variants by a prepared config; the results so far are written after each. Exit code 1: a variant failed."""
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
    rows = {name: _shown(of) if "share_of_ceiling" in of else {} for name, of in variants.items()}
    states = "".join(f"| {kind}: {{gib[{2 + place}]:.4g}}" for place, kind in enumerate(OFFLOAD_KINDS))
    print_figures("training, medians", "variant", SPEED, rows, missing="failed")
    title = "memory of a rank, GiB: the most of all ranks"
    print_figures(title, "variant", f"{MEMORY}{states} | gradients' dtype: {{dtypes}}", rows, missing="failed")
    for name, ratio in results["megatron_fsdp_times_ddp"].items():
        print(f"megatron_fsdp over ddp, {name}: {ratio:.3f}")


def _shown(measured: Results) -> Results:
    """With units of the tables."""
    sizes = (measured["peak_bytes"], measured["step_peak_bytes"], *measured["state_bytes"].values())
    tera, dtypes = [measured[name] / 1e12 for name in FLOPS], ", ".join(measured["gradient_dtypes"])
    return {**measured, "steps": measured["steps"][-1:], "tera": tera, "gib": [size / GIB for size in sizes], "dtypes": dtypes}
