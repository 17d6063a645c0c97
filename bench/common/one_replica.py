"""Programs with vLLM replicas that nothing is synced to. Leaves out those of trainer ranks (rank.py)."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from bench.common.program import Program
from bridge.config import ReplicaConfig
from bridge.replicas.pool import ReplicaPool
from megasync.launch.devices import replica_devices, visible_devices
from megasync.launch.ray_cluster import start_ray
from megasync.run.replica_start import replica_config

Pool = TypeVar("Pool", bound=ReplicaPool)


class ReplicaProgram(Program):
    """One that starts replicas by itself."""

    def start_replica(self, kind: type[Pool], replica: ReplicaConfig) -> Pool:
        """One, with a Ray of our own if there is none."""
        if (stop_ray := start_ray("local")) is not None:
            self.ends.callback(stop_ray)
        pool = kind.start(replica, 1)
        self.ends.callback(pool.close)
        return pool

    def on_first_devices(self) -> ReplicaConfig:
        """A replica there, whatever else is on them."""
        given = replica_config(self.config)
        devices = replica_devices(visible_devices(), 1, given.tensor_parallel)
        arguments = given.engine_arguments | self.random_weights()
        return replace(given, devices=devices, shares_devices=False, engine_arguments=arguments)
