"""What every bench of bench_worker.py has on each trainer rank: the layout, vLLM replicas, and a comparison of weights.

Leaves out what is measured (bench_sync.py, bench_rollout.py).
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
import torch.distributed as dist

from bridge.adapter import AdapterSource
from bridge.config import ReplicaConfig
from bridge.publish import Publisher
from bridge.verify import digest_value
from engine import parallel
from engine.engine import Engine
from engine.sample import Sample
from megasync.bench_replica import WORKER_EXTENSION, BenchPool

if TYPE_CHECKING:
    from bridge.sender import WeightSource
    from engine.config import EngineConfig
    from megasync.config import Config

SAMPLES = [Sample((3 + index, 5, 7), (11, 13, 17), (0.0, 0.0, 0.0)) for index in range(8)]
Measured = dict[str, Any]


class BenchRank(ABC):
    """Methods are collective unless they say otherwise; rank 0 alone has pools and results."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.layout = parallel.initialize(config.engine.parallel, config.run.seed)
        self._pools: list[BenchPool] = []
        self._publishers: list[Publisher] = []

    @abstractmethod
    def run(self) -> Measured:
        """Measure; on rank 0 what bench_summary.py takes."""

    def say(self, text: str) -> None:
        """A line of progress, from rank 0. Not collective."""
        if self.layout.rank == 0:
            print(text, flush=True)

    def build_engine(self, engine: EngineConfig) -> Engine:
        return Engine(self.config.model, engine, self.config.algorithm, num_steps=self.config.run.steps)

    def train(self, engine: Engine) -> None:
        """One optimizer step, so that there are new weights to bring over."""
        engine.update(engine.prepare(SAMPLES))

    def start_pool(self, adapter_rank: int = 0) -> BenchPool | None:
        """vLLM replicas, with a slot for an adapter where a rank is given; None on all ranks but the first."""
        if self.layout.rank != 0:
            return None
        rollout = self.config.rollout
        if not ray.is_initialized():
            ray.init(
                num_cpus=max(os.cpu_count() or 1, 4),
                include_dashboard=False,
                object_store_memory=100 * 2**20,  # weights never travel through Ray
                log_to_driver=False,
                logging_level="ERROR",
            )
        replica = ReplicaConfig(
            model_path=str(Path(self.config.model.path).resolve()),
            dtype=self.config.model.dtype,
            tensor_parallel=rollout.tensor_parallel,
            max_model_len=rollout.max_model_len,
            max_num_seqs=rollout.max_num_seqs,
            kv_cache_bytes=rollout.kv_cache_bytes,
            gpu_memory_utilization=rollout.gpu_memory_utilization,
            seed=self.config.run.seed,
            adapter_rank=adapter_rank,
            engine_arguments={"worker_extension_cls": WORKER_EXTENSION},
        )
        self.say(f"starting vLLM{' for adapters' if adapter_rank else ''}")
        self._pools.append(BenchPool.start(replica, rollout.replicas))
        return self._pools[-1]

    def publisher(self, source: WeightSource, pool: BenchPool | None) -> Publisher:
        """As session.py builds it."""
        if isinstance(source, AdapterSource):
            publisher = Publisher(source, pool, source.sync_config(self.config.sync), adapter=source.spec)
        else:
            publisher = Publisher(source, pool, self.config.sync)
        self._publishers.append(publisher)
        return publisher

    def compare(self, name: str, source: WeightSource, pool: BenchPool | None) -> bool:
        """Whether every replica computes with exactly what the source has.

        Raises:
            RuntimeError: it does not; names tensors that differ.
        """
        own = {tensor: digest_value(value) for tensor, value in source}
        digests = {key: digest for part in self.from_all(own) for key, digest in part.items()}
        for held in pool.read_digests(list(digests), 600.0) if pool is not None else []:
            wrong = [key for key, digest in digests.items() if held.get(key) != digest]
            if wrong:
                raise RuntimeError(f"{name}: vLLM holds other values than the trainer in {', '.join(wrong[:5])}")
        return True

    def from_all(self, value: Any) -> list[Any]:
        """Each rank's value, on every rank."""
        values: list[Any] = [None] * self.layout.world_size
        dist.all_gather_object(values, value)
        return values

    def close(self) -> None:
        """Take everything down. Not collective; safe after any failure."""
        for publisher in self._publishers:
            publisher.close()
        for pool in self._pools:
            pool.close()
