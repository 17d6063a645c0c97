"""Whether a run fits into the nodes of a Ray cluster, by numbers. Pure; leaves out what other jobs hold just now.

placement_problem({"node1": {"CPU": 96, "GPU": 8}}, Demand(num_ranks=8, replicas=1))
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megasync.config.errors import explain

Nodes = Mapping[str, Mapping[str, float]]  # Ray's resources by node


@dataclass(frozen=True)
class Demand:
    """Of the trainer, and of replicas with GPUs of their own."""

    num_ranks: int
    trainer_nodes: int = 0  # run.trainer_nodes
    replicas: int = 0
    tensor_parallel: int = 1
    teachers: int = 0  # replicas of teachers
    teacher_parallel: int = 1  # GPUs of each


def placement_problem(nodes: Nodes, demand: Demand) -> str:
    """Why trainer and replicas cannot both have a place; empty where they can.

    A rank takes a CPU, and a GPU where the cluster has any; a replica takes its GPUs of one node. The trainer is placed first, on
    the nodes with most room; what it leaves is counted for the replicas.
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
    pools = (("rollout", demand.replicas, demand.tensor_parallel), ("teacher", demand.teachers, demand.teacher_parallel))
    for section, number, width in pools if has_gpus else ():
        beside, missing = ", ".join(f"{name}: {gpus}" for name, gpus in left.items()), number
        for name, gpus in left.items():
            fit = min(missing, gpus // width)
            left[name], missing = gpus - fit * width, missing - fit
        if missing:
            headline = f"the cluster has no room for the replicas{'' if section == 'rollout' else ' of the teachers'}"
            wanted = f"{number} of {width} GPUs, each on one node; there is room for {number - missing}"
            remedy = f"lower {section}.replicas, {section}.tensor_parallel or --num-ranks, or add nodes"
            return explain(headline, wanted=wanted, GPUs_beside_the_others=beside, nodes=there, remedy=remedy)
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
