"""Tables of what rank.py measured, for people. No torch in here.

python -m megasync.bench.nodes.report RESULTS.json --rate 400mbit
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from megasync.bench.common.results import print_table

MBIT = 1e6 / 8
TITLES = ("senders, nodes x replicas", "lanes", "s", "least", "most", "MB/s", "of the links", "sent", "received", "passed on")


def figures(case: dict[str, Any], way: str, link_bytes_per_second: float) -> dict[str, float]:
    """`share`: of the bandwidth of the sending links together, or of the receiving ones, whichever is less."""
    measured, size = case[way], case[way]["bytes"]
    delivered = case["nodes"] * size / measured["seconds_median"]
    share = delivered / (min(case["senders"], case["nodes"]) * link_bytes_per_second)
    most = {name: max(measured[name], default=0) / size for name in ("sent", "received", "passed_on")}
    return {"delivered": delivered, "share": share, **most}


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
