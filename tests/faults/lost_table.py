"""What lost nodes cost a run of rollouts: kinds of loss x staleness x random moments, one after another, into a table as they go.

    python -m tests.faults.lost_table lost.jsonl --points 5 --seed 0                 # root; minutes a case on two cores
    python -m tests.faults.lost_table lost.jsonl --points 5 --seed 0 --together 5    # a run a kind: half of that
    python -m tests.faults.lost_table lost.jsonl --points 5 --seed 0 --only cut --most 1
    python -m tests.faults.lost_table lost.jsonl --show                              # the table in Markdown

A case that is in the file is not run again; the seed makes the moments. Leaves out the cases (nodes.py).
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.faults.nodes import KINDS, STALENESS, LostCase, LostRun, lost_cases
from tests.runs.train_cases import write_config
from tests.support.nodes import nodes


def run_cases(cases: Sequence[LostCase], said: Path | None = None) -> list[dict[str, Any]]:
    """Lines of the file, of one run. What was said is kept where something was wrong, else in the folder `said` alone."""
    short = Path(tempfile.mkdtemp(prefix="msl-", dir="/tmp"))  # short enough for sockets
    begin = time.monotonic()
    try:
        config = write_config(short, engine={"wrap": "ddp"})
        with nodes(2, short) as pair:
            run = LostRun(cases, pair, config)
            run.run()
        whole = {"codes": run.codes, "problems": run.problems, "seconds": round(time.monotonic() - begin), "together": len(cases)}
        if run.problems:
            whole["said"] = run.said[-40000:]
        if said is not None:
            said.mkdir(parents=True, exist_ok=True)
            (said / f"{cases[0].name}.txt").write_text(run.said, encoding="utf-8")
    finally:
        shutil.rmtree(short, ignore_errors=True)
    return [
        {"case": case.name, "kind": case.kind, "staleness": case.staleness, "step": case.step, "offset": case.offset}
        | {"first_codes": seen.first_codes, "lost_seconds": round(seen.lost_seconds, 1)}
        | whole
        for case, seen in zip(cases, run.seen, strict=True)
    ]


def in_runs(cases: Sequence[LostCase], together: int) -> list[list[LostCase]]:
    """Of one kind and staleness each; the runs with the first moments first."""
    runs: list[list[LostCase]] = []
    for case in cases:
        most = 1 if case.kind == "replica-node" else together
        alike = (run for run in runs if len(run) < most and (run[0].kind, run[0].staleness) == (case.kind, case.staleness))
        if (run := next(alike, None)) is None:
            runs.append(run := [])
        run.append(case)
    return runs


def table(lines: Sequence[dict[str, Any]]) -> str:
    """A row for each kind and staleness. All right: each prompt once, no token too old, each step once, nothing left behind."""
    titles = "lost | staleness | moments: steps + seconds | exit codes | seconds to the next step | median | worst | all right"
    rows = [f"| {titles} |", "|---|---|---|---|---|---|---|---|"]
    for kind in KINDS:
        for staleness in STALENESS:
            own = [line for line in lines if (line["kind"], line["staleness"]) == (kind, staleness)]
            if not own:
                continue
            moments = ", ".join(f"{line['step']} + {line['offset']}" for line in own)
            codes = "; ".join(sorted({_codes(line) for line in own}))
            seconds = [line["lost_seconds"] for line in own]
            reported = f"{', '.join(map(str, seconds))} | {statistics.median(seconds):.1f} | {max(seconds):.1f}"
            right = f"{sum(not line['problems'] for line in own)} of {len(own)}"
            rows.append(f"| {kind} | {staleness} | {moments} | {codes} | {reported} | {right} |")
    return "\n".join(rows)


def _codes(line: dict[str, Any]) -> str:
    first = f"{', '.join(map(str, line['first_codes']))}, then " if line["first_codes"] else ""
    return first + ", ".join(map(str, line["codes"]))


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.lost_table", description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, help="JSONL, a line a case")
    parser.add_argument("--points", type=int, default=5, help="moments of each kind and staleness")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="cases whose names have this in them")
    parser.add_argument("--together", type=int, default=1, help="so many losses of a kind in one run, one after another")
    parser.add_argument("--most", type=int, default=10**6, help="start so many runs, then leave")
    parser.add_argument("--said", type=Path, metavar="FOLDER", help="for all that the launchers said, with seconds")
    parser.add_argument("--show", action="store_true", help="run none")
    given = parser.parse_args(list(arguments))
    read = given.file.read_text(encoding="utf-8").splitlines() if given.file.is_file() else []
    lines = [json.loads(line) for line in read]
    done = {line["case"] for line in lines}
    left = [case for case in lost_cases(given.points, given.seed) if case.name not in done and given.only in case.name]
    for cases in () if given.show else in_runs(left, given.together)[: given.most]:
        moments = ", ".join(f"{case.offset} s after step {case.step}" for case in cases)
        print(f"{cases[0].name}: {moments}, of seed {given.seed}", flush=True)
        new = run_cases(cases, given.said)
        with given.file.open("a", encoding="utf-8") as opened:
            opened.writelines(json.dumps(line) + "\n" for line in new)
        lines += new
        reported = {name: [line[name] for line in new] for name in ("first_codes", "lost_seconds")}
        print(f"    {reported | {name: new[0][name] for name in ('codes', 'problems', 'seconds')}}", flush=True)
    print(table(lines))
    return int(any(line["problems"] for line in lines))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
