"""Whether two runs wrote the same numbers: bench/same_metrics.py RUN_FOLDER OTHER_FOLDER [--json FILE]

Compares every metric of every step to the last digit, but for seconds, bytes and speeds, which are measurements of the machine.
Exit code 1 where one differs, or the steps are not the same.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from megasync.report.registry import metric

OF_MACHINE = {"s", "bytes", "tokens/s", "GB/s"}  # units


def compare(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> dict[str, Any]:
    """How many metrics of how many steps are equal, and which are not, by step."""
    equal, names, differing = 0, set[str](), list[str]()
    for place, (mine, theirs) in enumerate(zip(one, other, strict=False)):
        for name in sorted(mine.keys() | theirs.keys()):
            found = metric(name)
            if found is not None and found.unit in OF_MACHINE:
                continue
            names.add(name)
            if name in mine and name in theirs and json.dumps(mine[name]) == json.dumps(theirs[name]):
                equal += 1
            else:
                differing.append(f"{place}: {name}: {mine.get(name)!r} and {theirs.get(name)!r}")
    counts = {"steps": [len(one), len(other)], "metrics": len(names), "equal": equal}
    return {**counts, "differing": differing, "names": sorted(names)}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("runs", type=Path, nargs=2, metavar="RUN_FOLDER")
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args()
    steps = [
        [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()] for run in given.runs
    ]
    found = compare(*steps)
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    compared = found["equal"] + len(found["differing"])
    print(f"{found['equal']} of {compared} numbers are equal: {found['metrics']} metrics of {found['steps']} steps")
    print("\n".join(found["differing"][:20]))
    return int(bool(found["differing"]) or len(set(found["steps"])) > 1 or not compared)


if __name__ == "__main__":
    sys.exit(main())
