"""Tables of what rank.py and lanes.py measured, for people. No torch in here.

python -m megasync.bench.nodes.report RESULTS.json --rate 400mbit
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from megasync.bench.common.results import MILLISECONDS, Results, print_figures, rounds_by, spread

MBIT = 1e6 / 8
COUNTS = ("lanes", "receivers", "buckets")
COLUMNS = (
    "lanes: {lanes} | s: {seconds_median:.2f} | least: {least:.2f} | most: {most:.2f} | MB/s: {rate:.1f}"
    "| of the links: {share:.2f} | sent: {sent:.3f} | received: {received:.3f} | passed on: {passed_on:.3f}"
)


def figures(case: Results, way: str, link_bytes_per_second: float) -> Results:
    """`share`: of the bandwidth of the sending links together, or of the receiving ones, whichever is less."""
    measured, size = case[way], case[way]["bytes"]
    delivered = case["nodes"] * size / measured["seconds_median"]
    share = delivered / (min(case["senders"], case["nodes"]) * link_bytes_per_second)
    busiest = {name: max(measured[name], default=0) / size for name in ("sent", "received", "passed_on")}
    seconds = {"least": min(measured["seconds"]), "most": max(measured["seconds"])}
    return {**measured, **seconds, "rate": delivered / 1e6, "share": share, **busiest}


def summarise_lanes(results: Results) -> Results:
    """Of `bench lanes`: medians, and how many times the floor's, by way."""
    by_way = rounds_by("method", results["rounds"])
    summary = {way: {**spread(rounds), **{name: rounds[-1][name] for name in COUNTS}} for way, rounds in by_way.items()}
    if "floor" in summary:
        for figures in summary.values():
            figures["times_floor"] = figures["seconds_median"] / summary["floor"]["seconds_median"]
    return {"summary": summary}


def show_lanes(results: Results) -> None:
    model, config = results["model"], results["config"]
    ranks = f"{config['bench']['num_ranks']} trainer ranks, {config['engine']['wrap']}"
    print(f"{model['bytes'] / 1e9:.2f} GB, {model['tensors']} tensors; {ranks}; {config['bench']['rounds']} rounds")
    counts = "".join(f"| {name}: {{{name}}}" for name in COUNTS)
    print_figures("weight sync, medians", "way", MILLISECONDS + counts, results["summary"])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m megasync.bench.nodes.report", description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, metavar="RESULTS.json", help="what docs/bench/nodes.sh wrote")
    parser.add_argument("--rate", default="400mbit", help="of each link, each way, as tc takes it: such as 400mbit")
    given = parser.parse_args()
    rate = float(given.rate.removesuffix("mbit")) * MBIT
    cases = json.loads(given.results.read_text(encoding="utf-8"))
    names = [f"{case['senders']}, {case['nodes']} x {case['replicas'] // case['nodes']}" for case in cases]
    for way in ("lanes", "one group"):
        title = f"{way}: medians; bytes of the busiest link of each kind, in manifests"
        rows = {name: figures(case, way, rate) for name, case in zip(names, cases, strict=True)}
        print_figures(title, "senders, nodes x replicas", COLUMNS, rows)


if __name__ == "__main__":
    main()
