"""What every bench of worker.py has on each trainer rank: the layout, vLLM replicas, and a comparison of weights.

Leaves out what is measured (sync/, generation/).
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from bridge.export.source import WeightSource, whole_tensors
from bridge.layout.digest import digest_value
from bridge.send.collectives import Ranks
from bridge.send.publish import Publisher
from engine.config import EngineConfig
from engine.engine import Engine
from engine.runtime import parallel
from engine.sample import Sample
from megasync.bench.common.random_engine import FrozenEngine, RandomEngine, negate
from megasync.bench.config import BenchRoot
from megasync.bench.replicas.replica import WORKER_EXTENSION, BenchPool, ElsewherePool
from megasync.config.files import write_atomically
from megasync.hf.shapes import SHAPES
from megasync.launch.devices import devices_for_ray, replica_devices, visible_devices
from megasync.launch.ray_cluster import start_ray
from megasync.run.rank_zero import control_group
from megasync.run.replica_start import replica_config
from megasync.run.weights import build_publisher

SAMPLES = [Sample(np.array([3 + index, 5, 7], np.int32), np.array([11, 13, 17], np.int32)) for index in range(8)]
Measured = dict[str, Any]


class BenchRank(ABC):
    """Methods are collective unless they say otherwise; rank 0 alone has pools and results. `ends` takes down what is started."""

    def __init__(self, config: BenchRoot, results_path: Path, ends: ExitStack, *, shares_memory: bool = False) -> None:
        """`shares_memory`: other processes map memory of this rank's GPU, as replicas on the trainer's GPUs do."""
        self.config, self.results_path, self.ends = config, results_path, ends
        shares_memory |= config.rollout.is_colocated
        self.layout = parallel.initialize(config.engine.parallel, config.run.seed, shares_memory_over_ipc=shares_memory)
        self.from_all = Ranks(control_group()).gather

    @abstractmethod
    def run(self) -> Measured:
        """Measure; on rank 0 what report.py takes."""

    def keep(self, results: Measured, *, is_complete: bool) -> None:
        """Write what was measured so far, from rank 0. Not collective."""
        if self.layout.rank == 0:
            write_atomically(self.results_path, json.dumps({**results, "is_complete": is_complete}))

    def say(self, text: str) -> None:
        """A line of progress, from rank 0. Not collective."""
        if self.layout.rank == 0:
            print(text, flush=True)

    def build_engine(self, engine: EngineConfig) -> Engine:
        bench = self.config.bench
        kind = Engine if bench.shapes == "none" else RandomEngine
        if bench.update == "negate" and bench.shapes != "none" and SHAPES[bench.shapes].num_experts:
            kind = FrozenEngine  # for all experts' gradients and optimizer state, one GPU is too small
        return kind(self.config.model, engine, self.config.algorithm, num_steps=self.config.run.steps)

    def change(self, engine: Engine) -> None:
        """Other weights to bring over: one optimizer step, or what `bench.update` says where all weights are trained."""
        if self.config.bench.update == "negate" and not engine.config.lora.rank:
            negate(engine)
        else:
            engine.update(engine.prepare(SAMPLES))

    def start_pool(self, adapter_rank: int = 0) -> BenchPool | None:
        """vLLM replicas, with a slot for an adapter where a rank is given; None on all ranks but the first.

        A second pool is put on the first of the GPUs that Ray has, where the other one is too if there are no more: only one of
        them is measured at a time, and the other takes memory alone.
        """
        if self.layout.rank != 0:
            return None
        rollout, visible = self.config.rollout, visible_devices()
        is_apart = self.config.bench.apart
        gpus = devices_for_ray(visible, self.config.bench.num_ranks, is_colocated=rollout.is_colocated or is_apart)
        if (stop_ray := start_ray("local", gpus)) is not None:
            self.ends.callback(stop_ray)
        arguments: dict[str, object] = {"worker_extension_cls": WORKER_EXTENSION}
        if self.config.bench.shapes != "none":
            arguments["load_format"] = "dummy"
        replica = replica_config(self.config)
        replica = replace(replica, adapter_rank=adapter_rank, engine_arguments=replica.engine_arguments | arguments)
        if is_apart:
            own = visible[: self.config.bench.num_ranks]
            devices = replica_devices(own[1:] + own[:1], rollout.replicas, rollout.tensor_parallel)
            replica = replace(replica, devices=devices)
        elif stop_ray is None:  # the second pool
            devices = replica_devices(visible if gpus is None else gpus, rollout.replicas, rollout.tensor_parallel)
            replica = replace(replica, devices=devices)
        self.say(f"starting vLLM{' for adapters' if adapter_rank else ''}")
        pool = (ElsewherePool if is_apart else BenchPool).start(replica, rollout.replicas)
        self.ends.callback(pool.close)
        return pool

    def publisher(self, source: WeightSource, pool: BenchPool | None) -> Publisher:
        """As a training run's."""
        publisher = build_publisher(source, pool, self.config)
        self.ends.callback(publisher.close)
        return publisher

    def compare(self, name: str, source: WeightSource, pool: BenchPool | None) -> bool:
        """Whether every replica computes with exactly what the source has.

        Raises:
            RuntimeError: it does not; names tensors that differ.
        """
        own = {tensor: digest_value(value) for tensor, value in whole_tensors(source)}
        digests = {key: digest for part in self.from_all(own) for key, digest in part.items()}
        for held in pool.read_digests(600.0).values() if pool is not None else ():
            wrong = [key for key, digest in digests.items() if held.get(key) != digest]
            if wrong:
                raise RuntimeError(f"{name}: vLLM holds other values than the trainer in {', '.join(wrong[:5])}")
        return True
