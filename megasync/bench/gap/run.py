"""The rungs of `python -m megasync.bench gap`, one after the other, each in processes of its own.

Leaves out one rung (rank.py).

    python -m megasync.bench gap --config configs/bench_gap.yaml model.path=FOLDER [key=value ...] [--json FILE]
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megasync.bench.common.results import Results, describe, print_table, write_results
from megasync.bench.config import BenchRoot, Rung
from megasync.config.load import load_config, save_config
from megasync.launch.devices import visible_devices
from megasync.launch.processes import INTERRUPTED, run_to_end
from megasync.launch.scope import listen_on_loopback

OVERRIDES: dict[Rung, tuple[str, ...]] = {
    "bfloat16": ("model.dtype=bfloat16",),
    "bfloat16 head": ("model.dtype=bfloat16", "engine.head_dtype=float32"),
    "float16": ("model.dtype=float16",),
    "float16 head": ("model.dtype=float16", "engine.head_dtype=float32"),
    "float32": ("model.dtype=float32",),
    "exact": ("model.exact=true",),
}


def overrides_of(rung: Rung) -> tuple[str, ...]:
    """With the dtype that is exact on this machine."""
    of_exact = (f"model.dtype={'bfloat16' if visible_devices() else 'float32'}",) if rung == "exact" else ()
    return (*of_exact, *OVERRIDES[rung])


def run(path: str, overrides: Sequence[str], config: BenchRoot, json_path: Path | None) -> int:
    """Measure the rungs that the config names, and print a table; exit code 1 where one failed."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    listen_on_loopback()
    folder, failed = config.run.folder, False
    found: dict[str, dict[str, Any]] = {}
    for rung in config.bench.rungs:
        own = load_config(path, [*overrides, *overrides_of(rung)], BenchRoot)
        name = rung.replace(" ", "_")
        config_path, results_path = folder / f"{name}.yaml", folder / f"{name}.json"
        save_config(own, config_path)
        results_path.unlink(missing_ok=True)
        print(f"{rung}: {' '.join(overrides_of(rung))}", flush=True)
        code = run_to_end([sys.executable, "-m", "megasync.bench.gap.rank", str(config_path), str(results_path)])
        if code == INTERRUPTED:
            return code
        failed = failed or code != 0
        if results_path.exists():
            found[rung] = json.loads(results_path.read_text(encoding="utf-8"))
    results: Results = describe("gap", config) | {"rungs": found}
    write_results(results, folder / "bench_gap.json", json_path)
    show(found)
    return int(failed)


def show(found: dict[str, dict[str, Any]]) -> None:
    headers = ("rung", "tokens", "mean gap", "largest", "differing", "ESS", "generated tokens/s", "trained tokens/s")
    rows = [
        (
            rung,
            str(each["tokens"]),
            f"{each['mean']:.2g}",
            f"{each['max']:.2g}",
            f"{each['differing'] / each['tokens']:.1%}",
            f"{each['ess']:.5f}",
            f"{each['generated_tokens_per_second']:.0f}",
            f"{each['trained_tokens_per_second']:.0f}",
        )
        for rung, each in found.items()
    ]
    print_table("Log-probs of trainer and vLLM, in nats a token", headers, rows)
