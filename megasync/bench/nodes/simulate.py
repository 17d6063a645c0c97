"""Seconds of a sync by lanes, from the plan that a sync itself makes and from figures of links: what would bound it where.

Leaves out how buckets are followed (simulation.py), the pause before and the commit after. No torch in here.

    python -m megasync.bench.nodes.simulate [--measured docs/bench/sync_nodes.json]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import yaml  # type: ignore[import-untyped]

from bridge.layout.lanes import Holder, lane_bucket_bytes, plan_lanes
from megasync.bench.common.results import print_figures
from megasync.bench.nodes.simulation import Links, Simulation

NEAR_BUCKETS, FAR_BUCKETS = 24, 40  # of a lane: those that are followed
RANKS_A_HOST = 8
BUCKET_BYTES = 512 * 2**20  # sync.bucket_bytes
LEAST_BYTES = {True: 16 * 2**20, False: 2**20}  # of a lane's buckets (send/connection.py), by whether there are GPUs


class Case(NamedTuple):
    """A model of so many bytes from nodes of one pipeline stage each, or of all of it where `num_stages` is 1, to other nodes."""

    name: str
    num_bytes: float
    num_stages: int
    sender_nodes: int
    receiver_nodes: int
    published: str
    ranks_a_node: int = RANKS_A_HOST
    readers_a_node: int = RANKS_A_HOST


TABLES = yaml.safe_load(Path(__file__).with_name("simulated.yaml").read_text(encoding="utf-8"))
GPUS, NAMESPACES = Links(**TABLES["gpus"]), Links(**TABLES["namespaces"])
CASES = [Case(**fields) for fields in TABLES["cases"]]
COLUMNS = (
    "nodes: {sender_nodes} + {receiver_nodes} | lanes: {num_lanes} | MiB a bucket: {mib:.0f}"
    "| s, simulated: {seconds:.2f} | s, published: {published} | bound by: {bound}"
)


class Outcome(NamedTuple):
    """`busy`: of each kind of resource how long the busiest one served."""

    seconds: float
    busy: dict[str, float]
    num_lanes: int
    bucket_bytes: int


def simulate(case: Case, links: Links) -> Outcome:
    """A sync as send/connection.py plans it and receive/unpack.py takes it."""
    ranks = case.sender_nodes * case.ranks_a_node
    hosts = {rank: rank // case.ranks_a_node for rank in range(ranks)}
    holders = [Holder(rank, hosts[rank] * case.num_stages // case.sender_nodes, f"t{hosts[rank]}") for rank in hosts]
    readers = [f"r{node}" for node in range(case.receiver_nodes) for _ in range(case.readers_a_node)]
    plan = plan_lanes(holders, readers, [str(reader) for reader in range(len(readers))], links.links_per_host)
    size = lane_bucket_bytes(plan, int(case.num_bytes), BUCKET_BYTES, LEAST_BYTES[links.links_per_host is None])
    of_stage, count = case.num_bytes / case.num_stages, plan.lanes[0].count
    num_buckets = -(-int(of_stage) // size)

    def run(most: int) -> tuple[float, dict[str, float]]:
        """With the first buckets of each stage."""
        numbers = range(min(most, num_buckets))
        sizes = {(stage, n): min(size, of_stage - n * size) for n in numbers for stage in range(case.num_stages)}
        return Simulation(plan, links, sizes, hosts).run()

    near, far = NEAR_BUCKETS * count, FAR_BUCKETS * count
    seconds, busy = run(far)
    if num_buckets > far:  # the rest goes on at the pace of these
        seconds_near, busy_near = run(near)
        more = (num_buckets - far) / (far - near)
        seconds += more * (seconds - seconds_near)
        busy = {kind: total + more * (total - busy_near[kind]) for kind, total in busy.items()}
    return Outcome(seconds, busy, len(plan.lanes), size)


def show_clusters() -> None:
    rows = {}
    for case in CASES:
        found = simulate(case, GPUS)
        kind = max(found.busy, key=found.busy.__getitem__)
        bound = f"{kind} {found.busy[kind]:.2f}"
        rows[case.name] = {**case._asdict(), **found._asdict(), "mib": found.bucket_bytes / 2**20, "bound": bound}
    print_figures("sync by lanes, 8 GPUs a node, 44 GB/s a GPU", "model", COLUMNS, rows)


def show_measured(path: Path) -> None:
    """Simulated beside measured seconds of every case."""
    rows, measured = {}, json.loads(path.read_text(encoding="utf-8"))
    for case in sorted(measured, key=lambda each: (each["replicas"] // each["nodes"], each["senders"], each["nodes"])):
        senders, nodes, replicas = case["senders"], case["nodes"], case["replicas"] // case["nodes"]
        seconds = case["lanes"]["seconds_median"]
        found = simulate(Case("", case["lanes"]["bytes"], 1, senders, nodes, "", 1, replicas), NAMESPACES).seconds
        rows[f"{senders} to {nodes} x {replicas}"] = {"measured": seconds, "simulated": found, "times": found / seconds}
    columns = "s, measured: {measured:.2f} | s, simulated: {simulated:.2f} | times measured: {times:.2f}"
    print_figures("between namespaces", "sender nodes to receiving nodes x replicas", columns, rows)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m megasync.bench.nodes.simulate", description=__doc__.splitlines()[0])
    parser.add_argument("--measured", type=Path, metavar="FILE", help="what docs/bench/nodes.sh wrote")
    given = parser.parse_args(arguments)
    show_clusters()
    if given.measured is not None:
        show_measured(given.measured)


if __name__ == "__main__":
    main()
