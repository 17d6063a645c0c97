"""Rollouts: which prompts a step gets, their generation on the replicas, and rewards. Rank 0 does it, every rank gets it.

Asynchrony is one number here: `start_until(step + max_staleness)` lets batches begin while older ones train. Leaves out
tokens' log-probs under the trainer (the engine's) and weight sync (the bridge's).
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from bridge.messages import Completion
from engine.sample import Sample
from megasync.rollouts.data import Example, PromptOrder
from megasync.rollouts.requests import reward_input, sample_line, training_request
from megasync.rollouts.reward import RewardFunction, RewardInput

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
    lines: list[dict[str, Any]] = field(default_factory=list)  # for samples.jsonl; rank 0's


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
        reward: RewardFunction,
        timeline: Timeline,
        first_step: int,
    ) -> None:
        self.config, self.pool, self.prompts, self.examples = config, pool, prompts, examples
        self.reward, self.timeline = reward, timeline
        self.order = PromptOrder(len(examples), config.data.batch_size, config.run.seed, config.data.shuffle)
        self.started: dict[int, _Started] = {}
        self.next_step = first_step

    def start_until(self, step: int) -> None:
        """Start every batch up to that of `step` that has not been started, within the run."""
        while self.next_step <= min(step, self.config.run.steps - 1):
            chosen = [self.examples[index] for index in self.order.indices(self.next_step)]
            first = self.next_step * self.config.data.batch_size
            requests = [training_request(self.config, self.prompts, e, first + index) for index, e in enumerate(chosen)]
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
        samples = self._samples(started.examples, completions)
        self.timeline.add("reward", "rollout", done, time.time(), {"step": step})
        metrics = self._metrics(samples, step, ended - started.at_seconds, done - waited_from)
        return RolloutBatch(samples, metrics, self._lines(started.examples, completions, samples))

    def score(self, groups: list[list[RewardInput]]) -> list[list[float]]:
        """The reward of every response, by prompts."""
        return [[float(self.reward(given)) for given in group] for group in groups]

    def _samples(self, examples: list[Example], completions: list[list[Completion]]) -> list[Sample]:
        limit, answered = self.config.rollout.max_new_tokens, list(zip(examples, completions, strict=True))
        rewards = self.score([[reward_input(self.prompts, example, one, limit) for one in group] for example, group in answered])
        return [
            Sample(
                prompt_ids=self.prompts.prompt_ids(example),
                response_ids=completion.token_ids,
                rollout_log_probs=completion.log_probs,
                weight_versions=completion.weight_versions,
                reward=reward,
                group=group,
            )
            for group, (example, of_prompt) in enumerate(answered)
            for completion, reward in zip(of_prompt, rewards[group], strict=True)
        ]

    def _lines(self, examples: list[Example], completions: list[list[Completion]], samples: list[Sample]) -> list[dict[str, Any]]:
        """Of the first response to each of the first `run.log_samples` prompts."""
        firsts = samples[:: self.config.rollout.group_size]
        chosen = list(zip(examples, completions, firsts, strict=True))[: self.config.run.log_samples]
        return [sample_line(self.prompts, example, group[0], first.reward) for example, group, first in chosen]

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
