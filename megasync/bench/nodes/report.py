"""Tables of what rank.py and lanes.py measured, for people. No torch in here.

python -m megasync.bench.nodes.report RESULTS.json --rate 400mbit
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from megasync.bench.common.results import SPREAD, Results, print_table, rounds_by, spread

MBIT = 1e6 / 8
COUNTS = ("lanes", "receivers", "buckets")
TITLES = ("senders, nodes x replicas", "lanes", "s", "least", "most", "MB/s", "of the links", "sent", "received", "passed on")


def figures(case: dict[str, Any], way: str, link_bytes_per_second: float) -> dict[str, float]:
    """`share`: of the bandwidth of the sending links together, or of the receiving ones, whichever is less."""
    measured, size = case[way], case[way]["bytes"]
    delivered = case["nodes"] * size / measured["seconds_median"]
    share = delivered / (min(case["senders"], case["nodes"]) * link_bytes_per_second)
    most = {name: max(measured[name], default=0) / size for name in ("sent", "received", "passed_on")}
    return {"delivered": delivered, "share": share, **most}


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
    rows = [
        [
            way,
            *(f"{1000 * found[name]:.1f}" for name in SPREAD),
            f"{found['times_floor']:.2f}" if "times_floor" in found else "",
            *(str(found[name]) for name in COUNTS),
        ]
        for way, found in results["summary"].items()
    ]
    print_table("weight sync, medians", ("way", "ms", "least", "most", "x floor", *COUNTS), rows)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m megasync.bench.nodes.report", description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, metavar="RESULTS.json", help="what docs/bench/nodes.sh wrote")
    parser.add_argument("--rate", default="400mbit", help="of each link, each way, as tc takes it: such as 400mbit")
    given = parser.parse_args()
    rate = float(given.rate.removesuffix("mbit")) * MBIT
    cases = json.loads(given.results.read_text(encoding="utf-8"))
    for way in ("lanes", "one group"):
        rows = []
        for case in cases:
            found, seconds = figures(case, way, rate), case[way]["seconds"]
            name = f"{case['senders']}, {case['nodes']} x {case['replicas'] // case['nodes']}"
            numbers = [case[way]["seconds_median"], min(seconds), max(seconds)]
            sizes = [f"{found[side]:.3f}" for side in ("sent", "received", "passed_on")]
            shown = [f"{number:.2f}" for number in numbers]
            rates = [f"{found['delivered'] / 1e6:.1f}", f"{found['share']:.2f}"]
            rows.append([name, str(case[way]["lanes"]), *shown, *rates, *sizes])
        print_table(f"{way}: medians; bytes of the busiest link of each kind, in manifests", TITLES, rows)


if __name__ == "__main__":
    main()
