"""Which nodes of a Ray the replicas are put on: GPUs that are free on each, and a placement group for each of theirs.

The workers of one replica are on one node. Leaves out a Ray of one node, where replicas need no group.

    groups = reserve(replicas=[0, 1], tensor_parallel=4, cuda=True)      # {} on one node
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import psutil
import ray
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

RESERVE_SECONDS = 60.0
LOST = "no replica can start or answer any more"
SHARE_OF_CPU = 0.01  # a bundle must hold something: without GPUs a little of a CPU


def free_resources(kind: str, besides: Collection[str] = ()) -> dict[str, int]:
    """Ray's GPUs or CPUs (`kind`) that no placement group holds, by node; actors of other runs may use some.

    `besides`: ids of placement groups, in hexadecimal digits, whose part counts as free.
    """
    nodes = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
    free = {key: node["Resources"].get(kind, 0.0) for key, node in nodes.items()}
    groups = [group for name, group in placement_group_table().items() if name not in besides and group["state"] != "REMOVED"]
    for group in groups:
        for number, bundle in group["bundles"].items():
            key = group.get("bundles_to_node_id", {}).get(number) or next(iter(free), "")
            if key in free:
                free[key] -= bundle.get(kind, 0.0)
    return {f"{nodes[key]['NodeManagerHostname']} {key[:6]}": int(count) for key, count in free.items()}


def room_problem(
    free: Mapping[str, int], num_replicas: int, tensor_parallel: int, kind: str = "GPU", key: str = "rollout"
) -> str:
    """Why replicas have no room on these free GPUs, or CPUs, by node, empty where they have. Pure."""
    room = sum(max(0, count) // tensor_parallel for count in free.values())
    if room >= num_replicas:
        return ""
    total = sum(free.values())
    needs = (
        f"{key}.replicas={num_replicas} times {key}.tensor_parallel={tensor_parallel} needs {num_replicas * tensor_parallel}"
    )
    there = f"{needs} {kind}s, Ray has {total} beside those of placement groups, such as the trainer's"
    if total >= num_replicas * tensor_parallel:
        on_nodes = ", ".join(f"{name}: {count}" for name, count in free.items())
        there += f", but they have room for {room} replicas, since each is on one node ({on_nodes})"
    return f"{there}; lower one of them"


def reserve(replicas: Sequence[int], tensor_parallel: int, *, cuda: bool) -> dict[int, Any]:
    """A placement group for each of these replicas, on the nodes with most room; {} where Ray has one node.

    One of a node that dies is placed on another one by Ray, once there is room.

    Raises:
        RuntimeError: there was no room within RESERVE_SECONDS, since others have it.
    """
    if num_nodes() == 1:
        return {}
    bundle = {"GPU": float(tensor_parallel)} if cuda else {"CPU": SHARE_OF_CPU}
    groups = {replica: placement_group([bundle], strategy="SPREAD") for replica in replicas}
    deadline = time.monotonic() + RESERVE_SECONDS
    if not all(group.wait(max(0.1, deadline - time.monotonic())) for group in groups.values()):
        for group in groups.values():
            remove_placement_group(group)
        raise RuntimeError(f"Ray had no room for {len(groups)} replicas of {bundle} within {RESERVE_SECONDS:g} s: others have it")
    return groups


def lost_ray() -> str:
    """Why no replica can start or answer any more: what has died of a Ray that this process has started, or all of its nodes.

    Its raylet is missed at once (ray 2.60.0 _private/node.py:dead_processes), by Ray itself after 15 seconds. Empty: nothing.
    """
    node = ray._private.worker._global_node
    dead = node.dead_processes() if node is not None else []
    if dead:
        kind, process = dead[0]
        return f"the {kind} of this run's Ray, process {process.pid}, has ended ({exit_text(process.returncode)}): {LOST}"
    return "" if not ray.is_initialized() or num_nodes() else f"no node of Ray is alive: {LOST}"


def exit_text(code: int) -> str:
    """Describes a process's exit by subprocess.Popen.returncode."""
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def num_nodes() -> int:
    return sum(node["Alive"] for node in ray.nodes())


def let_gloo_reach_others() -> None:
    """In a process on one of several nodes: gloo takes the interface of the address by which Ray reaches this node.

    By default it takes that of the host's name, which may be the loopback. A value that the user has set stays.
    """
    if num_nodes() == 1:
        return
    interfaces = {entry.address: name for name, entries in psutil.net_if_addrs().items() for entry in entries}
    name = interfaces.get(ray.util.get_node_ip_address())
    if name is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
