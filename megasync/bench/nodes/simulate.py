"""Seconds of a sync by lanes, from the plan that a sync itself makes and from figures of links: what would bound it where.

Buckets are followed one by one over the resources that they need, each of which serves one at a time: a stage's gather, a rank's
link out, a reader's link in, the way inside of a host, a reader's own work. Leaves out the pause before and the commit after.
No torch in here.

    python -m megasync.bench.nodes.simulate [--measured docs/bench/sync_nodes.json]
"""

from __future__ import annotations

import argparse
import heapq
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from bridge.layout.lanes import Holder, Lane, LanePlan, lane_bucket_bytes, plan_lanes
from megasync.bench.common.results import print_table

NUM_BUFFERS = 2
NEAR_BUCKETS, FAR_BUCKETS = 24, 40  # of a lane: those that are followed
GB = 1e9
RANKS_A_HOST = 8
BUCKET_BYTES = 512 * 2**20  # sync.bucket_bytes
LEAST_BYTES = {True: 16 * 2**20, False: 2**20}  # of a lane's buckets (send/connection.py), by whether there are GPUs


class Links(NamedTuple):
    """Bytes a second, each way where there are two, and seconds."""

    network: float  # of a link
    inside: float  # into one reader from another one of its host
    gather: float  # at which all ranks of a stage have a bucket of it brought together
    work: float  # at which a reader takes a bucket's digest and copies it
    bucket_seconds: float  # what a bucket costs a reader besides
    latency: float  # of a bucket on a link: for one side to find it free, and the other one it there
    links_per_host: int | None  # None: each GPU has one of its own
    cuts_through: bool  # a host passes a bucket on while it still arrives, as NCCL does, not only once it is there


# H100 and H200 nodes with 400 Gbit/s a GPU: 44 GB/s is what prime-rl measured with NIXL on H200s (50 are nominal), 370 GB/s what
# NCCL's broadcast took over NVLink on two H200s, 1.5 TB/s a copy with its digest. 100 and 50 us are assumed.
GPUS = Links(44 * GB, 370 * GB, 370 * GB, 1500 * GB, 100e-6, 50e-6, None, cuts_through=True)
# Namespaces of one machine, 400 Mbit/s by tc tbf, of which 1448 of 1514 bytes are payload; memory and latency of a busy machine.
NAMESPACES = Links(400e6 / 8 * 1448 / 1514, 2 * GB, 2 * GB, 1 * GB, 2e-3, 2e-3, 1, cuts_through=False)


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


class Step(NamedTuple):
    """What happens to a bucket, (stage, index); `where` is the stage that gathers, or the reader that gets it."""

    kind: str  # gather | send | pass on | take
    bucket: tuple[int, int]
    where: int


class Outcome(NamedTuple):
    """`busy`: of each kind of resource how long the busiest one served."""

    seconds: float
    busy: dict[str, float]
    num_lanes: int
    bucket_bytes: int


