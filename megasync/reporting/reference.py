"""Writes docs/metrics.md: every metric with its unit and meaning, and the conditions that advisories look for. No torch in here.

Leaves out the tables themselves (metric_names.py, advisories.py).

    python -m megasync.reporting.reference --to docs/metrics.md
"""

from __future__ import annotations

import argparse
from pathlib import Path

from megasync.config.files import write_atomically
from megasync.reporting.advisories import CONDITIONS
from megasync.reporting.metric_names import GROUPS, METRICS

HEAD = """# Metrics

Written by `python -m megasync.reporting.reference` from the tables in `megasync/reporting/`.

A step's line in `metrics.jsonl` has those that apply to the run; those that begin with `eval/` are in `evaluations.jsonl`. A word
in capitals stands for a name or a number: of a reward, an evaluation set, a phase. All loggers of `run.loggers` get the same
names and values. A *nat* is the unit of natural logarithms.
"""
ADVISORIES = """
## Advisories

What the end of a run and its report point out. Each looks at the metrics alone; where a metric is missing, or the run is too
short to tell, it says nothing.

| name | what | threshold | what to try |
|---|---|---|---|"""


def page() -> str:
    """A table a group of metrics, and one of advisories."""
    lines = [HEAD]
    for group, sentence in GROUPS.items():
        lines += [f"\n## {group.capitalize()}\n", f"{sentence}\n", "| metric | name | unit | meaning |", "|---|---|---|---|"]
        rows = [each for each in METRICS if each.group == group]
        lines += [f"| `{each.key}` | {each.label} | {each.unit} | {each.meaning} |" for each in rows]
    lines += [ADVISORIES, *(f"| `{each.name}` | {each.title} | {each.threshold} | {each.remedy} |" for each in CONDITIONS)]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m megasync.reporting.reference", description=__doc__.splitlines()[0])
    parser.add_argument("--to", required=True, type=Path, metavar="FILE", help="where to write it")
    write_atomically(parser.parse_args().to, page())


if __name__ == "__main__":
    main()
