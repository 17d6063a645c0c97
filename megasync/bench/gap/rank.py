"""One rung of `python -m megasync.bench gap`, on one trainer rank and one replica: gaps of all sampled tokens, and seconds.

Prompts are those of data.train, or random ones; responses go on to their limit. Leaves out which rungs there are (run.py).
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

import numpy as np

from bridge.generation import Completion, GenerationRequest
from bridge.replicas.pool import ReplicaPool
from engine.engine import Engine
from engine.runtime import parallel
from engine.sample import Sample
from megasync.bench.common.one_replica import ReplicaProgram
from megasync.bench.common.program import Measured
from megasync.bench.config import BenchRoot
from megasync.bench.generation.requests import build_requests
from megasync.data.load import load_data
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


class GapBench(ReplicaProgram):
    """One rung."""

    def run(self) -> Measured:
        """The second generation and the second step are timed: the first of each warms up."""
        config = self.config
        self.ends.callback(parallel.shutdown)
        parallel.initialize(config.engine.parallel, config.run.seed)
        pool = self.start_replica(ReplicaPool, replica_config(config))
        asked, seconds, answers = requests(config), 0.0, list[Completion]()
        for few in (asked[:2], asked):
            begin = time.perf_counter()
            answers = [found[0] for found in pool.generate(few).result()]
            seconds = time.perf_counter() - begin
        batch, step = samples(asked, answers), 0.0
        model = Engine(config.model, config.engine, config.algorithm, num_steps=config.run.steps)
        gap = np.concatenate([s.numpy() for s in model.score(batch)]) - np.concatenate([one.log_probs for one in answers])
        for _ in range(2):
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
