"""Figures of runs, ours or TRL's (peers/trl_grpo.py), from their folders: bench/run_figures.py RUN_FOLDER ... [--json FILE].

Prints seconds, speed, rewards, gaps and memory over the steps, and the timeline's seconds a step by name. Evaluations and
checkpoints are in no seconds; the first two steps, in which kernels are compiled, are left out where there are more.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

Lines = list[dict[str, Any]]
WARM_UP, SETTLED = 2, 5  # from step SETTLED on, memory is not to grow
NOT_COUNTED = ("step/evaluation_seconds", "step/checkpoint_seconds")
SHOWN = ("step/seconds", "rollout/seconds", "sync/seconds", "sync/pause_seconds", "staleness/max")
GAPS = ("logprob_gap/mean", "logprob_gap/max", "logprob_gap/own_experts_mean", "router_replay/moved_fraction")


def read(path: Path) -> Lines:
    """Without a last line that was cut off."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.is_file() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def read_figures(folder: Path) -> dict[str, Any]:
    steps, evaluations = read(folder / "metrics.jsonl"), read(folder / "evaluations.jsonl")
    for step in steps:
        step["step/seconds"] -= sum(step.get(name, 0.0) for name in NOT_COUNTED)
    settled, figures = steps[WARM_UP:] or steps, dict[str, Any](steps=len(steps))
    for name in (*SHOWN, *GAPS):
        values = [step[name] for step in settled if name in step]
        if values:
            figures[name] = {"median": statistics.median(values), "least": min(values), "most": max(values)}
    if all("train/response_tokens" in step for step in settled):
        tokens, seconds = (sum(step[name] for step in settled) for name in ("train/response_tokens", "step/seconds"))
        figures["tokens a second"] = tokens / max(seconds, 1e-9)
    figures["held-out reward by step"] = {line["step"]: line["eval/reward"] for line in evaluations if "eval/reward" in line}
    for name in ("memory/host_bytes", "memory/device_bytes", "memory/tensors_bytes", "memory/tensors_peak_bytes"):
        values = [step[name] for step in steps if name in step]
        if len(values) > SETTLED:
            figures[name] = {f"step {SETTLED}": values[SETTLED], "last": values[-1], "most": max(values[SETTLED:])}
    figures["timeline, seconds a step"] = _seconds_by_name(folder / "timeline.json", len(steps))
    return figures | {"metrics": steps}


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
    parser.add_argument("run_folders", type=Path, nargs="+", metavar="RUN_FOLDER")
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args()
    found = {folder.name: read_figures(folder) for folder in given.run_folders}
    for run, figures in found.items():
        for name, value in figures.items():
            if name != "metrics":
                print(f"{run}: {name}: {json.dumps(value)}")
    if given.json is not None:
        whole = next(iter(found.values())) if len(found) == 1 else found
        given.json.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
