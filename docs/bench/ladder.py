"""Short GRPO runs, one for each rung of docs/exact.md, and a table of them: gaps, ESS, seconds of a step, tokens a second.

    python docs/bench/ladder.py --to FOLDER --config configs/smollm2.yaml --steps 20 [--rungs bfloat16,exact] [--ranks 1] [key=value ...]

Without staleness, with one mini-batch and each token in the loss, so that a gap is nothing but the two sides' rounding. A run that
is there whole is not repeated; one that fails leaves its log in FOLDER, and the others go on. On one GPU give
rollout.placement=colocated rollout.gpu_memory_utilization=0.4; on CPUs and GPUs alike `exact` has the dtype that is exact there.
Seconds and speeds are medians over the steps after the first two, in which kernels are compiled.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from megasync.bench.config import Rung
from megasync.bench.gap.run import OVERRIDES, overrides_of

ROOT = Path(__file__).resolve().parents[2]
OWN = ["rollout.max_staleness=0", "rollout.on_update=drain", "algorithm.num_minibatches=1", "rollout.evaluate_at_start=false"]
OWN += ["rollout.evaluate_every_steps=0", "data.eval=", "checkpoint.every_steps=0", "run.progress=plain"]
WARM_UP = 2
HEADERS = (
    *("rung", "steps", "tokens", "mean gap", "largest", "ESS", "differing", "step, s", "generation, s"),
    *("training, s", "generated tokens/s", "trained tokens/s"),
)


def train(folder: Path, config: Path, rung: Rung, given: argparse.Namespace) -> Path:
    """The run's folder, whole or not."""
    name = rung.replace(" ", "_")
    run = folder / name
    if (run / "summary.json").is_file():
        return run
    own = [f"run.dir={folder}", f"run.name={name}", f"run.steps={given.steps}", *OWN, *given.overrides, *overrides_of(rung)]
    launcher = [sys.executable, "-m", "megasync.launch.torchrun", "--nproc-per-node", str(given.ranks), "-m", "megasync.train"]
    folder.mkdir(parents=True, exist_ok=True)
    print(f"{rung}: {' '.join(own)}", flush=True)
    with (folder / f"{name}.log").open("w", encoding="utf-8") as log:
        code = subprocess.run([*launcher, str(config), *own], stdout=log, stderr=log, check=False).returncode
    if code:
        print(f"{rung}: exit code {code}, see {log.name}", file=sys.stderr, flush=True)
    return run


def figures(run: Path) -> dict[str, Any] | None:
    """Of the steps that were logged; None where there are none."""
    path = run / "metrics.jsonl"
    steps = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []
    if not steps:
        return None
    settled = steps[WARM_UP:] or steps
    tokens = [step["train/response_tokens"] for step in steps]

    def middle(values: list[float]) -> float:
        return statistics.median(values)

    training = [step["step/train_seconds"] + step.get("step/log_probs_seconds", 0.0) for step in settled]
    return {
        "steps": len(steps),
        "tokens": int(sum(tokens)),
        "mean_gap": sum(n * step["logprob_gap/mean"] for n, step in zip(tokens, steps, strict=True)) / sum(tokens),
        "largest_gap": max(step["logprob_gap/max"] for step in steps),
        "ess": statistics.fmean(step["importance/ess"] for step in steps),
        "differing": sum(step["exact/differing_tokens"] for step in steps) if "exact/differing_tokens" in steps[0] else None,
        "step_seconds": middle([step["step/seconds"] for step in settled]),
        "rollout_seconds": middle([step["rollout/seconds"] for step in settled]),
        "training_seconds": middle(training),
        "rollout_tokens_per_second": middle([step["rollout/tokens_per_second"] for step in settled]),
        "training_tokens_per_second": middle(
            [step["train/response_tokens"] / seconds for step, seconds in zip(settled, training, strict=True)]
        ),
        "metrics": steps,
    }


def row(rung: str, found: dict[str, Any]) -> str:
    differing = "" if found["differing"] is None else f"{int(found['differing'])}"
    cells = [rung, str(found["steps"]), str(found["tokens"]), f"{found['mean_gap']:.2g}", f"{found['largest_gap']:.2g}"]
    cells += [f"{found['ess']:.5f}", differing, *(f"{found[f'{name}_seconds']:.2f}" for name in ("step", "rollout", "training"))]
    cells += [f"{found[f'{name}_tokens_per_second']:.0f}" for name in ("rollout", "training")]
    return f"| {' | '.join(cells)} |"


def main() -> int:
    """Exit code 1 where a rung has no figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--to", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "smollm2.yaml", metavar="FILE")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rungs", default=",".join(OVERRIDES), help="of these, in this order (default: all)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every step's metrics there")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="of the config, for all rungs")
    given = parser.parse_intermixed_args()
    wanted = given.rungs.split(",")
    if unknown := [name for name in wanted if name not in OVERRIDES]:
        parser.error(f"--rungs {unknown[0]}: none of {', '.join(OVERRIDES)}")
    folder, config = given.to.resolve(), given.config.resolve()
    found = {rung: figures(train(folder, config, rung, given)) for rung in OVERRIDES if rung in wanted}
    print(f"| {' | '.join(HEADERS)} |\n|{'---|' * len(HEADERS)}")
    for rung, told in found.items():
        print(row(rung, told) if told else f"| {rung} | none |")
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return int(not all(found.values()))


if __name__ == "__main__":
    sys.exit(main())
