"""Shared by every bench on trainer ranks: the layout, vLLM replicas, a comparison of weights, LoRA, and rounds of syncs.

Leaves out the measurements (sync/, generation/, equivalence/read_back.py).
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.common.program import Measured, Program
from bench.common.random_engine import FrozenEngine, RandomEngine, negate
from bench.config import BenchRoot
from bench.replicas.replica import WORKER_EXTENSION, BenchPool
from bridge.export.adapter import AdapterSource
from bridge.export.source import WeightSource, whole_tensors
from bridge.layout.digest import digest_value
from bridge.layout.manifest import Manifest
from bridge.messages import StageSpan
from bridge.send.connection import Ranks
from bridge.send.publish import Publisher
from engine.config import EngineConfig, LoraConfig
from engine.engine import Engine
from engine.runtime import parallel
from engine.sample import Sample
from megasync.launch.devices import devices_for_ray, replica_devices, visible_devices
from megasync.launch.ray_cluster import start_ray
from megasync.models.model_shape import SHAPES
from megasync.run.rank_zero import control_group
from megasync.run.replica_start import replica_config
from megasync.run.weights import as_served, build_adapter_source, build_exporter, build_publisher, uses_ipc

SAMPLES = [Sample(np.array([3 + index, 5, 7], np.int32), np.array([11, 13, 17], np.int32)) for index in range(8)]


@dataclass(frozen=True)
class Way:
    """To bring weights over. `sync` brings them to every replica of `pool` as a version, and rank 0 gets seconds and bytes.

    `source`: what the replicas must hold afterwards. `pool`: rank 0's. `publisher`: where it is a sync of ours.
    """

    sync: Callable[[int], Measured]
    engine: Engine
    source: WeightSource | None
    pool: Any
    publisher: Publisher | None = None


class BenchRank(Program):
    """Methods are collective unless they say otherwise; rank 0 alone has pools and results."""

    trains = True  # False: weights that change by their signs need no gradients

    def __init__(self, config: BenchRoot, results_path: Path, ends: ExitStack) -> None:
        super().__init__(config, results_path, ends)
        ends.callback(parallel.shutdown)
        self.layout = parallel.initialize(config.engine.parallel, config.run.seed)
        self.from_all = Ranks(control_group()).gather

    def build_engine(self, engine: EngineConfig) -> Engine:
        bench, kind = self.config.bench, Engine
        if bench.shapes is not None:  # all experts' gradients and optimizer state would not fit one GPU
            trains = bench.update == "step" or (self.trains and not SHAPES[bench.shapes].num_experts)
            kind = RandomEngine if trains else FrozenEngine
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
        if not self.is_first:
            return None
        rollout, visible, bench = self.config.rollout, visible_devices(), self.config.bench
        gpus = devices_for_ray(visible, bench.num_ranks, is_colocated=rollout.is_colocated)
        if (stop_ray := start_ray("local", gpus)) is not None:
            self.ends.callback(stop_ray)
        arguments = self.random_weights() | {"worker_extension_cls": WORKER_EXTENSION}
        replica = replica_config(self.config)
        replica = replace(replica, adapter_rank=adapter_rank, engine_arguments=replica.engine_arguments | arguments)
        if stop_ray is None:  # the second pool
            chosen = visible if gpus is None else gpus
            replica = replace(replica, devices=replica_devices(chosen, rollout.replicas, rollout.tensor_parallel))
        self.say(f"starting vLLM{' for adapters' if adapter_rank else ''}")
        pool = BenchPool.start(replica, rollout.replicas)
        self.ends.callback(pool.close)
        return pool

    def publisher(self, source: WeightSource, pool: BenchPool | None) -> Publisher:
        """The publisher of a training run with this config."""
        publisher = build_publisher(source, pool, self.config)
        self.ends.callback(publisher.close)
        return publisher

    def whole_manifest(self, source: WeightSource) -> Manifest:
        """The manifest of all stages."""
        stages = dict(self.from_all((source.stage, source.manifest())))
        return Manifest.concatenate(stages[stage] for stage in sorted(stages))

    def take_turns(self, ways: Mapping[str, Way], described: Measured, measure: Callable[[str, int], Measured]) -> Measured:
        """Round by round a sync by each of the ways, a version each; what `measure` tells of it, on rank 0.

        Warm-up and last round end with a comparison of all that replicas hold with what the trainer has.
        """
        results: Measured = {"warm_up": [], "rounds": [], **described}
        num_rounds, versions = self.config.bench.rounds, itertools.count(1)
        for index in range(-1, num_rounds):  # -1 warms up
            for name, way in ways.items():
                measured = {"round": index, "method": name, **measure(name, next(versions))}
                self.say(f"round {index + 1} of {num_rounds}  {name:<16}{measured.get('seconds', 0.0):.4f} s")
                if way.source is not None and index in (-1, num_rounds - 1):
                    measured["same_weights"] = self.compare(name, way.source, way.pool)
                results["warm_up" if index < 0 else "rounds"].append(measured)
            if results["rounds"]:
                self.keep(results, is_complete=False)
        return results

    def compare(self, name: str, source: WeightSource, pool: Any) -> bool:
        """Whether every replica computes with exactly what the source has.

        Raises:
            RuntimeError: it does not; names tensors that differ.
        """
        sent = source if isinstance(source, AdapterSource) else as_served(source, self.config)
        own = {tensor: digest_value(value) for tensor, value in whole_tensors(sent)}
        digests = {key: digest for part in self.from_all(own) for key, digest in part.items()}
        for held in pool.read_digests(600.0).values() if pool is not None else ():
            wrong = [key for key, digest in digests.items() if held.get(key) != digest]
            if wrong:
                raise RuntimeError(f"{name}: vLLM holds other values than the trainer in {', '.join(wrong[:5])}")
        return True


class LoraSide:
    """Adapters of rank `bench.lora_rank` on all linears; `merged` is a source of the weights with them."""

    def __init__(self, bench: BenchRank) -> None:
        rank = bench.config.bench.lora_rank
        lora = LoraConfig(rank=rank, alpha=2.0 * rank)
        self.engine = bench.build_engine(bench.config.engine.model_copy(update={"lora": lora}))
        self.merged = build_exporter(self.engine, on_all_ranks=uses_ipc(bench.config))


class ServedLora(LoraSide):
    """The same, and a vLLM that serves them: `pool` and `publisher` are for the source `adapter` alone."""

    def __init__(self, bench: BenchRank) -> None:
        super().__init__(bench)
        self.adapter = build_adapter_source(self.engine)
        self.pool = bench.start_pool(adapter_rank=bench.config.bench.lora_rank)
        self.publisher = bench.publisher(self.adapter, self.pool)


def seconds_by_name(spans: Iterable[StageSpan]) -> dict[str, float]:
    seconds: dict[str, float] = defaultdict(float)
    for span in spans:
        seconds[span.name] += span.end - span.start
    return dict(seconds)
