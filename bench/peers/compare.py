"""A table of the runs that bench/peers/run.sh leaves in a folder, TRL's and ours, and their figures as JSON, whole or not.

    python3 bench/peers/compare.py OUT [--json FILE]

Evaluations and checkpoints are in no seconds. Seconds a step, of generation and of a sync are medians, tokens/s is sampled tokens
over seconds, all after the first two steps, in which kernels are compiled. `to +0.2` is the first evaluation whose greedy reward
is 0.2 above the one before the first step: training seconds until there, and steps.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from pathlib import Path
from typing import Any

Lines = list[dict[str, Any]]
RISE, WARM_UP = 0.2, 2
NOT_COUNTED = ("step/evaluation_seconds", "step/checkpoint_seconds")
HEADERS = ("run", "steps", "s a step", "generation, s", "sync, s", "tokens/s", "greedy reward", "to +0.2")


def read(path: Path) -> Lines:
    """Without a last line that was cut off."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.is_file() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def trl(folder: Path) -> tuple[Lines, Lines]:
    return read(folder / "steps.jsonl"), read(folder / "evaluations.jsonl")


def ours(folder: Path) -> tuple[Lines, Lines]:
    """Steps and evaluations by the names that trl_grpo.py writes."""
    steps = [
        {
            "step": line["step"],
            "seconds": line["step/seconds"] - sum(line.get(name, 0.0) for name in NOT_COUNTED),
            "tokens": line["train/response_tokens"],
            "generate_seconds": line["rollout/seconds"],
            "sync_seconds": line["sync/seconds"],
            "reward": line["reward/mean"],
        }
        for line in read(folder / "metrics.jsonl")
    ]
    return steps, [{"step": one["step"], "reward": one["eval/reward"]} for one in read(folder / "evaluations.jsonl")]


def figures(steps: Lines, evaluations: Lines) -> dict[str, Any] | None:
    """None where not one step is there."""
    settled = steps[WARM_UP:] or steps
    if not settled or not evaluations:
        return None
    first = evaluations[0]["reward"]
    reached = next((one["step"] for one in evaluations if one["reward"] >= first + RISE), None)
    return {
        "steps": len(steps),
        "step_seconds": statistics.median(line["seconds"] for line in settled),
        "generate_seconds": statistics.median(line.get("generate_seconds", 0.0) for line in settled),
        "sync_seconds": statistics.median(line.get("sync_seconds", 0.0) for line in settled),
        "tokens_per_second": sum(line["tokens"] for line in settled) / sum(line["seconds"] for line in settled),
        "reward_before": first,
        "reward_after": evaluations[-1]["reward"],
        "steps_to_rise": reached,
        "seconds_to_rise": reached and sum(line["seconds"] for line in steps if line["step"] <= reached),
        "evaluations": evaluations,
        "metrics": steps,
    }


def row(name: str, found: dict[str, Any]) -> str:
    risen = f"{found['seconds_to_rise']:.0f} s, {found['steps_to_rise']} steps" if found["steps_to_rise"] else "not reached"
    cells = [name, str(found["steps"]), *(f"{found[f'{part}_seconds']:.3f}" for part in ("step", "generate", "sync"))]
    cells += [f"{found['tokens_per_second']:.0f}", f"{found['reward_before']:.3f} to {found['reward_after']:.3f}", risen]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, metavar="OUT")
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args()
    found = {}
    for folder in sorted(path for path in given.folder.iterdir() if re.fullmatch(r"(trl|megasync)\d+", path.name)):
        told = figures(*(trl if folder.name.startswith("trl") else ours)(folder))
        if told:
            found[folder.name] = told
    print(f"| {' | '.join(HEADERS)} |\n|{'---|' * len(HEADERS)}")
    for name, told in found.items():
        print(row(name, told))
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
