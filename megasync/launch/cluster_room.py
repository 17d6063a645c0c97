"""Whether a run fits into the nodes of a Ray cluster, by numbers. Pure; leaves out what other jobs hold just now.

placement_problem({"node1": {"CPU": 96, "GPU": 8}}, Demand(num_ranks=7, pools=(Pool("rollout", 1, 1),)))
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megasync.config.errors import explain

Nodes = Mapping[str, Mapping[str, float]]  # Ray's resources by node


class Pool(NamedTuple):
    """Replicas of one model, with GPUs of their own; those of each are on one node."""

    key: str  # of the config: rollout, teacher or judges.NAME
    replicas: int
    tensor_parallel: int

    @property
    def num_gpus(self) -> int:
        return self.replicas * self.tensor_parallel


def pool_options(pools: Sequence[Pool]) -> list[str]:
    """The pools as --pool options of the driver's command line."""
    return [word for pool in pools for word in ("--pool", *map(str, pool))]


@dataclass(frozen=True)
class Demand:
    """GPUs that the trainer needs, and replicas with GPUs of their own."""

    num_ranks: int
    trainer_nodes: int = 0  # run.trainer_nodes
    pools: tuple[Pool, ...] = ()


def free_after(gpus: Mapping[str, int], pools: Sequence[Pool]) -> dict[str, int]:
    """The GPUs by node that the pools leave; they are placed in turn, each on the first nodes with room.

    Raises:
        NoRoomError: the first pool that does not fit.
    """
    left = dict(gpus)
    for pool in pools:
        missing = pool.replicas
        for name, count in left.items():
            fit = min(missing, max(0, count) // pool.tensor_parallel)
            left[name], missing = count - fit * pool.tensor_parallel, missing - fit
        if missing:
            raise NoRoomError(pool, pool.replicas - missing)
    return left


class NoRoomError(Exception):
    """`room`: for how many replicas of the pool there is."""

    def __init__(self, pool: Pool, room: int) -> None:
        super().__init__(pool, room)
        self.pool, self.room = pool, room


def placement_problem(nodes: Nodes, demand: Demand) -> str:
    """Why trainer and replicas cannot both have a place; empty where they can.

    A rank takes a CPU, and a GPU where the cluster has any; a replica takes its GPUs of one node. The trainer is placed first, on
    the nodes with most room; the remaining GPUs are counted for the replicas.
    """
    has_gpus = any(resources.get("GPU", 0) for resources in nodes.values())
    kind = "GPU" if has_gpus else "CPU"
    room = {name: int(min(resources.get("CPU", 0), resources.get(kind, 0))) for name, resources in nodes.items()}
    taken = _take(room, demand)
    sizes = {name: (resources.get("GPU", 0), resources.get("CPU", 0)) for name, resources in nodes.items()}
    there = ", ".join(f"{name}: {gpus:.0f} GPUs, {cpus:.0f} CPUs" for name, (gpus, cpus) in sizes.items())
    if taken is None:
        where = f", as many on each of {demand.trainer_nodes} nodes (run.trainer_nodes)" if demand.trainer_nodes else ""
        wanted = f"{demand.num_ranks} trainer ranks of one {kind} each{where}"
        remedy = "start fewer ranks (--num-ranks), another run.trainer_nodes, or add nodes"
        return explain("the cluster has no room for the trainer", wanted=wanted, nodes=there, remedy=remedy)
    left = {name: int(resources.get("GPU", 0)) - taken[name] for name, resources in nodes.items()}
    try:
        free_after(left, demand.pools if has_gpus else ())
    except NoRoomError as error:
        (key, number, width), beside = error.pool, ", ".join(f"{name}: {gpus}" for name, gpus in left.items())
        headline = f"the cluster has no room for {key}.replicas = {number}"
        wanted = f"{number} of {width} GPUs, each on one node; there is room for {error.room}"
        all_pools = ", ".join(f"{pool.key} {pool.replicas} x {pool.tensor_parallel}" for pool in demand.pools)
        remedy = f"lower {key}.replicas, {key}.tensor_parallel or --num-ranks, or add nodes"
        lines = {"wanted": wanted, "replicas": all_pools, "GPUs_beside_the_trainer": beside, "nodes": there, "remedy": remedy}
        return explain(headline, **lines)
    return ""


def _take(room: Mapping[str, int], demand: Demand) -> dict[str, int] | None:
    """Ranks by node, None where they do not fit."""
    taken = dict.fromkeys(room, 0)
    order = sorted(room, key=lambda name: -room[name])
    if demand.trainer_nodes:
        each = demand.num_ranks // demand.trainer_nodes
        fit = [name for name in order if room[name] >= each]
        if len(fit) < demand.trainer_nodes or demand.num_ranks % demand.trainer_nodes:
            return None
        return taken | dict.fromkeys(fit[: demand.trainer_nodes], each)
    left = demand.num_ranks
    for name in order:
        taken[name] = min(room[name], left)
        left -= taken[name]
    return None if left else taken
