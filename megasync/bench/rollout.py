"""`python -m megasync.bench rollout` on one trainer rank: how fast vLLM generates from merged weights and from an adapter.

An engine trains adapters for some steps and brings them to two replicas, merged to one and alone to the other; it is checked
that they hold what was sent. Then both generate from the same prompts, greedily, in alternating order, while the
other one and the trainer are idle. Leaves out tables (tables.py).
"""

from __future__ import annotations

import random
import time
from contextlib import ExitStack
from pathlib import Path

import torch.distributed as dist

from bridge.export.source import WeightSource
from bridge.generation import Completion, GenerationRequest
from bridge.send.publish import Publisher
from megasync.bench.config import BenchRoot
from megasync.bench.lora import LoraSide
from megasync.bench.rank import BenchRank, Measured
from megasync.bench.replica import BenchPool

NUM_STEPS = 3


class RolloutBench(BenchRank):
    """Everything of one rank. Methods are collective; rank 0 alone has pools and results."""

    def __init__(self, config: BenchRoot, results_path: Path, ends: ExitStack) -> None:
        super().__init__(config, results_path, ends)
        self.lora = LoraSide(self)
        self.pools = {"merged": self.start_pool(), "adapter": self.lora.pool}
        self.publishers: dict[str, tuple[Publisher, WeightSource]] = {
            "merged": (self.publisher(self.lora.merged, self.pools["merged"]), self.lora.merged),
            "adapter": (self.lora.publisher, self.lora.adapter),
        }

    def run(self) -> Measured:
        for _ in range(NUM_STEPS):
            self.change(self.lora.engine)
        same_weights: dict[str, bool] = {}
        for way, (publisher, source) in self.publishers.items():
            publisher.publish(NUM_STEPS)
            same_weights[way] = self.compare(way, source, self.pools[way])
        rounds: list[Measured] = []
        results: Measured = {"rounds": rounds, "same_weights": same_weights, "same_tokens": 0.0}
        tokens: dict[str, list[tuple[int, ...]]] = {}
        for index in range(-1, self.config.bench.rounds):  # -1 warms up
            for way in list(self.pools)[:: -1 if index % 2 else 1]:
                if (pool := self.pools[way]) is not None:
                    seconds, tokens[way] = self._generate(pool)
                    num_tokens = sum(map(len, tokens[way]))
                    self.say(f"round {index + 1} of {self.config.bench.rounds}  {way:<8}{num_tokens / seconds:.1f} tokens/s")
                    if index >= 0:
                        rounds.append({"round": index, "way": way, "seconds": seconds, "tokens": num_tokens})
                dist.barrier()
            same = [first == second for first, second in zip(*tokens.values(), strict=True)]  # none on ranks but the first
            results["same_tokens"] = sum(same) / max(1, len(same))
            if rounds:
                self.keep(results, is_complete=False)
        return results

    def _generate(self, pool: BenchPool) -> tuple[float, list[tuple[int, ...]]]:
        begin = time.perf_counter()
        completions: list[list[Completion]] = pool.generate(self._requests()).result()
        return time.perf_counter() - begin, [tuple(one.token_ids.tolist()) for group in completions for one in group]

    def _requests(self) -> list[GenerationRequest]:
        """The same at every call."""
        sizes, generator = self.config.bench, random.Random(self.config.run.seed)
        vocabulary: int = self.lora.engine.hf_bridge.hf_config.vocab_size
        prompts = [tuple(generator.randrange(vocabulary) for _ in range(sizes.prompt_tokens)) for _ in range(sizes.num_prompts)]
        limit = self.config.rollout.max_new_tokens
        return [GenerationRequest(prompt, 1, limit, temperature=0.0) for prompt in prompts]
