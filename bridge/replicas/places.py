"""Which nodes of a Ray the replicas are put on: GPUs that are free on each, and a placement group of theirs.

The workers of one replica are on one node. Leaves out a Ray of one node, where replicas need no group.

    group = reserve(num_replicas=2, tensor_parallel=4, cuda=True)      # None on one node
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import psutil
import ray
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

RESERVE_SECONDS = 60.0
SHARE_OF_CPU = 0.01  # a bundle must hold something: without GPUs a little of a CPU


def free_gpus() -> dict[str, int]:
    """By node: Ray's, without those that placement groups hold; actors of other runs may be on some."""
    nodes = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
    free = {key: node["Resources"].get("GPU", 0.0) for key, node in nodes.items()}
    for group in placement_group_table().values():
        for number, bundle in group["bundles"].items() if group["state"] != "REMOVED" else ():
            key = group.get("bundles_to_node_id", {}).get(number) or next(iter(free), "")
            if key in free:
                free[key] -= bundle.get("GPU", 0.0)
    return {f"{nodes[key]['NodeManagerHostname']} {key[:6]}": int(count) for key, count in free.items()}


def room_problem(free: Mapping[str, int], num_replicas: int, tensor_parallel: int) -> str:
    """Why replicas have no room on these free GPUs by node, empty where they have. Pure."""
    room = sum(max(0, count) // tensor_parallel for count in free.values())
    if room >= num_replicas:
        return ""
    total = sum(free.values())
    needs = (
        f"rollout.replicas={num_replicas} times rollout.tensor_parallel={tensor_parallel} needs {num_replicas * tensor_parallel}"
    )
    there = f"{needs} GPUs, Ray has {total} beside those of placement groups, such as the trainer's"
    if total >= num_replicas * tensor_parallel:
        on_nodes = ", ".join(f"{name}: {count}" for name, count in free.items())
        there += f", but they have room for {room} replicas, since each is on one node ({on_nodes})"
    return f"{there}; lower one of them"


def reserve(num_replicas: int, tensor_parallel: int, *, cuda: bool) -> Any:
    """A placement group with a bundle a replica, spread over the nodes as far as there is room; None where Ray has one node.

    A bundle of a node that dies is placed on another one by Ray, once there is room.

    Raises:
        RuntimeError: there was no room within RESERVE_SECONDS, since others have it.
    """
    if num_nodes() == 1:
        return None
    bundle = {"GPU": float(tensor_parallel)} if cuda else {"CPU": SHARE_OF_CPU}
    group = placement_group([bundle] * num_replicas, strategy="SPREAD")
    if not group.wait(RESERVE_SECONDS):
        remove_placement_group(group)
        raise RuntimeError(
            f"Ray had no room for {num_replicas} replicas of {bundle} within {RESERVE_SECONDS:g} s: others have it"
        )
    return group


def num_nodes() -> int:
    return sum(node["Alive"] for node in ray.nodes())


def let_gloo_reach_others() -> None:
    """In a process on one of several nodes: gloo takes the interface of the address by which Ray reaches this node.

    By itself it takes that of the host's name, which may be the loopback. What the user has set stays.
    """
    if num_nodes() == 1:
        return
    interfaces = {entry.address: name for name, entries in psutil.net_if_addrs().items() for entry in entries}
    name = interfaces.get(ray.util.get_node_ip_address())
    if name is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
