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
from functools import partial

import psutil
import ray
import torch.distributed as dist

from bench.common.one_replica import ReplicaProgram
from bench.common.program import Measured
from bench.common.rank import BenchRank, LoraSide
from bench.generation.requests import Tokens, build_requests, take_turns
from bench.replicas.replica import BenchPool, OfflinePool
from bridge.generation import GroupRequest
from bridge.replicas.pool import ReplicaPool

NUM_STEPS = 3


class LoraBench(BenchRank):
    """Everything of one rank."""

    def start(self) -> None:
        self.lora = LoraSide(self)
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


class ThroughputBench(ReplicaProgram):
    """Two engines that wait for requests."""

    def start(self) -> None:
        self.requests = build_requests(self.config)
        self.pools: dict[str, ReplicaPool] = {}
        for method, kind in {"replica": ReplicaPool, "vllm": OfflinePool}.items():
            self.say(f"starting {method}")
            self.pools[method] = self.start_replica(kind, self.on_first_devices())
        self.cpu_seconds: dict[str, dict[str, float]] = {}  # of each method's last turn

    def run(self) -> Measured:
        """Seconds, tokens, and CPU seconds of the process that asks and of those that compute; kept after each round."""
        results: Measured = {"rounds": [], "same_tokens": 0.0}
        generators = {method: partial(self._measure, method) for method in self.pools}
        for found, results["same_tokens"] in take_turns(generators, self.config.bench.rounds):
            results["rounds"] += [{**one, "cpu_seconds": self.cpu_seconds[one["method"]]} for one in found]
            if found:
                self.keep(results, is_complete=False)
        return results

    def _measure(self, method: str) -> tuple[float, Tokens]:
        before = self._cpu_seconds(method)
        pool = self.pools[method]
        found = pool.generate_offline(self.requests) if isinstance(pool, OfflinePool) else self._generate(pool)
        self.cpu_seconds[method] = {name: after - before[name] for name, after in self._cpu_seconds(method).items()}
        return found

    def _generate(self, pool: ReplicaPool) -> tuple[float, Tokens]:
        begin = time.perf_counter()
        ray.get(pool.hand_in(0, [GroupRequest(key, request, (0,)) for key, request in enumerate(self.requests)]))
        found: dict[int, list[int]] = {}
        while len(found) < len(self.requests):
            found |= {one.key: one.completion.token_ids.tolist() for one in ray.get(pool.collect(0, 1.0)).finished}
        return time.perf_counter() - begin, [found[key] for key in range(len(self.requests))]

    def _cpu_seconds(self, method: str) -> dict[str, float]:
        (actor,) = self.pools[method]._chosen()
        process = psutil.Process(actor.pid)
        children = process.children(recursive=True)
        return {"asks": _cpu_seconds(process), "computes": sum(_cpu_seconds(child) for child in children)}


def _cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)
