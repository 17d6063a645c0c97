"""`python -m megasync.bench rollout` on one trainer rank: how fast vLLM generates from merged weights and from an adapter.

An engine trains adapters for some steps and brings them to two replicas, merged to one and alone to the other; it is checked
that they hold what was sent. Then both generate from the same prompts, greedily, in turns. Leaves out tables (report.py).
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch.distributed as dist

from bridge.export.source import WeightSource
from bridge.generation import Completion
from bridge.send.publish import Publisher
from megasync.bench.common.program import Measured
from megasync.bench.common.rank import BenchRank, LoraSide
from megasync.bench.config import BenchRoot
from megasync.bench.generation.requests import Tokens, build_requests, take_turns
from megasync.bench.replicas.replica import BenchPool

NUM_STEPS = 3


class LoraBench(BenchRank):
    """Everything of one rank. Methods are collective; rank 0 alone has pools and results."""

    def __init__(self, config: BenchRoot, results_path: Path, ends: ExitStack) -> None:
        super().__init__(config, results_path, ends)
        self.lora = LoraSide(self)
        self.pools = {"merged": self.start_pool(), "adapter": self.lora.pool}
        merged = self.publisher(self.lora.merged, self.pools["merged"])
        self.senders: dict[str, tuple[Publisher, WeightSource]] = {
            "merged": (merged, self.lora.merged),
            "adapter": (self.lora.publisher, self.lora.adapter),
        }

    def run(self) -> Measured:
        for _ in range(NUM_STEPS):
            self.change(self.lora.engine)
        same_weights = {}
        for method, (publisher, source) in self.senders.items():
            publisher.publish(NUM_STEPS)
            same_weights[method] = self.compare(method, source, self.pools[method])
        results: Measured = {"rounds": [], "same_weights": same_weights}
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
        completions: list[list[Completion]] = pool.generate(requests).result()
        return time.perf_counter() - begin, [one.token_ids.tolist() for group in completions for one in group]