class Simulation:
    """One sync of a plan: what each bucket waits for, and the resources that it then takes, first come, first served."""

    def __init__(self, plan: LanePlan, links: Links, sizes: dict[tuple[int, int], float], hosts: dict[int, int]) -> None:
        """
        Args:
            sizes: of each (stage, bucket), in the order in which readers take them.
            hosts: of each sender's rank the number of its host.
        """
        self._links, self._sizes, self._hosts = links, sizes, hosts
        self._free: dict[tuple[str, int], float] = defaultdict(float)
        self._busy: dict[tuple[str, int], float] = defaultdict(float)
        self._queue: list[tuple[float, int, Step]] = []  # steps that can begin, by when
        self._ends: dict[Step, float] = {}
        self._waiting: dict[Step, list[Step]] = defaultdict(list)  # by what they wait for
        self._order = {bucket: place for place, bucket in enumerate(sizes)}
        self._buckets = list(sizes)
        of_stage = {lane.stage: [each for _, each in plan.of_stage(lane.stage)] for lane in plan.lanes}
        self._lanes = {bucket: of_stage[bucket[0]][bucket[1] % len(of_stage[bucket[0]])] for bucket in sizes}
        self._readers = {reader: readers for readers in plan.hosts for reader in readers}
        self._firsts = {(lane, reader): first for lane in plan.lanes for first in lane.route for reader in self._readers[first]}
        self._host_numbers = {reader: number for number, readers in enumerate(plan.hosts) for reader in readers}

    def run(self) -> tuple[float, dict[str, float]]:
        """Seconds, and of each kind of resource how long the busiest one was in use."""
        for bucket in self._buckets:
            lane = self._lanes[bucket]
            self._ask(Step("gather", bucket, lane.stage))
            for first in lane.route:
                self._ask(Step("send", bucket, first))
                for reader in self._readers[first]:
                    if reader != first:
                        self._ask(Step("pass on", bucket, reader))
                    self._ask(Step("take", bucket, reader))
        while self._queue:
            ready, _, step = heapq.heappop(self._queue)
            self._ends[step] = self._serve(step, ready)
            for other in self._waiting.pop(step, []):
                self._ask(other)
        busy: dict[str, float] = defaultdict(float)
        for (kind, _), seconds in self._busy.items():
            busy[kind] = max(busy[kind], seconds)
        return max(self._ends.values()), dict(busy)

    def _ask(self, step: Step) -> None:
        """To begin, once all that it waits for is over."""
        needs = list(self._needs(step))
        for need in needs:
            if need not in self._ends:
                self._waiting[need].append(step)
                return
        ready = max((self._arrival(step, need) for need in needs), default=0.0)
        heapq.heappush(self._queue, (ready, self._order[step.bucket], step))

    def _arrival(self, step: Step, need: Step) -> float:
        """When `need` lets `step` begin: a host that cuts through sends what it has got already."""
        is_on_its_way = self._links.cuts_through and step.kind == need.kind == "send" and step.bucket == need.bucket
        return self._ends[need] - (self._sizes[need.bucket] / self._links.network if is_on_its_way else 0.0)

    def _needs(self, step: Step) -> Iterator[Step]:
        kind, bucket, where = step
        lane = self._lanes[bucket]
        if kind == "take":
            first = self._firsts[lane, where]
            yield Step("send", bucket, where) if first == where else Step("pass on", bucket, where)
            if (place := self._order[bucket]) > 0:
                yield Step("take", self._buckets[place - 1], where)
        elif kind == "pass on":
            yield Step("send", bucket, self._firsts[lane, where])
        elif kind == "gather":
            if bucket[1] > 0:
                yield Step("gather", (bucket[0], bucket[1] - 1), where)
            if bucket[1] >= NUM_BUFFERS * lane.count:  # all ranks of the stage wait for who has no buffer left
                yield Step("send", (bucket[0], bucket[1] - NUM_BUFFERS * lane.count), lane.route[0])
        else:
            yield from self._send_needs(bucket, lane, lane.route.index(where))

    def _send_needs(self, bucket: tuple[int, int], lane: Lane, place: int) -> Iterator[Step]:
        yield Step("send", bucket, lane.route[place - 1]) if place else Step("gather", bucket, lane.stage)
        if place and not self._links.cuts_through and self._order[bucket]:  # buckets are sent on in the order of taking them
            yield Step("take", self._buckets[self._order[bucket] - 1], lane.route[place - 1])
        former = (bucket[0], bucket[1] - NUM_BUFFERS * lane.count)  # what lay in the buffer before
        if former[1] >= 0:
            yield from (Step("take", former, reader) for reader in self._readers[lane.route[place]])
            if place + 1 < len(lane.route):
                yield Step("send", former, lane.route[place + 1])

    def _serve(self, step: Step, ready: float) -> float:
        kind, bucket, where = step
        links, size = self._links, self._sizes[bucket]
        if kind == "gather":
            return self._use(ready, size / links.gather, ("gather", where))
        if kind == "pass on":
            return self._use(ready, size / links.inside, ("inside a host", where))
        if kind == "take":
            return self._use(ready, size / links.work + links.bucket_seconds, ("reader", where))
        lane = self._lanes[bucket]
        place = lane.route.index(where)
        source = self._out_of(lane.route[place - 1]) if place else self._out_of_sender(lane.sender)
        host = self._host_numbers[where]
        into = ("network into a host", where if links.links_per_host is None else host)
        return self._use(ready, size / links.network + links.latency, source, into)

    def _out_of(self, reader: int) -> tuple[str, int]:
        return "network out of a host", reader if self._links.links_per_host is None else self._host_numbers[reader]

    def _out_of_sender(self, rank: int) -> tuple[str, int]:
        return "network out of a sender", rank if self._links.links_per_host is None else self._hosts[rank]

    def _use(self, ready: float, seconds: float, *resources: tuple[str, int]) -> float:
        begin = max([ready, *(self._free[each] for each in resources)])
        for each in resources:
            self._free[each] = begin + seconds
            self._busy[each] += seconds
        return begin + seconds


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
    rows = []
    for measured in json.loads(path.read_text(encoding="utf-8")):
        size, senders, nodes = measured["lanes"]["bytes"], measured["senders"], measured["nodes"]
        replicas = measured["replicas"] // nodes
        found = simulate(Case("", size, 1, senders, nodes, "", 1, replicas), NAMESPACES)
        seconds = measured["lanes"]["seconds_median"]
        numbers = [seconds, found.seconds, found.seconds / seconds]
        rows.append([f"{senders}, {nodes} x {replicas}", *(f"{number:.2f}" for number in numbers)])
    print_table("namespaces", ("senders, nodes x replicas", "s, measured", "s, simulated", "times measured"), rows)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m megasync.bench.nodes.simulate", description=__doc__.splitlines()[0])
    parser.add_argument("--measured", type=Path, metavar="FILE", help="what docs/bench/nodes.sh wrote")
    given = parser.parse_args(arguments)
    show_clusters()
    if given.measured is not None:
        show_measured(given.measured)


if __name__ == "__main__":
    main()
