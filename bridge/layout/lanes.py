"""Lanes: which ranks send which buckets to which hosts, with trainer and replicas on several hosts. Pure functions.

A lane is one sender of a stage and, on each receiving host, the one reader that gets the lane's buckets first and forwards them
to the other readers of its host. Every host gets every bucket once. Leaves out how buckets travel (transport/lanes.py) and who
asks for a plan (send/connection.py).

    plan = plan_lanes([Holder(0, 0, "a"), Holder(1, 0, "b")], ["c", "c", "d"], ["replica 0 worker 0", ...], links=1)
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

MIN_LANES = 8  # of all stages together there are as many lanes as a receiving host has readers, at most, or so many
BUCKETS_A_HOST = 8  # of each lane: a bucket goes from host to host, and the last one has to wait for all of it


class Holder(NamedTuple):
    """A trainer rank that holds the tensors of a stage."""

    rank: int
    stage: int
    host: str


@dataclass(frozen=True, slots=True)
class Lane:
    """`sender`, a trainer rank, sends the buckets `number`, `number + count`, ... of the stage, in this order.

    `route` has the first reader of each receiving host, in the order in which buckets pass from host to host.
    """

    stage: int
    number: int  # among the lanes of the stage
    count: int  # of lanes of the stage
    sender: int
    route: tuple[int, ...]

    def __str__(self) -> str:
        return f"lane {self.number} of {self.count} of stage {self.stage}, from trainer rank {self.sender}"

    def buckets(self, num_buckets: int) -> range:
        """The indices of its buckets, of a stage that has so many."""
        return range(self.number, num_buckets, self.count)


@dataclass(frozen=True, slots=True)
class LanePlan:
    """All lanes, those of a stage one after another; `hosts`: the readers of each receiving host; `names`: of all readers."""

    lanes: tuple[Lane, ...]
    hosts: tuple[tuple[int, ...], ...]
    names: tuple[str, ...]

    def of_stage(self, stage: int) -> list[tuple[int, Lane]]:
        """The stage's lanes, each with its index among all."""
        return [(index, lane) for index, lane in enumerate(self.lanes) if lane.stage == stage]

    def sent_by(self, rank: int) -> Lane | None:
        """The lane of a trainer rank, if it has one."""
        return next((lane for lane in self.lanes if lane.sender == rank), None)

    @property
    def most_lanes(self) -> int:
        """The most that one reader is first for."""
        return max(Counter(first for lane in self.lanes for first in lane.route).values())

    def first_of(self, lane: Lane, reader: int) -> int:
        """The reader on the host of `reader` that gets the lane's buckets first."""
        return next(first for first in lane.route if first in self.host_of(reader))

    def host_of(self, reader: int) -> tuple[int, ...]:
        return next(readers for readers in self.hosts if reader in readers)

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def from_json(text: str) -> LanePlan:
        fields = json.loads(text)
        lanes = tuple(Lane(**(lane | {"route": tuple(lane["route"])})) for lane in fields["lanes"])
        return LanePlan(lanes, tuple(map(tuple, fields["hosts"])), tuple(fields["names"]))


def plan_lanes(
    holders: Sequence[Holder], reader_hosts: Sequence[str], names: Sequence[str], links: int | None = None
) -> LanePlan:
    """A plan for these senders and readers.

    Invariants: each stage has a lane at least, of a rank that holds it; a rank has one lane at most; each lane has one first
    reader on every receiving host, on the sender's own host first if it is one; a host's readers are first for the same number
    of lanes, give or take one; of one stage no host has two lanes more than another that has ranks to spare. With equal arguments
    the plan is the same.

    Args:
        holders: of all stages, numbered from 0.
        reader_hosts: of each reader.
        names: of each reader, for people.
        links: how many links to the network a host has; None: each rank one of its own.
    """
    by_host: dict[str, list[int]] = {}
    for reader, host in enumerate(reader_hosts):
        by_host.setdefault(host, []).append(reader)
    num_stages = 1 + max(holder.stage for holder in holders)
    most = max(1, max(MIN_LANES, *(len(readers) for readers in by_host.values())) // num_stages)
    lanes: list[Lane] = []
    for stage in range(num_stages):
        senders = _choose_senders([holder for holder in holders if holder.stage == stage], most, links)
        for number, sender in enumerate(senders):
            route = _route(sender.host, by_host, len(lanes))
            lanes.append(Lane(stage, number, len(senders), sender.rank, route))
    return LanePlan(tuple(lanes), tuple(map(tuple, by_host.values())), tuple(names))


def _choose_senders(holders: Sequence[Holder], most: int, links: int | None) -> list[Holder]:
    """One of each host in turn, as long as hosts have links and ranks to spare."""
    by_host: dict[str, list[Holder]] = {}
    for holder in sorted(holders):
        by_host.setdefault(holder.host, []).append(holder)
    turns = max(len(ranks) for ranks in by_host.values()) if links is None else links
    dealt = [ranks[turn] for turn in range(turns) for ranks in by_host.values() if turn < len(ranks)]
    return dealt[:most]


def _route(sender_host: str, by_host: dict[str, list[int]], index: int) -> tuple[int, ...]:
    """The first readers of the lane of this index, which is another one of each host in the next lane.

    All lanes go through the hosts in one order, unless the sender is on one of them: a host forwards buckets in the order in
    which it takes them, so that a lane that came to it by way of all others would hold up those that it has first.
    """
    hosts = list(by_host)
    start = hosts.index(sender_host) if sender_host in hosts else 0
    rotated = hosts[start:] + hosts[:start]
    return tuple(by_host[host][index % len(by_host[host])] for host in rotated)


def lane_bucket_bytes(plan: LanePlan, total_bytes: int, bucket_bytes: int, least: int) -> int:
    """The size of a lane's buckets.

    A reader has buffers for each lane that it is first for, and where it has neighbours two more, into which a GPU brings what
    they pass on; together they are as large as those of `bucket_bytes`, unless they would be smaller than `least`. Where the
    model is small they are smaller, so that a lane's buckets are under way on all hosts.
    """
    share = bucket_bytes // (plan.most_lanes + any(len(readers) > 1 for readers in plan.hosts))
    wanted = total_bytes // (len(plan.lanes) * BUCKETS_A_HOST * (1 + len(plan.hosts)))
    return min(bucket_bytes, max(least, min(share, wanted)))
