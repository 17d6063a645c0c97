"""Quickstart's accuracy without staleness and with some, by steps and by time: docs/bench/staleness_accuracy.py FOLDER.

For each seed one warm-up and the runs from its weights, with evaluations on the way. Prints the accuracy after all steps, the
difference to the synchronous run, when each run first reached what the synchronous one ended with, and how far ahead of it a run
was on average while both had trained for as long. Takes about two minutes a run on two cores, and three a warm-up.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

CONFIG = Path(__file__).resolve().parents[2] / "configs" / "quickstart.yaml"
RUNS = {
    "0": ["rollout.max_staleness=0"],
    "1 continue": ["rollout.max_staleness=1", "rollout.on_update=continue"],
    "4 continue": ["rollout.max_staleness=4", "rollout.on_update=continue"],
}


def run_seed(folder: Path, seed: int, ranks: int, steps: int, every: int, names: list[str]) -> dict[str, dict[str, Any]]:
    """The runs of a seed; one that is there whole is not repeated."""
    own = [f"run.seed={seed}", f"run.dir={folder}", f"run.steps={steps}", f"rollout.evaluate_every_steps={every}"]
    own += ["run.progress=plain"]
    assets = folder / "assets"
    paths = [f"model.path={folder / 'sft' / 'hf'}", f"data.train={assets / 'train.jsonl'}"]
    paths += [f"data.eval={assets / 'held_out.jsonl'}"]
    found = {}
    for name in names:
        overrides = RUNS[name]
        run = folder / ("rl" if name == "0" else name.replace(" ", "_"))
        command = [sys.executable, "-m", "megasync.quickstart", *own, *overrides, "--nproc", str(ranks)]
        if name != "0":
            launcher = [sys.executable, "-m", "megasync.launch.torchrun", "--nproc-per-node", str(ranks), "-m", "megasync.train"]
            command = [*launcher, str(CONFIG), *own, *paths, f"run.name={run.name}", *overrides]
        if not (run / "summary.json").exists():
            subprocess.run(command, check=True)
        found[name] = figures_of(run)
    return found


def figures_of(run: Path) -> dict[str, Any]:
    """Accuracies by the number of steps before them, and the seconds until then, evaluations left out."""
    steps, evaluations = (_lines(run / name) for name in ("metrics.jsonl", "evaluations.jsonl"))
    accuracy = {line["step"]: line["eval/reward"] for line in evaluations}
    seconds = {line["step"]: line["step/seconds"] - line["step/evaluation_seconds"] for line in steps}
    at = {step: sum(taken for number, taken in seconds.items() if number <= step) for step in accuracy}
    return {"accuracy": accuracy, "seconds": at, "last": accuracy[max(accuracy)], "seconds_total": at[max(at)]}


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def seconds_to(run: dict[str, Any], accuracy: float) -> float | None:
    """Until the run first had this accuracy."""
    return next((run["seconds"][step] for step in sorted(run["accuracy"]) if run["accuracy"][step] >= accuracy), None)


def lead(run: dict[str, Any], other: dict[str, Any]) -> float:
    """Accuracy above the other run's at the same time, on average over the time that both have trained for."""
    times = np.linspace(0.0, min(each["seconds_total"] for each in (run, other)), 1001)
    curves = [[(each["seconds"][step], each["accuracy"][step]) for step in sorted(each["accuracy"])] for each in (run, other)]
    own, others = (np.interp(times, *zip(*curve, strict=True)) for curve in curves)
    return float(np.mean(own - others))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=1, help="of the trainer; with 1 it and the replica take a core each")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--every", type=int, default=10, help="steps from one evaluation to the next")
    parser.add_argument("--run", action="append", choices=list(RUNS)[1:], help="beside the synchronous one")
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args()
    names = ["0", *(given.run or ["4 continue"])]
    numbers = given.ranks, given.steps, given.every
    found = {seed: run_seed(given.folder / f"seed{seed}", seed, *numbers, names) for seed in range(given.seeds)}
    for seed, runs in found.items():
        aim = runs["0"]["last"]
        for name, run in runs.items():
            reached = seconds_to(run, aim)
            when = "not reached" if reached is None else f"{reached:.1f} s"
            print(f"seed {seed}  {name:<11}{run['last']:.3f}  {run['seconds_total']:.1f} s in all; {aim:.3f}: {when}")
    for name in names[1:]:
        for words, values in {
            "after as many steps (aimed at: within 0.05)": [runs[name]["last"] - runs["0"]["last"] for runs in found.values()],
            "over time (aimed at: ahead)": [lead(runs[name], runs["0"]) for runs in found.values()],
        }.items():
            of_seeds = ", ".join(f"{value:+.3f}" for value in values)
            print(f"{name}: accuracy minus that of 0 {words}: {statistics.fmean(values):+.3f} ({of_seeds})")
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
