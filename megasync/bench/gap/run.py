"""The rungs of `python -m megasync.bench gap`, one after the other, each in processes of its own.

Leaves out one rung (rank.py).

    python -m megasync.bench gap --config configs/bench_gap.yaml model.path=FOLDER [key=value ...] [--json FILE]
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megasync.bench.common.processes import run_program
from megasync.bench.common.results import Results, describe, print_figures, write_results
from megasync.bench.config import BenchRoot, Rung
from megasync.config.load import load_config
from megasync.launch.devices import visible_devices
from megasync.launch.processes import INTERRUPTED, TERMINATED

OVERRIDES: dict[Rung, tuple[str, ...]] = {
    "bfloat16": ("model.dtype=bfloat16",),
    "bfloat16 head": ("model.dtype=bfloat16", "engine.head_dtype=float32"),
    "float16": ("model.dtype=float16",),
    "float16 head": ("model.dtype=float16", "engine.head_dtype=float32"),
    "float32": ("model.dtype=float32",),
    "exact": ("model.exact=true",),
}

COLUMNS = (
    "tokens: {tokens} | mean gap: {mean:.2g} | largest: {max:.2g} | differing: {share:.1%} | ESS: {ess:.5f}"
    "| generated tokens/s: {generated_tokens_per_second:.0f} | trained tokens/s: {trained_tokens_per_second:.0f}"
)


def overrides_of(rung: Rung) -> tuple[str, ...]:
    """With the dtype that is exact on this machine."""
    of_exact = (f"model.dtype={'bfloat16' if visible_devices() else 'float32'}",) if rung == "exact" else ()
    return (*of_exact, *OVERRIDES[rung])


def run(path: str, overrides: Sequence[str], config: BenchRoot, json_path: Path | None) -> int:
    """Measure the rungs that the config names, and print a table; exit code 1 where one failed."""
    folder, failed = config.run.folder, False
    found: dict[str, Results] = {}
    for rung in config.bench.rungs:
        print(f"{rung}: {' '.join(overrides_of(rung))}", flush=True)
        own = load_config(path, [*overrides, *overrides_of(rung)], BenchRoot)
        code, measured = run_program("gap", own, folder, rung.replace(" ", "_"))
        if code in (INTERRUPTED, TERMINATED):
            return code
        failed = failed or code != 0
        if measured is not None:
            measured.pop("is_complete")
            found[rung] = measured
    write_results(describe("gap", config) | {"rungs": found}, folder / "bench_gap.json", json_path)
    rows = {rung: {**of, "share": of["differing"] / of["tokens"]} for rung, of in found.items()}
    print_figures("Log-probs of trainer and vLLM, in nats a token", "rung", COLUMNS, rows)
    return int(failed)
