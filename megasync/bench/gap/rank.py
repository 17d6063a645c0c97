"""One rung of `python -m megasync.bench gap`, on one trainer rank and one replica: gaps of all sampled tokens, and seconds.

Prompts are those of data.train, or random ones; responses go on to their limit. Leaves out which rungs there are (run.py).

    python -m megasync.bench.gap.rank CONFIG.yaml OUT.json
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from bridge.generation import Completion, GenerationRequest
from bridge.replicas.pool import ReplicaPool
from engine.engine import Engine
from engine.runtime import parallel
from engine.sample import Sample
from megasync.bench.config import BenchRoot
from megasync.bench.generation.requests import build_requests
from megasync.config.files import write_atomically
from megasync.config.load import load_config
from megasync.data.prompts import load_data
from megasync.launch.processes import end_on_sigterm
from megasync.launch.ray_cluster import start_ray
from megasync.run.replica_start import replica_config


def requests(config: BenchRoot) -> list[GenerationRequest]:
    """One sample of each prompt, at temperature 1."""
    made = build_requests(config)
    if not config.data.train:
        return made
    data = load_data(config)
    pairs = zip(made, data.train, strict=False)
    return [dataclasses.replace(one, prompt_ids=tuple(data.prompts.prompt_ids(example))) for one, example in pairs]


def samples(asked: Sequence[GenerationRequest], answers: Sequence[Completion]) -> list[Sample]:
    """In groups of two, one of which is rewarded."""
    pairs = enumerate(zip(asked, answers, strict=True))
    return [
        Sample(np.array(one.prompt_ids, np.int32), done.token_ids, done.log_probs, reward=float(place % 2), group=place // 2)
        for place, (one, done) in pairs
    ]


def measure(config: BenchRoot, pool: ReplicaPool) -> dict[str, Any]:
    """The second generation and the second step are timed: the first of each warms up."""
    asked, seconds, answers = requests(config), 0.0, list[Completion]()
    for few in (asked[:2], asked):
        begin = time.perf_counter()
        answers = [found[0] for found in pool.generate(few).result()]
        seconds = time.perf_counter() - begin
    batch = samples(asked, answers)
    model = Engine(config.model, config.engine, config.algorithm, num_steps=config.run.steps)
    gap = np.concatenate([scores.numpy() for scores in model.score(batch)]) - np.concatenate([one.log_probs for one in answers])
    model.update(model.prepare(batch))
    begin = time.perf_counter()
    model.update(model.prepare(batch))
    step = time.perf_counter() - begin
    weights = np.exp(gap.astype(np.float64))
    return {
        "tokens": len(gap),
        "mean": float(np.abs(gap).mean(dtype=np.float64)),
        "max": float(np.abs(gap).max()),
        "differing": int((gap != 0).sum()),
        "ess": float(weights.sum() ** 2 / (len(weights) * (weights**2).sum())),
        "generated_tokens_per_second": len(gap) / seconds,
        "trained_tokens_per_second": len(gap) / step,
    }


def main(arguments: Sequence[str]) -> int:
    """Measure by a config file, and write the results as JSON."""
    config_path, results_path = arguments
    config = load_config(config_path, root=BenchRoot)
    end_on_sigterm()
    with ExitStack() as ends:
        ends.callback(parallel.shutdown)
        parallel.initialize(config.engine.parallel, config.run.seed)
        if (stop_ray := start_ray("local")) is not None:
            ends.callback(stop_ray)
        pool = ReplicaPool.start(replica_config(config), 1)
        ends.callback(pool.close)
        write_atomically(Path(results_path), json.dumps(measure(config, pool)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
