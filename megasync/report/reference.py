"""Writes docs/metrics.md: every metric with its unit and meaning, and the conditions of advisories. No torch in here.

Leaves out the tables themselves (registry.py, advisories.py).

    python -m megasync.report.reference --to docs/metrics.md
"""

from __future__ import annotations

import argparse
from pathlib import Path

from megasync.config.files import write_atomically
from megasync.report.advisories import CONDITIONS
from megasync.report.registry import GROUPS, METRICS

HEAD = """# Metrics

Written by `python -m megasync.report.reference` from the tables in `megasync/report/`.

Each line of `metrics.jsonl` has the metrics of one step that apply to the run; metrics that begin with `eval/` are in
`evaluations.jsonl`. A word in capitals is a placeholder for the name of a reward, an evaluation set or a phase, or for a number.
All loggers of `run.loggers` get the same names and values. A *nat* is the unit of natural logarithms.
"""
ADVISORIES = """
## Advisories

The end of a run and its report show an advisory if its condition holds. Conditions read only the metrics; they do not hold if a
metric is missing or the run is too short.

| name | condition | threshold | what to try |
|---|---|---|---|"""


def page() -> str:
    """The page in Markdown: one table per group of metrics, and one of advisories."""
    lines = [HEAD]
    for group, sentence in GROUPS.items():
        lines += [f"\n## {group.capitalize()}\n", f"{sentence}\n", "| metric | name | unit | meaning |", "|---|---|---|---|"]
        rows = [each for each in METRICS if each.group == group]
        lines += [f"| `{each.key}` | {each.label} | {each.unit} | {each.meaning} |" for each in rows]
    lines += [ADVISORIES, *(f"| `{each.name}` | {each.title} | {each.threshold} | {each.remedy} |" for each in CONDITIONS)]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m megasync.report.reference", description=__doc__.splitlines()[0])
    parser.add_argument("--to", required=True, type=Path, metavar="FILE", help="where to write it")
    write_atomically(parser.parse_args().to, page())


if __name__ == "__main__":
    main()
