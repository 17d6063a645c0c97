"""What a training run on GPUs came to, from its folder: bench/run_figures.py RUN_FOLDER [--json FILE].

Prints gaps, seconds and memory over the steps, and the timeline's seconds a step by name.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

SETTLED = 5  # from this step on, memory is not to grow


def read_figures(folder: Path) -> dict[str, Any]:
    """Of all steps that were logged."""
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    figures: dict[str, Any] = {"steps": len(steps)}
    gaps = ("logprob_gap/mean", "logprob_gap/max", "logprob_gap/own_experts_mean", "router_replay/moved_fraction")
    for name in (*gaps, "staleness/max", "sync/seconds", "sync/pause_seconds", "step/seconds"):
        values = [step[name] for step in steps if name in step]
        if values:
            figures[name] = {"median": statistics.median(values), "least": min(values), "most": max(values)}
    for name in ("memory/host_bytes", "memory/device_bytes", "memory/tensors_bytes", "memory/tensors_peak_bytes"):
        values = [step[name] for step in steps if name in step]
        if len(values) > SETTLED:
            figures[name] = {f"step {SETTLED}": values[SETTLED], "last": values[-1], "most": max(values[SETTLED:])}
    figures["timeline, seconds a step"] = _seconds_by_name(folder / "timeline.json", len(steps))
    return figures


def _seconds_by_name(path: Path, num_steps: int) -> dict[str, float]:
    """The first step's spans and the first publish are among them."""
    seconds: dict[str, float] = defaultdict(float)
    if path.is_file():
        for event in json.loads(path.read_text(encoding="utf-8"))["traceEvents"]:
            if event["ph"] == "X":
                seconds[event["name"]] += event["dur"] / 1e6
    return {name: round(total / max(1, num_steps), 4) for name, total in sorted(seconds.items(), key=lambda item: -item[1])}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run_folder", type=Path)
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args()
    figures = read_figures(given.run_folder)
    for name, value in figures.items():
        print(f"{name}: {json.dumps(value)}")
    if given.json is not None:
        steps = (given.run_folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        whole = {**figures, "metrics": [json.loads(line) for line in steps]}
        given.json.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
