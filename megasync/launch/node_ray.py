"""A node's part of the Ray over the nodes of a run: the head's, or one that joins it, with the GPUs that trainer ranks leave.

Key of the store: ray {address, environment}, the address of Ray's head and what lets nodes in.
"""

from __future__ import annotations

import os
from typing import Any

from megasync.launch.devices import devices_for_ray, visible_devices
from megasync.launch.head_store import HeadStore
from megasync.launch.members import Node
from megasync.launch.ray_cluster import WORKER_ENVIRONMENT, RayNode, authentication, free_port, node_of_run
from megasync.launch.scope import RAY_ADDRESS

PLACE_KEY = "ray"


class NodeRay:
    """The Ray node of this process; `close` in any case."""

    def __init__(self, store: HeadStore, node: Node) -> None:
        self._store, self._node = store, node
        self._place: dict[str, Any] | None = None
        self._process: RayNode | None = None

    def begin(self) -> None:
        """Starts it without waiting, once the head's address is known; again where a member's has ended, as after a cut link."""
        if self._process is not None and not self._node.is_head and self._process.problem():
            self.close()
        if self._process is not None:
            return
        if self._node.is_head:
            self._place = {"address": f"{self._node.address}:{free_port()}", "environment": authentication()}
        else:
            self._place = self._store.get(PLACE_KEY)
        if self._place is not None:
            os.environ |= self._place["environment"] | WORKER_ENVIRONMENT  # also for the ranks, which connect to it
            gpus = devices_for_ray(visible_devices(), self._node.num_ranks, is_colocated=False) or ()
            self._process = node_of_run(self._node.address, gpus, self._place["address"])

    def start(self) -> None:
        """Like `begin`, and wait until it runs; the head's address must be known. RuntimeError: it does not run."""
        self.begin()
        assert self._process is not None
        assert self._place is not None
        self._process.wait()
        os.environ[RAY_ADDRESS] = self._place["address"]
        if self._node.is_head:
            self._store.set(PLACE_KEY, self._place)

    def problem(self) -> str:
        """Why it has ended; empty while it runs or starts."""
        return self._process.problem() if self._process is not None else ""

    def close(self) -> None:
        if self._process is not None:
            self._process.close()
            self._process = None
