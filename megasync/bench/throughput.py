"""`python -m megasync.bench rollout bench.lora_rank=0`: generation by our replica beside vLLM's own offline `LLM.generate`.

The same requests (prompts, lengths, seeds) go to both in turns, in one run, with the same engine arguments, while the other one
is idle; ours takes them as a run's stream hands them in. Both engines are on the first GPU, each with its own memory.
Leaves out tables (tables.py), and weights: those of the model folder, or with `bench.shapes` random ones.

    python -m megasync.bench rollout --config configs/bench_cpu.yaml bench.lora_rank=0 [key=value ...] [--json FILE]
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import ray

from bridge.generation import GenerationRequest, GroupRequest
from bridge.replicas.pool import ReplicaPool
from megasync.bench.config import BenchRoot
from megasync.bench.lengths import long_tail
from megasync.bench.offline import OfflinePool
from megasync.config.load import load_config
from megasync.config.model_folder import model_shape
from megasync.devices import replica_devices, visible_devices
from megasync.files import write_atomically
from megasync.launch.processes import end_on_sigterm
from megasync.launch.ray_cluster import start_ray
from megasync.weights import replica_config

OURS, OFFLINE = "replica", "vllm"
Measured = dict[str, Any]


def requests_of(config: BenchRoot) -> list[GenerationRequest]:
    """One sample each, of a length that is set by `bench.median_tokens`; the same at every call."""
    sizes, rollout, generator = config.bench, config.rollout, random.Random(config.run.seed)
    vocabulary = model_shape(config.model.path).vocab_size
    longest = rollout.max_new_tokens
    lengths = long_tail(sizes.num_prompts, sizes.median_tokens or longest, longest, config.run.seed)
    return [
        GenerationRequest(
            tuple(generator.randrange(vocabulary) for _ in range(sizes.prompt_tokens)),
            max_new_tokens=length,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            min_p=rollout.min_p,
            seed=number,
        )
        for number, length in enumerate(lengths)
    ]


class ThroughputBench:
    """Two engines that wait for requests. `ends` takes them down."""

    def __init__(self, config: BenchRoot, results_path: Path, ends: ExitStack) -> None:
        self.config, self.requests, self.results_path = config, requests_of(config), results_path
        if (stop_ray := start_ray("local")) is not None:
            ends.callback(stop_ray)
        given = replica_config(config)
        devices = replica_devices(visible_devices(), 1, given.tensor_parallel)
        dummy: dict[str, object] = {} if config.bench.shapes == "none" else {"load_format": "dummy"}
        given = replace(given, devices=devices, shares_devices=False, engine_arguments=given.engine_arguments | dummy)
        self.pools: dict[str, ReplicaPool] = {}
        for way, kind in {OURS: ReplicaPool, OFFLINE: OfflinePool}.items():
            print(f"starting {way}", flush=True)
            self.pools[way] = kind.start(given, 1)
            ends.callback(self.pools[way].close)

    def run(self) -> None:
        """Write of each round and way: seconds, tokens, and CPU seconds of the process that asks and of those that compute."""
        rounds: list[Measured] = []
        tokens: dict[str, list[list[int]]] = {}
        for index in range(-1, self.config.bench.rounds):  # -1 warms up
            for way in list(self.pools)[:: -1 if index % 2 else 1]:
                before = self._cpu_seconds(way)
                seconds, tokens[way] = self._generate(way)
                spent = {name: after - before[name] for name, after in self._cpu_seconds(way).items()}
                number = sum(map(len, tokens[way]))
                print(f"round {index + 1} of {self.config.bench.rounds}  {way:<8}{number / seconds:.1f} tokens/s", flush=True)
                if index >= 0:
                    rounds.append({"round": index, "way": way, "seconds": seconds, "tokens": number, "cpu_seconds": spent})
            if rounds:
                same = [first == second for first, second in zip(*tokens.values(), strict=True)]
                is_complete = index + 1 == self.config.bench.rounds
                whole = {"rounds": rounds, "same_tokens": sum(same) / len(same), "is_complete": is_complete}
                write_atomically(self.results_path, json.dumps(whole))

    def _generate(self, way: str) -> tuple[float, list[list[int]]]:
        pool = self.pools[way]
        if isinstance(pool, OfflinePool):
            return pool.generate_offline(self.requests)
        begin = time.perf_counter()
        ray.get(pool.hand_in(0, [GroupRequest(key, request, (0,)) for key, request in enumerate(self.requests)]))
        found: dict[int, list[int]] = {}
        while len(found) < len(self.requests):
            found |= {one.key: one.completion.token_ids.tolist() for one in ray.get(pool.collect(0, 1.0)).finished}
        return time.perf_counter() - begin, [found[key] for key in range(len(self.requests))]

    def _cpu_seconds(self, way: str) -> dict[str, float]:
        (actor,) = self.pools[way]._chosen()
        process = psutil.Process(actor.pid)
        return {"asks": _cpu_seconds(process), "computes": sum(map(_cpu_seconds, process.children(recursive=True)))}


def _cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def main(arguments: Sequence[str]) -> int:
    """Measure by a config file, and write the results as JSON."""
    config_path, results_path = arguments
    end_on_sigterm()
    with ExitStack() as ends:
        ThroughputBench(load_config(config_path, root=BenchRoot), Path(results_path), ends).run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
