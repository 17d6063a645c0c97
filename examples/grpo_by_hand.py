"""GRPO in one file: the loop of megasync/run/loop.py on the Python API, without YAML, reward processes, checkpoints or logs. An
untrained model of 1 M parameters learns to write digits: its reward rises from 0.02 to 0.2 in 30 steps, half a minute of a CPU.

    megasync assets --to runs/by_hand
    python -m examples.grpo_by_hand --assets runs/by_hand --steps 30
    torchrun --nproc-per-node 2 -m examples.grpo_by_hand --assets runs/by_hand      # two trainer ranks

Three parts, each usable without the other two:

    Engine        megatron-core model, wrap and optimizer: prepare, update, whole_parameters     engine/engine.py
    ReplicaPool   vLLM in Ray actors: generate                                                   bridge/replicas/pool.py
    Publisher     weights of the one into the other, verified: publish                           bridge/send/publish.py

Every rank runs this file and calls Engine and Publisher in the same order; the replicas are rank 0's. Leaves out asynchrony.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch.distributed as dist
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from bridge.config import ReplicaConfig, SyncConfig
from bridge.generation import Completion, GenerationRequest
from bridge.replicas.pool import ReplicaPool
from bridge.send.publish import Publisher
from engine.algorithm import AlgorithmConfig
from engine.config import EngineConfig, ModelConfig, OptimizerConfig
from engine.engine import Engine
from engine.runtime import parallel
from engine.sample import Sample
from megasync.launch.ray_cluster import start_ray
from megasync.run.weights import build_exporter

PROMPTS_PER_STEP = 32
SAMPLES_PER_PROMPT = 16  # a group: advantages are relative to the mean reward of these
MAX_NEW_TOKENS = 4


@dataclass(frozen=True)
class Problem:
    """One line of the data file."""

    question: str  # "12+30="
    answer: str  # "42"


def reward(response: str, answer: str) -> float:
    """The share of positions with the right character; 1 for the right answer, nothing before or after it."""
    return sum(one == other for one, other in zip(response, answer, strict=False)) / max(len(response), len(answer))


# ---------------------------------------------------------------------------------------------------- the three parts


def build_engine(model_path: Path, num_steps: int) -> Engine:
    """The trainer. `wrap`: "ddp" or "megatron_fsdp"; ParallelConfig(tensor=2, ...) would split the model."""
    return Engine(
        ModelConfig(path=str(model_path), dtype="float32"),
        EngineConfig(
            wrap="megatron_fsdp",
            optimizer=OptimizerConfig(learning_rate=2e-3, weight_decay=0.0, warmup_steps=2),
            tokens_per_microbatch=8192,
        ),
        AlgorithmConfig(name="grpo", clip_low=0.2, clip_high=0.28, num_minibatches=1),
        num_steps=num_steps,
    )


@contextmanager
def replicas(model_path: Path) -> Iterator[ReplicaPool | None]:
    """On rank 0 one vLLM replica, with a Ray of its own; None on the other ranks."""
    if dist.get_rank() != 0:
        yield None
        return
    stop_ray = start_ray("local")
    try:
        config = ReplicaConfig(model_path=str(model_path.resolve()), dtype="float32", max_model_len=32, kv_cache_bytes=64 << 20)
        pool = ReplicaPool.start(config, num_replicas=1)
        try:
            yield pool
        finally:
            pool.close()
    finally:
        if stop_ray is not None:
            stop_ray()


def build_publisher(engine: Engine, pool: ReplicaPool | None) -> Publisher:
    """The way of the weights: gathered, renamed to Hugging Face's, sent in buckets whose digests are compared on arrival."""
    return Publisher(build_exporter(engine), pool, SyncConfig(bucket_bytes=1 << 20, verify="digest"))


# ---------------------------------------------------------------------------------------------------- one batch


