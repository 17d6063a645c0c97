"""What lost nodes cost a run of rollouts: kinds of loss x staleness x random moments, one after another, into a table as they go.

    python -m tests.faults.lost_table lost.jsonl --points 5 --seed 0                 # root; minutes a case on two cores
    python -m tests.faults.lost_table lost.jsonl --points 5 --seed 0 --only cut --most 1
    python -m tests.faults.lost_table lost.jsonl --show                              # the table in Markdown

A case that is in the file is not run again; the seed makes the moments. Leaves out the cases (nodes.py).
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.faults.nodes import KINDS, STALENESS, LostCase, LostRun, lost_cases
from tests.runs.train_cases import write_config
from tests.support.nodes import nodes


def run_case(case: LostCase) -> dict[str, Any]:
    """A line of the file. What was said is kept where something was wrong."""
    short = Path(tempfile.mkdtemp(prefix="msl-", dir="/tmp"))  # short enough for sockets
    begin = time.monotonic()
    moment = {"kind": case.kind, "staleness": case.staleness, "step": case.step, "offset": case.offset}
    line: dict[str, Any] = {"case": case.name, **moment}
    try:
        config = write_config(short, engine={"wrap": "ddp"})
        with nodes(2, short) as pair:
            run = LostRun(case, pair, config)
            try:
                run.run()
            except Exception as error:  # noqa: BLE001 # a line of the table, as any other end
                run.seen.problems.append(f"{type(error).__name__}: {str(error)[-3000:]}")
        seen = run.seen
        line |= {"first_codes": seen.first_codes, "codes": seen.codes, "lost_seconds": round(seen.lost_seconds, 1)}
        line |= {"problems": seen.problems, "seconds": round(time.monotonic() - begin)}
        if seen.problems:
            line["said"] = "\n".join(run.texts)[-20000:]
    finally:
        shutil.rmtree(short, ignore_errors=True)
    return line


def table(lines: Sequence[dict[str, Any]]) -> str:
    """A row for each kind and staleness."""
    rows = ["| lost | staleness | moments | exit codes | seconds to the next step | all right |", "|---|---|---|---|---|---|"]
    for kind in KINDS:
        for staleness in STALENESS:
            own = [line for line in lines if (line["kind"], line["staleness"]) == (kind, staleness)]
            if not own:
                continue
            moments = ", ".join(f"{line['step']} + {line['offset']} s" for line in own)
            codes = "; ".join(sorted({", ".join(map(str, [*line["first_codes"], *line["codes"]])) for line in own}))
            seconds = ", ".join(f"{line['lost_seconds']:g}" for line in own)
            right = f"{sum(not line['problems'] for line in own)} of {len(own)}"
            rows.append(f"| {kind} | {staleness} | {moments} | {codes} | {seconds} | {right} |")
    return "\n".join(rows)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.lost_table", description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, help="JSONL, a line a case")
    parser.add_argument("--points", type=int, default=5, help="moments of each kind and staleness")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="cases whose names have this in them")
    parser.add_argument("--most", type=int, default=10**6, help="run so many cases, then leave")
    parser.add_argument("--show", action="store_true", help="run none")
    given = parser.parse_args(list(arguments))
    read = given.file.read_text(encoding="utf-8").splitlines() if given.file.is_file() else []
    lines = [json.loads(line) for line in read]
    done = {line["case"] for line in lines}
    left = [case for case in lost_cases(given.points, given.seed) if case.name not in done and given.only in case.name]
    for case in () if given.show else left[: given.most]:
        print(f"{case.name}: {case.offset} s after step {case.step}, of seed {given.seed}", flush=True)
        lines.append(run_case(case))
        with given.file.open("a", encoding="utf-8") as opened:
            opened.write(json.dumps(lines[-1]) + "\n")
        told = {name: lines[-1][name] for name in ("first_codes", "codes", "lost_seconds", "problems", "seconds")}
        print(f"    {told}", flush=True)
    print(table(lines))
    return int(any(line["problems"] for line in lines))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
