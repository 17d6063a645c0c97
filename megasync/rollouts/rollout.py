"""Rollouts: which prompts a step gets, their generation on the replicas, and rewards. Rank 0 does it, every rank gets it.

Asynchrony is one number here: `start_until(step + max_staleness)` lets batches begin while older ones train. Leaves out
tokens' log-probs under the trainer (the engine's) and weight sync (the bridge's).
"""

from __future__ import annotations

import asyncio
import statistics
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from bridge.messages import Completion, GenerationRequest
from engine.sample import Sample
from megasync.rollouts.data import Example, PromptOrder
from megasync.rollouts.rewards.functions import RewardInput
from megasync.rollouts.rewards.pool import RewardPool, Scored, reward_metrics

if TYPE_CHECKING:
    from bridge.replicas.pool import Generation, ReplicaPool
    from megasync.config.schema import Config
    from megasync.reporting.timeline import Timeline
    from megasync.rollouts.prompts import Prompts


@dataclass
class RolloutBatch:
    """The samples of one step, and what their generation took."""

    samples: list[Sample]
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass
class _Started:
    examples: list[Example]
    handle: Generation
    at_seconds: float


class Rollouts:
    """Rank 0's side. Batches are started in order, at most once, and taken in order."""

    def __init__(
        self,
        config: Config,
        pool: ReplicaPool,
        prompts: Prompts,
        examples: list[Example],
        rewards: RewardPool,
        timeline: Timeline,
        first_step: int,
    ) -> None:
        self.config, self.pool, self.prompts, self.examples = config, pool, prompts, examples
        self.rewards, self.timeline, self.runner = rewards, timeline, asyncio.Runner()
        self.order = PromptOrder(len(examples), config.data.batch_size, config.run.seed, config.data.shuffle)
        self.started: dict[int, _Started] = {}
        self.next_step = first_step

    def start_until(self, step: int) -> None:
        """Start every batch up to that of `step` that has not been started, within the run."""
        while self.next_step <= min(step, self.config.run.steps - 1):
            chosen = [self.examples[index] for index in self.order.indices(self.next_step)]
            requests = [self._request(example, index) for index, example in enumerate(chosen)]
            self.started[self.next_step] = _Started(chosen, self.pool.generate(requests), time.time())
            self.next_step += 1

    def take(self, step: int) -> RolloutBatch:
        """Wait for the batch of `step`; its samples, in order of prompts, and metrics."""
        started = self.started.pop(step)
        waited_from = time.time()
        completions = started.handle.result()
        done = time.time()
        ended = min(started.handle.ended_seconds or done, done)
        self.timeline.add("rollout", "rollout", started.at_seconds, ended, {"step": step})
        if done - waited_from > 1e-3:
            self.timeline.add("wait for rollout", "trainer", waited_from, done, {"step": step})
        samples, scored = self._samples(started.examples, completions)
        self.timeline.add("reward", "rollout", done, time.time(), {"step": step})
        metrics = self._metrics(samples, step, ended - started.at_seconds, done - waited_from)
        return RolloutBatch(samples, metrics | reward_metrics(scored))

    def evaluate(self, examples: list[Example]) -> float:
        """Mean reward of greedy answers."""
        requests = [self._request(example, index, greedy=True) for index, example in enumerate(examples)]
        begin = time.time()
        completions = self.pool.generate(requests).result()
        self.timeline.add("evaluate", "rollout", begin, time.time(), {})
        return statistics.fmean(sample.reward for sample in self._samples(examples, completions)[0])

    def close(self) -> None:
        """End the processes of rewards. Safe after any failure."""
        self.rewards.close()
        self.runner.close()

    def _request(self, example: Example, index: int, greedy: bool = False) -> GenerationRequest:
        rollout = self.config.rollout
        # the seed of a sample is a function of the run's seed, the step and the prompt's place in the batch
        place = self.next_step * self.config.data.batch_size + index
        return GenerationRequest(
            prompt_ids=self.prompts.prompt_ids(example),
            num_samples=1 if greedy else rollout.group_size,
            max_new_tokens=rollout.max_new_tokens,
            temperature=0.0 if greedy else rollout.temperature,
            top_p=1.0 if greedy else rollout.top_p,
            seed=(self.config.run.seed * 1_000_003 + place * rollout.group_size) % 2**31,
            stop_token_ids=self.prompts.stop_token_ids,
        )

    def _samples(self, examples: list[Example], completions: list[list[Completion]]) -> tuple[list[Sample], list[Scored]]:
        """With their rewards."""
        groups = [
            [self._reward_input(example, completion) for completion in of_prompt]
            for example, of_prompt in zip(examples, completions, strict=True)
        ]
        scored = self.runner.run(self._score(groups))
        samples = [
            Sample(
                prompt_ids=self.prompts.prompt_ids(example),
                response_ids=completion.token_ids,
                rollout_log_probs=completion.log_probs,
                weight_versions=completion.weight_versions,
                reward=one.total,
                group=group,
            )
            for group, (example, of_prompt) in enumerate(zip(examples, completions, strict=True))
            for completion, one in zip(of_prompt, scored[group], strict=True)
        ]
        return samples, [one for group in scored for one in group]

    async def _score(self, groups: list[list[RewardInput]]) -> list[list[Scored]]:
        return await asyncio.gather(*map(self.rewards.score_group, groups))

    def _reward_input(self, example: Example, completion: Completion) -> RewardInput:
        return RewardInput(
            prompt=example.prompt,
            response=self.prompts.text(completion.token_ids),
            answer=example.answer,
            num_tokens=len(completion.token_ids),
            max_tokens=self.config.rollout.max_new_tokens,
            extra=example.extra,
            line=example.line,
        )

    def _metrics(self, samples: list[Sample], step: int, seconds: float, waited_seconds: float) -> dict[str, float]:
        tokens = sum(len(sample.response_ids) for sample in samples)
        ages = [step - version for sample in samples for version in sample.weight_versions]
        rewards = [sample.reward for sample in samples]
        return {
            "reward/mean": statistics.fmean(rewards),
            "reward/std": statistics.pstdev(rewards),
            "response/tokens_mean": tokens / len(samples),
            "staleness/mean": statistics.fmean(ages),
            "staleness/max": max(ages),
            "rollout/seconds": seconds,
            "rollout/wait_seconds": waited_seconds,
            "rollout/tokens_per_second": tokens / max(seconds, 1e-9),
        }
