"""A run's curve in one small file: docs/bench/curve.py RUN_FOLDER --json FILE [--seconds N]

Evaluations, of each step the figures of COLUMNS, and three responses to held-out problems before the first step beside those of
the last evaluation. A run that was cut off has as much as it logged.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

COLUMNS = (
    *("step", "reward/mean", "response/tokens_mean", "entropy/mean", "logprob_gap/mean"),
    *("step/seconds", "rollout/seconds", "step/train_seconds", "step/sync_seconds"),
)
RESPONSES = 3


def lines_of(path: Path) -> list[dict[str, Any]]:
    """Whole ones: the last may have been cut off."""
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def before_and_after(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of the first held-out problems that both evaluations keep."""
    held_out = [each for each in samples if each["set"] != "train"]
    steps = sorted({each["step"] for each in held_out})
    ends = [steps[0], steps[-1]] if steps else [0, 0]
    first, last = ({each["line"]: each for each in held_out if each["step"] == step} for step in ends)
    both = [(first[line], last[line]) for line in sorted(first.keys() & last.keys())][:RESPONSES]
    words = ("prompt", "answer")
    return [{**{key: old[key] for key in words}, "before": old["response"], "after": new["response"]} for old, new in both]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("run", type=Path)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--seconds", type=float, help="of the whole run, its start included")
    given = parser.parse_args()
    steps, evaluations = lines_of(given.run / "metrics.jsonl"), lines_of(given.run / "evaluations.jsonl")
    found: dict[str, Any] = {
        "seconds": given.seconds,
        "steps_seconds": sum(step["step/seconds"] for step in steps),
        "evaluations": [[each["step"], round(each["eval/reward"], 4)] for each in evaluations],
        "responses": before_and_after(lines_of(given.run / "samples.jsonl")),
        "steps_columns": list(COLUMNS),
        "steps": [[round(step.get(name, 0.0), 4) for name in COLUMNS] for step in steps],
    }
    given.json.write_text(json.dumps(found) + "\n", encoding="utf-8")
    print(f"{given.run.name}: {len(steps)} steps, held-out {' '.join(f'{value:.3f}' for _, value in found['evaluations'])}")


if __name__ == "__main__":
    main()