class Rollouts:
    """Prompts, requests and rewards; on rank 0."""

    def __init__(self, pool: ReplicaPool, tokenizer: PreTrainedTokenizerBase, problems: Sequence[Problem], seed: int) -> None:
        self.pool, self.tokenizer, self.problems = pool, tokenizer, problems
        self.random = random.Random(seed)

    def take(self, step: int) -> list[Sample]:
        """The samples of one step, with rewards; it waits until all of them are generated."""
        chosen = self.random.sample(self.problems, PROMPTS_PER_STEP)
        requests = [self.request(problem, seed=step * PROMPTS_PER_STEP + place) for place, problem in enumerate(chosen)]
        groups = self.pool.generate(requests).result()
        of_groups = zip(chosen, requests, groups, strict=True)
        return [
            self.sample(problem, request, completion, group)
            for group, (problem, request, completions) in enumerate(of_groups)
            for completion in completions
        ]

    def request(self, problem: Problem, seed: int) -> GenerationRequest:
        return GenerationRequest(
            prompt_ids=tuple(self.tokenizer.encode(problem.question, add_special_tokens=False)),
            num_samples=SAMPLES_PER_PROMPT,
            max_new_tokens=MAX_NEW_TOKENS,
            stop_token_ids=(self.tokenizer.eos_token_id,),
            seed=seed,
        )

    def sample(self, problem: Problem, request: GenerationRequest, completion: Completion, group: int) -> Sample:
        """Token ids stay what vLLM sampled: only the reward reads the text."""
        response = self.tokenizer.decode(completion.token_ids, skip_special_tokens=True)
        return Sample(
            prompt_ids=np.array(request.prompt_ids, np.int32),
            response_ids=completion.token_ids,
            rollout_log_probs=completion.log_probs,
            weight_versions=completion.weight_versions,
            reward=reward(response, problem.answer),
            group=group,
            finish_reason=completion.finish_reason,
        )


def take_on_all_ranks(rollouts: Rollouts | None, step: int) -> list[Sample]:
    """The samples of a step. (A run sends each rank only the tokens that it trains on: run/rank_zero.py.)"""
    shared = [rollouts.take(step) if rollouts is not None else []]
    dist.broadcast_object_list(shared, src=0)
    return shared[0]


# ---------------------------------------------------------------------------------------------------- the loop


def train(engine: Engine, publisher: Publisher, rollouts: Rollouts | None, num_steps: int) -> list[float]:
    """Generate, reward, train, publish. Version v is the weights after v steps. The mean reward of each step."""
    rewards = []
    publisher.publish(version=0)
    for step in range(num_steps):
        samples = take_on_all_ranks(rollouts, step)
        assert all((sample.weight_versions == step).all() for sample in samples), "no token is of former weights"
        batch = engine.prepare(samples)  # advantages within each group; packed, balanced over ranks
        metrics = engine.update(batch)  # forward, backward, one optimizer step
        report = publisher.publish(version=step + 1)
        rewards.append(sum(sample.reward for sample in samples) / len(samples))
        if rollouts is not None:
            print(
                f"step {step + 1:3d}  reward {rewards[-1]:.3f}  loss {metrics['loss/total']:+.4f}  "
                f"gap to vLLM {metrics['logprob_gap/mean']:.1e}  sync {report.seconds * 1e3:.0f} ms",
                flush=True,
            )
    return rewards


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="GRPO on the Python API.")
    parser.add_argument("--assets", type=Path, required=True, help="the folder that `megasync assets` wrote")
    parser.add_argument("--steps", type=int, default=30)
    given = parser.parse_args(arguments)
    lines = (given.assets / "train.jsonl").read_text(encoding="utf-8").splitlines()
    problems = [Problem(**json.loads(line)) for line in lines]
    parallel.initialize(EngineConfig().parallel, seed=0)
    try:
        with replicas(given.assets / "model") as pool:  # first: vLLM starts before the trainer takes memory
            engine = build_engine(given.assets / "model", given.steps)
            tokenizer = AutoTokenizer.from_pretrained(given.assets / "model")
            publisher = build_publisher(engine, pool)
            try:
                train(engine, publisher, Rollouts(pool, tokenizer, problems, seed=0) if pool is not None else None, given.steps)
            finally:
                publisher.close()
    finally:
        parallel.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
