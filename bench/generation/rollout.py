"""`python -m bench rollout`: two replicas generate from the same prompts in turns, while the other one is idle.

LoraBench, on one trainer rank: from merged weights and from an adapter. An engine trains adapters for some steps and brings them
to two replicas, merged to one and alone to the other; it is checked that they hold what was sent. Both then generate greedily.

ThroughputBench, with bench.lora_rank=0: our replica beside vLLM's own offline `LLM.generate`, with the same engine arguments;
ours takes requests as a run's stream hands them in. Both engines are on the first GPU, each with its own memory. The weights are
those of model.path, or random ones. Leaves out tables (report.py).

    python -m bench rollout --config configs/bench_cpu.yaml [bench.lora_rank=0] [model.path=FOLDER] [key=value ...]
"""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial

import ray
import torch.distributed as dist

from bench.common.program import Measured, Program
from bench.common.rank import BenchRank, ServedLora
from bench.generation.requests import Tokens, build_requests, take_turns
from bench.replicas.replica import BenchPool, OfflinePool
from bridge.generation import GroupRequest
from bridge.replicas.pool import ReplicaPool
from megasync.launch.devices import replica_devices, visible_devices
from megasync.launch.ray_cluster import start_ray
from megasync.run.replica_start import replica_config

NUM_STEPS = 3


class LoraBench(BenchRank):
    """Everything of one rank."""

    def start(self) -> None:
        self.lora = ServedLora(self)
        self.pools = {"merged": self.start_pool(), "adapter": self.lora.pool}
        merged = self.publisher(self.lora.merged, self.pools["merged"])
        self.publishers = {"merged": merged, "adapter": self.lora.publisher}

    def run(self) -> Measured:
        for _ in range(NUM_STEPS):
            self.change(self.lora.engine)
        results: Measured = {"rounds": [], "same_weights": {}}
        for method, publisher in self.publishers.items():
            publisher.publish(NUM_STEPS)
            source = self.lora.merged if method == "merged" else self.lora.adapter
            results["same_weights"][method] = self.compare(method, source, self.pools[method])
        generators = {method: partial(self._generate, pool) for method, pool in self.pools.items() if pool is not None}
        for found, results["same_tokens"] in take_turns(generators, self.config.bench.rounds):
            dist.barrier()
            results["rounds"] += found
            if found:
                self.keep(results, is_complete=False)
        return results

    def _generate(self, pool: BenchPool) -> tuple[float, Tokens]:
        requests = build_requests(self.config, greedy=True)
        begin = time.perf_counter()
        completions = pool.generate(requests).result()
        return time.perf_counter() - begin, [one.token_ids.tolist() for group in completions for one in group]


class ThroughputBench(Program):
    """Two engines that wait for requests."""

    def start(self) -> None:
        self.requests = build_requests(self.config)
        given = replica_config(self.config)
        devices = replica_devices(visible_devices(), 1, given.tensor_parallel)  # whatever else is on them
        arguments = given.engine_arguments | self.random_weights()
        replica = replace(given, devices=devices, shares_devices=False, engine_arguments=arguments)
        if (stop_ray := start_ray("local")) is not None:
            self.ends.callback(stop_ray)
        self.pools: dict[str, ReplicaPool] = {}
        for method, kind in {"replica": ReplicaPool, "vllm": OfflinePool}.items():
            self.say(f"starting {method}")
            self.pools[method] = pool = kind.start(replica, 1)
            self.ends.callback(pool.close)

    def run(self) -> Measured:
        """Seconds and tokens, kept after each round."""
        results: Measured = {"rounds": [], "same_tokens": 0.0}
        generators = {method: partial(self._measure, method) for method in self.pools}
        for found, results["same_tokens"] in take_turns(generators, self.config.bench.rounds):
            results["rounds"] += found
            if found:
                self.keep(results, is_complete=False)
        return results

    def _measure(self, method: str) -> tuple[float, Tokens]:
        pool = self.pools[method]
        return pool.generate_offline(self.requests) if isinstance(pool, OfflinePool) else self._generate(pool)

    def _generate(self, pool: ReplicaPool) -> tuple[float, Tokens]:
        begin = time.perf_counter()
        ray.get(pool.hand_in(0, [GroupRequest(key, request, (0,)) for key, request in enumerate(self.requests)]))
        found: dict[int, list[int]] = {}
        while len(found) < len(self.requests):
            found |= {one.key: one.completion.token_ids.tolist() for one in ray.get(pool.collect(0, 1.0)).finished}
        return time.perf_counter() - begin, [found[key] for key in range(len(self.requests))]
