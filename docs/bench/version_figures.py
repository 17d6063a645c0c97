"""What a run's log of versions takes, and whether every version comes out of it: docs/bench/version_figures.py RUN_FOLDER [--json FILE]

Each version is made of the one before it, and each tensor compared with the digest that was taken while training; a version's
digests of all tensors are then taken anew. Seconds to write are those that the run logged, seconds to apply are this machine's.
With sync.transport=delta also what was sent, and in which steps all of it. Exit code 1 where a version does not come out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bridge.layout.digest import digest_tensor
from bridge.versions.delta import num_threads
from bridge.versions.file import VersionLogError
from bridge.versions.reader import VersionReader

Row = dict[str, Any]


def made_again(log: VersionReader) -> list[Row]:
    """Of every version, in order, a stage of the pipeline after the other."""
    _, newest = log.chain(log.versions[-1], 0)[-1] if log.versions else (None, None)
    return [row for stage in range(newest.num_stages if newest else 0) for row in stage_again(log, stage)]


def stage_again(log: VersionReader, stage: int) -> list[Row]:
    rows: list[Row] = []
    threads = ThreadPoolExecutor(num_threads())  # idle at the end
    begin = time.perf_counter()
    for header, tensors in log.walk(stage):
        seconds = time.perf_counter() - begin
        digests = threads.map(digest_tensor, [tensors[entry.name] for entry in header.entries])
        is_equal = all(digest == entry.digest for digest, entry in zip(digests, header.entries, strict=True))
        rows.append({
            "version": header.version, "stage": stage, "kind": header.kind, "apply_seconds": seconds, "is_equal": is_equal,
            "bytes": sum(entry.num_bytes for entry in header.entries), "weight_bytes": sum(t.nbytes for t in tensors.values()),
        })  # fmt: skip
        begin = time.perf_counter()
    return rows


def summary(rows: list[Row], steps: list[Row]) -> Row:
    deltas = [row for row in rows if row["kind"] == "delta"]
    found: Row = {"versions": len(rows), "equal": sum(row["is_equal"] for row in rows), "deltas": len(deltas)}
    if not deltas:
        return found
    whole = rows[0]["weight_bytes"]
    written = {step["step"] + 1: step for step in steps if "sync/log_seconds" in step}

    def middle(values: list[float]) -> float:
        return statistics.median(values)

    found |= {
        "weight_bytes": whole,
        "delta_bytes": middle([row["bytes"] for row in deltas]),
        "delta_share": middle([row["bytes"] / whole for row in deltas]),
        "most_delta_share": max(row["bytes"] / whole for row in deltas),
        "apply_seconds": middle([row["apply_seconds"] for row in deltas]),
    }
    for name in ("sync/log_seconds", "sync/changed_fraction", "sync/sent_bytes", "sync/seconds"):
        if values := [step[name] for step in written.values() if name in step]:
            found[name] = {"median": middle(values), "most": max(values)}
    if sent := {number: step["sync/sent_bytes"] for number, step in written.items() if "sync/sent_bytes" in step}:
        found["steps that sent more than half"] = [number for number, size in sent.items() if size > whole / 2]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run_folder", type=Path)
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args()
    steps = [json.loads(line) for line in (given.run_folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    log = VersionReader(given.run_folder / "versions")
    try:
        rows = made_again(log)
    except VersionLogError as error:
        print(error, file=sys.stderr)
        return 1
    found = summary(rows, steps)
    for name, value in found.items():
        print(f"{name}: {json.dumps(value)}")
    if given.json is not None:
        given.json.write_text(json.dumps({**found, "rows": rows, "metrics": steps}, indent=1) + "\n", encoding="utf-8")
    return int(not rows or found["equal"] < len(rows))


if __name__ == "__main__":
    sys.exit(main())
