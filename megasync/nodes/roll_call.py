"""Who has come, who sits where, and what is missing. Pure; leaves out how it is found out (head.py).

A node that is started is an Arrival, numbered in the order in which they come. A round has a seat for each of the run's nodes;
seat 0 is the head's. Nodes beyond that are spares.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

HEAD_SEAT = 0


@dataclass(frozen=True)
class Arrival:
    """What a node says when it comes."""

    number: int
    host: str
    address: str
    wish: int | None  # --node-rank
    num_ranks: int
    num_gpus: int
    is_head: bool = False

    @property
    def name(self) -> str:
        return f"{self.host} ({self.address})"


def seats(present: Sequence[Arrival], num_nodes: int) -> list[Arrival] | None:
    """The nodes of a round by seat, None while some are missing.

    The head has seat 0. A node has the seat that it wishes for, the first who wishes where there are several; the seats that are
    left are taken in the order of arrival. No node has two seats, and the same nodes sit the same way whatever their order in
    `present`.
    """
    order = sorted(present, key=lambda arrival: arrival.number)
    taken: dict[int, Arrival] = {}
    for arrival in order:
        if arrival.is_head:
            taken[HEAD_SEAT] = arrival
        if arrival.wish is not None and HEAD_SEAT < arrival.wish < num_nodes:
            taken.setdefault(arrival.wish, arrival)
    rest = iter([arrival for arrival in order if arrival not in taken.values() and not arrival.is_head])
    for seat in range(HEAD_SEAT + 1, num_nodes):
        if seat not in taken and (free := next(rest, None)) is not None:
            taken[seat] = free
    return [taken[seat] for seat in range(num_nodes)] if len(taken) == num_nodes and HEAD_SEAT in taken else None


def fewer_seats(present: Sequence[Arrival], num_nodes: int, min_nodes: int, fits: Callable[[int], bool]) -> list[Arrival] | None:
    """The largest round of fewer than `num_nodes` nodes, at least `min_nodes`, whose number of ranks `fits`; None: none does."""
    for count in range(min(len(present), num_nodes - 1), min_nodes - 1, -1):
        members = seats(present, count)
        if members is not None and fits(sum(member.num_ranks for member in members)):
            return members
    return None


def roll_call(present: Sequence[Arrival], num_nodes: int, expected: Collection[str]) -> str:
    """In words: who is here, and who is not, by host name as far as it is known. `expected`: host names, or ()."""
    order = sorted(present, key=lambda arrival: (not arrival.is_head, arrival.number))
    here = ", ".join(arrival.name for arrival in order) or "none"
    return f"{min(len(order), num_nodes)} of {num_nodes} nodes are here: {here}; not here: {absent(order, num_nodes, expected)}"


def absent(present: Sequence[Arrival], num_nodes: int, expected: Collection[str]) -> str:
    """The names of `expected` that have not come; else the ranks that nobody has, or how many are missing."""
    missing = max(0, num_nodes - len(present))
    hosts = {arrival.host.partition(".")[0] for arrival in present}
    names = [name for name in expected if name.partition(".")[0] not in hosts]
    if names and missing:
        known, unknown = ", ".join(names), missing - len(names)
        if unknown < 0:
            return f"{missing} of {known}"
        return f"{known} and {unknown} more" if unknown else known
    wishes = {arrival.wish for arrival in present}
    if missing and wishes & set(range(1, num_nodes)):
        return ", ".join(f"--node-rank {rank}" for rank in range(1, num_nodes) if rank not in wishes)
    return f"{missing} more" if missing else "nobody"


def replica_room(nodes: Sequence[Arrival], tensor_parallel: int) -> int:
    """For how many replicas there are GPUs beside the trainer's ranks."""
    return sum(max(0, node.num_gpus - node.num_ranks) // tensor_parallel for node in nodes)


def room_problem(nodes: Sequence[Arrival], replicas: int, tensor_parallel: int) -> str:
    """Why the head has no rank, or the replicas no room on the GPUs that the trainer's ranks leave; empty where they have.

    The workers of a replica are on one node. Without GPUs anywhere there is room.
    """
    if nodes and not nodes[HEAD_SEAT].num_ranks:
        return f"{nodes[HEAD_SEAT].host}: the head node has rank 0; write --nproc 1 or more there"
    if not any(node.num_gpus for node in nodes):
        return ""
    tight = [node for node in nodes if node.num_ranks > node.num_gpus]
    if tight:
        told = ", ".join(f"{node.host}: {node.num_ranks} ranks, {node.num_gpus} GPUs" for node in tight)
        return f"a trainer rank needs a GPU of its own: {told}; write a smaller --nproc"
    left = {node.host: node.num_gpus - node.num_ranks for node in nodes}
    room = replica_room(nodes, tensor_parallel)
    if replicas <= room:
        return ""
    told = ", ".join(f"{host} {gpus}" for host, gpus in left.items())
    return (
        f"rollout.replicas = {replicas} of rollout.tensor_parallel = {tensor_parallel}, each on one node: the GPUs beside the "
        f"trainer's ranks ({told}) have room for {room}; write a smaller --nproc, or lower one of them"
    )
