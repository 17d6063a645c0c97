"""`python -m megasync.bench rollout bench.lora_rank=0`: generation by our replica beside vLLM's own offline `LLM.generate`.

The same requests (prompts, lengths, seeds) go to both in turns, in one run, with the same engine arguments, while the other one
is idle; ours takes them as a run's stream hands them in. Both engines are on the first GPU, each with its own memory. The
weights are those of model.path, or random ones. Leaves out tables (report.py).

    python -m megasync.bench rollout --config configs/bench_cpu.yaml bench.lora_rank=0 [model.path=FOLDER] [key=value ...]
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil
import ray

from bridge.generation import GroupRequest
from bridge.replicas.pool import ReplicaPool
from megasync.bench.config import BenchRoot
from megasync.bench.generation.requests import Tokens, build_requests, take_turns
from megasync.bench.replicas.offline import OfflinePool
from megasync.config.files import write_atomically
from megasync.config.load import load_config
from megasync.launch.devices import replica_devices, visible_devices
from megasync.launch.processes import end_on_sigterm
from megasync.launch.ray_cluster import start_ray
from megasync.run.replica_start import replica_config


class ThroughputBench:
    """Two engines that wait for requests. `ends` takes them down."""

    def __init__(self, config: BenchRoot, ends: ExitStack) -> None:
        self.requests = build_requests(config)
        if (stop_ray := start_ray("local")) is not None:
            ends.callback(stop_ray)
        given = replica_config(config)
        devices = replica_devices(visible_devices(), 1, given.tensor_parallel)
        dummy: dict[str, object] = {} if config.bench.shapes == "none" else {"load_format": "dummy"}
        given = replace(given, devices=devices, shares_devices=False, engine_arguments=given.engine_arguments | dummy)
        self.pools: dict[str, ReplicaPool] = {}
        for method, kind in {"replica": ReplicaPool, "vllm": OfflinePool}.items():
            print(f"starting {method}", flush=True)
            self.pools[method] = kind.start(given, 1)
            ends.callback(self.pools[method].close)
        self.cpu_seconds: dict[str, dict[str, float]] = {}  # of each method's last turn

    def run(self, num_rounds: int, results_path: Path) -> None:
        """Write seconds, tokens, and CPU seconds of the process that asks and of those that compute, after each round."""
        rounds: list[dict[str, object]] = []
        generators = {method: partial(self._measure, method) for method in self.pools}
        for number, (found, same) in enumerate(take_turns(generators, num_rounds)):
            rounds += [{**one, "cpu_seconds": self.cpu_seconds[one["method"]]} for one in found]
            if found:
                results = {"rounds": rounds, "same_tokens": same, "is_complete": number == num_rounds}
                write_atomically(results_path, json.dumps(results))

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


def main(arguments: Sequence[str]) -> int:
    """Measure by a config file, and write the results as JSON."""
    config_path, results_path = arguments
    config = load_config(config_path, root=BenchRoot)
    end_on_sigterm()
    with ExitStack() as ends:
        ThroughputBench(config, ends).run(config.bench.rounds, Path(results_path))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
