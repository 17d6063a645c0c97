"""The nodes of a run: who has come, in which order they have ranks, whether there is room for the replicas. Pure.

Leaves out how nodes find each other (node.py).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from megasync.launch.cluster_room import NoRoomError, Pool, free_after


@dataclass(frozen=True)
class Node:
    """A launcher that was started, numbered in the order in which they came. `place`: --node-rank."""

    number: int
    host: str
    address: str
    place: int | None
    num_ranks: int
    num_gpus: int
    is_head: bool = False

    @property
    def name(self) -> str:
        return f"{self.host} ({self.address})"


def in_order(nodes: Collection[Node]) -> list[Node]:
    """The head, then by --node-rank, then as they came. The result does not depend on the order given."""
    return sorted(nodes, key=lambda node: (not node.is_head, node.place is None, node.place or 0, node.number))


def first_members(present: Collection[Node], num_nodes: int) -> list[Node] | None:
    """The nodes that a run of `num_nodes` starts with, in their order; None while some are missing, or the head is.

    Nodes that came later than these are spares.
    """
    earliest = sorted(present, key=lambda node: (not node.is_head, node.number))[:num_nodes]
    return in_order(earliest) if len(earliest) == num_nodes and earliest[0].is_head else None


def roll_call(present: Collection[Node], num_nodes: int, expected: Collection[str]) -> str:
    """The nodes that are present and those that are missing, by host name where it is known. `expected`: host names, or ()."""
    here = ", ".join(node.name for node in in_order(present)) or "none"
    count = min(len(present), num_nodes)
    return f"{count} of {num_nodes} nodes are here: {here}; not here: {absent(present, num_nodes, expected)}"


def absent(present: Collection[Node], num_nodes: int, expected: Collection[str]) -> str:
    """The names of `expected` that have not come; else the ranks that nobody has, or how many are missing."""
    missing = max(0, num_nodes - len(present))
    hosts = {node.host.partition(".")[0] for node in present}
    places = {node.place for node in present}
    if missing and (names := [name for name in expected if name.partition(".")[0] not in hosts]):
        return ", ".join(names)
    if missing and places & set(range(1, num_nodes)):
        return ", ".join(f"--node-rank {rank}" for rank in range(1, num_nodes) if rank not in places)
    return f"{missing} more" if missing else "nobody"


def gpus_beside(nodes: Sequence[Node]) -> dict[str, int]:
    """The GPUs of each node that its trainer ranks leave, by host and number."""
    return {f"{node.host}/{node.number}": max(0, node.num_gpus - node.num_ranks) for node in nodes}


def replica_room(nodes: Sequence[Node], tensor_parallel: int, others: Sequence[Pool] = ()) -> int:
    """The number of the policy's replicas that fit on GPUs beside the trainer's ranks and `others`, which come first."""
    try:
        return sum(count // tensor_parallel for count in free_after(gpus_beside(nodes), others).values())
    except NoRoomError:
        return 0


def room_problem(nodes: Sequence[Node], pools: Sequence[Pool]) -> str:
    """Why the head has no rank, or ranks or replicas have too few GPUs; empty otherwise, and without GPUs anywhere."""
    if not nodes[0].num_ranks:
        return f"{nodes[0].host}: the head node has rank 0; write --nproc 1 or more there"
    if not any(node.num_gpus for node in nodes):
        return ""
    if tight := [node for node in nodes if node.num_ranks > node.num_gpus]:
        numbers = ", ".join(f"{node.host}: {node.num_ranks} ranks, {node.num_gpus} GPUs" for node in tight)
        return f"a trainer rank needs a GPU of its own: {numbers}; write a smaller --nproc"
    try:
        free_after(gpus_beside(nodes), pools)
    except NoRoomError as error:
        left, (key, number, width) = ", ".join(f"{node.host} {node.num_gpus - node.num_ranks}" for node in nodes), error.pool
        before = ", ".join(pool.key for pool in pools[: pools.index(error.pool)])
        beside = f"the trainer's ranks and {before}" if before else "the trainer's ranks"
        return (
            f"{key}.replicas = {number} of {key}.tensor_parallel = {width}, each on one node: the GPUs beside {beside}, {left} "
            f"beside the ranks, have room for {error.room}; write a smaller --nproc, or lower one of them"
        )
    return ""
