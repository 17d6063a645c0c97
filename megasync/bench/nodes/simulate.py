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

from bridge.layout.lanes import Holder, lane_bucket_bytes, plan_lanes
from megasync.bench.common.results import print_table
from megasync.bench.nodes.simulation import Links, Simulation

NEAR_BUCKETS, FAR_BUCKETS = 24, 40  # of a lane: those that are followed
GB = 1e9
RANKS_A_HOST = 8
BUCKET_BYTES = 512 * 2**20  # sync.bucket_bytes
LEAST_BYTES = {True: 16 * 2**20, False: 2**20}  # of a lane's buckets (send/connection.py), by whether there are GPUs


# H100 and H200 nodes with 400 Gbit/s a GPU: 44 GB/s is what prime-rl measured with NIXL on H200s (50 are nominal), 370 GB/s what
# NCCL's broadcast took over NVLink on two H200s, 1.5 TB/s a copy with its digest. 100 and 50 us are assumed.
GPUS = Links(44 * GB, 370 * GB, 370 * GB, 1500 * GB, 100e-6, 50e-6, None, cuts_through=True)
# Namespaces of one machine, 400 Mbit/s by tc tbf, of which 1448 of 1514 bytes are payload; memory and latency of a busy machine.
# probe.py measured 9.5 ms for a message and its answer while the link out was in use, and 4.5 ms while it was not.
NAMESPACES = Links(400e6 / 8 * 1448 / 1514, 2 * GB, 2 * GB, 1 * GB, 2e-3, 2e-3, 1, cuts_through=False, asking_seconds=5e-3)


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


CASES = [
    Case("30B-A3B, bf16", 61.1 * GB, 1, 2, 2, "2.16 (miles)"),
    Case("235B-A22B, bf16", 470 * GB, 8, 8, 8, "3.2 (miles), 3.3 (vLLM RDT, 8 GPUs to 8)"),
    Case("744B, a byte each", 744 * GB, 8, 8, 4, "2.84 (prime-rl)"),
    Case("1T, a byte each", 1040 * GB, 32, 32, 16, "1.3 (Perplexity)"),
    Case("1T, bf16", 2080 * GB, 32, 32, 16, "7.2 (miles, 32 + 32)"),
]


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
    rows = []
    for case in CASES:
        found = simulate(case, GPUS)
        kind = max(found.busy, key=found.busy.__getitem__)
        nodes = f"{case.sender_nodes} + {case.receiver_nodes}"
        numbers = [str(found.num_lanes), f"{found.bucket_bytes / 2**20:.0f}", f"{found.seconds:.2f}", case.published]
        rows.append([case.name, nodes, *numbers, f"{kind} {found.busy[kind]:.2f}"])
    titles = ("model", "nodes", "lanes", "MiB a bucket", "s, simulated", "s, published", "bound by")
    print_table("sync by lanes, 8 GPUs a node, 44 GB/s a GPU", titles, rows)


def show_measured(path: Path) -> None:
    """Simulated beside measured seconds of every case."""
    rows, measured = [], json.loads(path.read_text(encoding="utf-8"))
    for case in sorted(measured, key=lambda each: (each["replicas"] // each["nodes"], each["senders"], each["nodes"])):
        size, senders, nodes = case["lanes"]["bytes"], case["senders"], case["nodes"]
        replicas = case["replicas"] // nodes
        found = simulate(Case("", size, 1, senders, nodes, "", 1, replicas), NAMESPACES)
        seconds = case["lanes"]["seconds_median"]
        numbers = [seconds, found.seconds, found.seconds / seconds]
        rows.append([f"{senders} to {nodes} x {replicas}", *(f"{number:.2f}" for number in numbers)])
    titles = ("sender nodes to receiving nodes x replicas", "s, measured", "s, simulated", "times measured")
    print_table("between namespaces", titles, rows)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m megasync.bench.nodes.simulate", description=__doc__.splitlines()[0])
    parser.add_argument("--measured", type=Path, metavar="FILE", help="what docs/bench/nodes.sh wrote")
    given = parser.parse_args(arguments)
    show_clusters()
    if given.measured is not None:
        show_measured(given.measured)


if __name__ == "__main__":
    main()
