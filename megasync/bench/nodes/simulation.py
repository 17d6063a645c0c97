"""Buckets of a sync followed one by one over the resources that they need: a stage's gather, a rank's link out, a reader's link
in, the way inside of a host, a reader's own work.

Between GPUs, where each has a link of its own, a link carries one bucket after another. Where a host has one link, gloo's lanes
share it, bucket beside bucket, and a reader asks for each bucket by a message, which waits behind what its host is sending.
Leaves out figures and cases (simulate.py). No torch in here.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from bridge.layout.lanes import Lane, LanePlan

NUM_BUFFERS = 2


class Links(NamedTuple):
    """Bytes a second, each way where there are two, and seconds."""

    network: float  # of a link
    inside: float  # into one reader from another one of its host
    gather: float  # at which all ranks of a stage have a bucket of it brought together
    work: float  # at which a reader takes a bucket's digest and copies it
    bucket_seconds: float  # what a bucket costs a reader besides
    latency: float  # of a bucket on a link: for one side to find it free, and the other one it there
    links_per_host: int | None  # None: each GPU has one of its own
    # NCCL's: a link carries one bucket after another, and a host passes a bucket on while it still arrives. Else gloo's.
    cuts_through: bool
    asking_seconds: float = 0.0  # what a message that asks for a bucket waits besides, on a link out that is in use


class Step(NamedTuple):
    """What happens to a bucket, (stage, index); `where` is the stage that gathers, or the reader that gets it."""

    kind: str  # gather | ask | send | pass on | take
    bucket: tuple[int, int]
    where: int


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
        self._flows: dict[Step, float] = {}  # bytes that are left, of those that share links
        self._num_flows: dict[tuple[str, int], int] = defaultdict(int)  # by link
        self._now = 0.0

    def run(self) -> tuple[float, dict[str, float]]:
        """Seconds, and of each kind of resource how long the busiest one was in use."""
        for bucket in self._buckets:
            for step in self._steps_of(bucket):
                self._ask(step)
        while self._queue or self._flows:
            ended = self._end_flow(self._queue[0][0] if self._queue else float("inf"))
            if ended is not None:
                self._end(ended, self._now)
                continue
            ready, _, step = heapq.heappop(self._queue)
            if step.kind == "send" and not self._links.cuts_through:
                self._flows[step] = self._sizes[step.bucket]
                for link in self._links_of(step):
                    self._num_flows[link] += 1
            else:
                self._end(step, self._serve(step, ready))
        busy: dict[str, float] = defaultdict(float)
        for (kind, _), seconds in self._busy.items():
            busy[kind] = max(busy[kind], seconds)
        return max(self._ends.values()), dict(busy)

    def _steps_of(self, bucket: tuple[int, int]) -> Iterator[Step]:
        lane = self._lanes[bucket]
        yield Step("gather", bucket, lane.stage)
        for first in lane.route:
            yield from () if self._links.cuts_through else (Step("ask", bucket, first),)
            yield Step("send", bucket, first)
            for reader in self._readers[first]:
                yield from () if reader == first else (Step("pass on", bucket, reader),)
                yield Step("take", bucket, reader)

    def _end(self, step: Step, at: float) -> None:
        self._ends[step] = at
        for other in self._waiting.pop(step, []):
            self._ask(other)

    def _end_flow(self, until: float) -> Step | None:
        """Lets time go on to the end of the next flow, and gives that; or to `until`, if that is before."""
        rates = {step: self._links.network / max(self._num_flows[link] for link in self._links_of(step)) for step in self._flows}
        ends = {step: self._now + left / rates[step] for step, left in self._flows.items()}
        first = min(ends, key=ends.__getitem__, default=None)
        then = until if first is None else min(until, ends[first])
        for step, rate in rates.items():
            self._flows[step] -= rate * (then - self._now)
        for link in {link for step in self._flows for link in self._links_of(step)}:
            self._busy[link] += then - self._now
        self._now = then
        if first is None or ends[first] > until:
            return None
        del self._flows[first]
        for link in self._links_of(first):
            self._num_flows[link] -= 1
        return first

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
            yield from self._turn_needs(bucket, where)
        elif kind == "ask":
            yield from self._ask_needs(bucket, lane, lane.route.index(where))
        elif kind == "pass on":
            yield Step("send", bucket, self._firsts[lane, where])
        elif kind == "gather":
            if bucket[1] > 0:
                yield Step("gather", (bucket[0], bucket[1] - 1), where)
            if bucket[1] >= NUM_BUFFERS * lane.count:  # all ranks of the stage wait for who has no buffer left
                yield Step("send", (bucket[0], bucket[1] - NUM_BUFFERS * lane.count), lane.route[0])
        else:
            yield from self._send_needs(bucket, lane, lane.route.index(where))

    def _turn_needs(self, bucket: tuple[int, int], reader: int) -> Iterator[Step]:
        """What a reader has done before it comes to a bucket: it has taken the one before, and asked for the next one of the same
        lane, for which the next host must have taken what lay in that buffer.
        """
        if (place := self._order[bucket]) == 0:
            return
        former = self._buckets[place - 1]
        yield Step("take", former, reader)
        lane = self._lanes[former]
        is_followed = (former[0], former[1] + lane.count) in self._order
        if not self._links.cuts_through and reader in lane.route[:-1] and is_followed and former[1] >= lane.count:
            there = lane.route[lane.route.index(reader) + 1]
            yield Step("send", (former[0], former[1] - lane.count), there)

    def _ask_needs(self, bucket: tuple[int, int], lane: Lane, place: int) -> Iterator[Step]:
        """A reader asks for a lane's next bucket when it comes to the one before, which is there, and once a buffer is free."""
        latest = (bucket[0], bucket[1] - lane.count)
        if latest[1] >= 0:
            yield Step("send", latest, lane.route[place])
            yield from self._turn_needs(latest, lane.route[place])
        yield from self._buffer_needs(bucket, lane, place)

    def _buffer_needs(self, bucket: tuple[int, int], lane: Lane, place: int) -> Iterator[Step]:
        former = (bucket[0], bucket[1] - NUM_BUFFERS * lane.count)  # what lay in the buffer before
        if former[1] >= 0:
            yield from (Step("take", former, reader) for reader in self._readers[lane.route[place]])
            if place + 1 < len(lane.route):
                yield Step("send", former, lane.route[place + 1])

    def _send_needs(self, bucket: tuple[int, int], lane: Lane, place: int) -> Iterator[Step]:
        yield Step("send", bucket, lane.route[place - 1]) if place else Step("gather", bucket, lane.stage)
        if self._links.cuts_through:
            yield from self._buffer_needs(bucket, lane, place)
            return
        yield Step("ask", bucket, lane.route[place])
        if place:  # buckets are sent on in the order of taking them
            yield from self._turn_needs(bucket, lane.route[place - 1])

    def _serve(self, step: Step, ready: float) -> float:
        kind, bucket, where = step
        links, size = self._links, self._sizes[bucket]
        if kind == "gather":
            return self._use(ready, size / links.gather, ("gather", where))
        if kind == "pass on":
            return self._use(ready, size / links.inside, ("inside a host", where))
        if kind == "ask":
            is_in_use = self._num_flows["network out of a host", self._host_numbers[where]] > 0
            return ready + links.latency + (links.asking_seconds if is_in_use else 0.0)
        if kind == "take":
            return self._use(ready, size / links.work + links.bucket_seconds, ("reader", where))
        return self._use(ready, size / links.network + links.latency, *self._links_of(step))

    def _links_of(self, step: Step) -> tuple[tuple[str, int], tuple[str, int]]:
        """Out of where a bucket comes from, and into where it is sent."""
        lane, where = self._lanes[step.bucket], step.where
        place = lane.route.index(where)
        source = self._out_of(lane.route[place - 1]) if place else self._out_of_sender(lane.sender)
        return source, ("network into a host", where if self._links.links_per_host is None else self._host_numbers[where])

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
