"""What every program of worker.py is: something that measures, and keeps what it has. Leaves out trainer ranks (rank.py)."""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from bridge.config import ReplicaConfig
from bridge.replicas.pool import ReplicaPool
from megasync.bench.config import BenchRoot
from megasync.config.files import write_atomically
from megasync.launch.devices import replica_devices, visible_devices
from megasync.launch.ray_cluster import start_ray
from megasync.run.replica_start import replica_config

Measured = dict[str, Any]
Pool = TypeVar("Pool", bound=ReplicaPool)


class Program(ABC):
    """`ends` takes down what is started. Of several ranks the first alone writes and speaks."""

    def __init__(self, config: BenchRoot, results_path: Path, ends: ExitStack) -> None:
        self.config, self.results_path, self.ends = config, results_path, ends
        self.is_first = os.environ.get("RANK", "0") == "0"

    def start(self) -> None:  # noqa: B027 # many start with nothing
        """What takes part in the measuring, before `run`."""

    @abstractmethod
    def run(self) -> Measured:
        """Measure; on the first rank what report.py takes."""

    def keep(self, results: Measured, *, is_complete: bool) -> None:
        """Write what was measured so far."""
        if self.is_first:
            write_atomically(self.results_path, json.dumps({**results, "is_complete": is_complete}))

    def say(self, text: str) -> None:
        """A line of progress."""
        if self.is_first:
            print(text, flush=True)

    def start_replica(self, kind: type[Pool], replica: ReplicaConfig) -> Pool:
        """One, with a Ray of our own if there is none."""
        if (stop_ray := start_ray("local")) is not None:
            self.ends.callback(stop_ray)
        pool = kind.start(replica, 1)
        self.ends.callback(pool.close)
        return pool

    def random_weights(self) -> dict[str, object]:
        """vLLM's arguments for a model that has no others."""
        return {} if self.config.bench.shapes == "none" else {"load_format": "dummy"}

    def on_first_devices(self) -> ReplicaConfig:
        """A replica there, whatever else is on them."""
        given = replica_config(self.config)
        devices = replica_devices(visible_devices(), 1, given.tensor_parallel)
        arguments = given.engine_arguments | self.random_weights()
        return replace(given, devices=devices, shares_devices=False, engine_arguments=arguments)
