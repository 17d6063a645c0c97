"""Rollouts: the prompts of a run as groups, their rewards, and batches of samples for the trainer. Rank 0 does it.

Leaves out when groups are generated and which of them make a batch (stream.py, scheduler.py), tokens' log-probs under the trainer
(the engine's) and weight sync (the bridge's).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.batch.batch import SampleTable
from engine.sample import Sample
from megasync.data.data import Example
from megasync.episodes.pool import EpisodePool
from megasync.episodes.task import EpisodeResult
from megasync.rewards.pool import RewardPool, Scored, reward_metrics
from megasync.rollouts.evaluation import Evaluation, Outcome, outcome_of, requests_of
from megasync.rollouts.group import Group, StreamSettings
from megasync.rollouts.metrics import (
    UniformRewardMonitor,
    batch_metrics,
    episode_metrics,
    learnt_rewards,
    penalty_fields,
    penalty_metrics,
    tied_fraction,
)
from megasync.rollouts.progress import Progress
from megasync.rollouts.records import Records
from megasync.rollouts.requests import request_digest, reward_digest, sample_line, task_of, token_fields, training_request
from megasync.rollouts.samples import members_of, samples_of
from megasync.rollouts.scoring import Scorer
from megasync.rollouts.stream import RolloutStream
from megasync.rollouts.turns import episode_identity, episode_settings

if TYPE_CHECKING:
    from bridge.replicas.pool import ReplicaPool
    from megasync.config.schema import Config
    from megasync.data.load import RunData
    from megasync.report.log import RunLog


@dataclass
class RolloutBatch:
    """The samples of one step, with metrics of their generation."""

    samples: SampleTable  # with the tokens that this rank trains on
    generated: SampleTable  # on rank 0 with all tokens
    metrics: dict[str, float] = field(default_factory=dict)
    lines: list[dict[str, Any]] = field(default_factory=list)  # for samples.jsonl; rank 0's


def without_tokens(batch: RolloutBatch | None) -> RolloutBatch | None:
    """For the other ranks."""
    if batch is None:
        return None
    table = batch.samples.only([])
    return RolloutBatch(table, table, batch.metrics)


class Rollouts:
    """Rank 0's side of a run's stream. `close` ends its thread and the rewards' processes."""

    def __init__(self, config: Config, pool: ReplicaPool, data: RunData, log: RunLog, progress: Progress, step: int) -> None:
        """Continue from `progress` with `step`."""
        self.config, self.data, self.prompts = config, data, data.prompts
        self.rewards, self.timeline, self.note = RewardPool(config.rollout), log.timeline, log.note
        self.ties = UniformRewardMonitor(filters_groups=config.algorithm.filter_groups)
        self.scorer = Scorer(data.prompts, self.rewards)
        self.order = data.order(config)
        settings = stream_settings(config, scores_groups=self.rewards.takes_groups)
        self.episodes = EpisodePool(config) if config.rollout.episode else None
        self.identity = episode_identity(config)
        players = (self.episodes, episode_settings(config)) if self.episodes is not None else None
        self.played_by = (self.identity, players[1].max_tokens) if players else ()
        self.stream = RolloutStream(pool, settings, self._group, self._score, log.note, episodes=players)
        has_records = config.rollout.record == "all" or (config.rollout.record == "episodes" and self.episodes is not None)
        self.records = Records(config.run.folder, step)
        self._unrecorded: Sequence[Group] | None = [] if has_records else None  # those of the step that is trained
        self._taken_seconds = 0.0
        self.stream.run(self.stream.restore(progress, step))  # restored samples without a reward are scored at once

    def serve(self, version: int) -> None:
        """The replicas serve `version` from now on."""
        self.stream.run(self.stream.serve(version))

    def admit(self, step: int) -> None:
        """Let the groups begin that `step`, which is trained next, and `rollout.max_staleness` make room for."""
        self.stream.run(self.stream.admit(step))

    def release_idle(self) -> set[int]:
        """Forget leaving replicas that have nothing to do; returns the leaving ones that still work."""
        return self.stream.run(self.stream.release_idle())

    def take(self, step: int) -> RolloutBatch | None:
        """Wait for the batch of `step`; its samples, in order of prompts, and metrics. None: too few replicas are left."""
        waited_from = time.time()
        groups = self.stream.run(self.stream.take(step))
        if groups is None:
            return None
        self._unrecorded = groups if self._unrecorded is not None else None
        done = time.time()
        begun, ended = min(group.begun_seconds for group in groups), max(group.ended_seconds for group in groups)
        self.timeline.add("rollout", "rollout", begun, ended, {"step": step + 1})
        if done - waited_from > 1e-3:
            self.timeline.add("wait for rollout", "trainer", waited_from, done, {"step": step + 1})
        samples = [sample for place, group in enumerate(groups) for sample in samples_of(group, place)] or [_nothing(groups[0])]
        seconds = ended - begun if begun >= self._taken_seconds else done - self._taken_seconds
        self._taken_seconds = done
        metrics = batch_metrics(samples, step, seconds, done - waited_from)
        metrics |= reward_metrics([scored for group in groups for scored in group.scored if scored is not None])
        metrics |= penalty_metrics(self.config, [sum(one.num_sampled for one in member) for member in members_of(samples)])
        metrics |= self._ties(step, samples)
        metrics |= episode_metrics([done for group in groups for done in group.completions if isinstance(done, EpisodeResult)])
        if self.config.rollout.max_staleness:
            metrics["rollout/lead_batches"] = self.stream.lead.batches
        if self.config.algorithm.filter_groups:
            metrics["rollout/filtered_groups"] = self.stream.num_filtered
        table = SampleTable.from_samples(samples)
        return RolloutBatch(table, table, metrics, self._lines(groups))

    def record(self, step: int) -> None:
        """The batch that was taken last is trained, as step `step`, counted from 1.

        Raises:
            OSError: the record of the step before it could not be written.
        """
        if self._unrecorded:
            self.records.write(step, self._unrecorded, {"episode": self.identity, "version": step - 1})
            self._unrecorded = []

    def progress(self, *, with_samples: bool = True) -> Progress:
        """For a run that resumes here; the records are on the disk. Raises as `record` does.

        Without samples the groups that have begun start again.
        """
        self.records.wait()
        return replace(self.stream.run(self.stream.progress(with_samples=with_samples)), order=self.order)

    def evaluate(self, evaluation: Evaluation) -> Outcome | None:
        """Generate, reward, and count. None: too few replicas are left."""
        requests = requests_of(evaluation, self.prompts, self.config.run.seed)
        pairs = zip(evaluation.examples, requests, strict=True) if self.episodes is not None else ()
        tasks = [task_of(self.prompts, *pair) for pair in pairs]
        completions = self.stream.run(self.stream.generate(requests, tasks))
        if completions is None:
            return None
        limit = evaluation.sampling.max_new_tokens
        rewards = self.stream.run(self.scorer.totals(evaluation.examples, completions, limit))
        return outcome_of(evaluation, self.prompts, completions, rewards, self.config.run.log_samples)

    def _ties(self, step: int, samples: list[Sample]) -> dict[str, float]:
        """Of rewards with their penalties; a note where nothing is learnt for a while."""
        rewards = learnt_rewards(self.config, samples)
        fraction = tied_fraction(rewards)
        if hint := self.ties.observe(step + 1, fraction, [reward for of_group in rewards for reward in of_group]):
            self.note(hint)
        return {"groups/tied_fraction": fraction}

    def close(self) -> None:
        self.stream.close()
        if self.episodes is not None:
            self.episodes.close()
        self.rewards.close()
        self.records.close()

    def _example(self, ordinal: int) -> Example:
        return self.data.train[self.order.index(ordinal)]

    def _group(self, ordinal: int) -> Group:
        example = self._example(ordinal)
        request = training_request(self.config, self.prompts, example, ordinal)
        returns_experts = self.config.algorithm.router_replay == "rollout"
        task = task_of(self.prompts, example, request) if self.episodes is not None else None
        asked = request_digest(request, returns_experts=returns_experts, task=task, played_by=self.played_by)
        return Group(ordinal, request, asked, reward_digest(example, self.rewards, request.num_samples), task=task)

    async def _score(self, group: Group, samples: Sequence[int]) -> list[Scored]:
        done = [completion for sample in samples if (completion := group.completions[sample]) is not None]
        return await self.scorer.score(self._example(group.key), done, self.config.rollout.max_new_tokens)

    def _lines(self, groups: list[Group]) -> list[dict[str, Any]]:
        """Of the first response to each of the first `run.log_samples` prompts."""
        firsts = [(group.key, group.completions[0], group.rewards[0]) for group in groups[: self.config.run.log_samples]]
        return [
            sample_line(self.prompts, self._example(key), done, reward)
            | penalty_fields(self.config, done.num_sampled if isinstance(done, EpisodeResult) else len(done.token_ids))
            | token_fields(self.prompts, done)
            for key, done, reward in firsts
            if done and reward is not None
        ]


def _nothing(group: Group) -> Sample:
    """Of a batch all of whose episodes were dropped: no token is trained."""
    return Sample(np.array(group.request.prompt_ids, np.int32), np.empty(0, np.int32))


def stream_settings(config: Config, *, scores_groups: bool) -> StreamSettings:
    """With no staleness a batch is handed out whole, so that what is generated does not depend on who is done first."""
    rollout = config.rollout
    return StreamSettings(
        max_staleness=rollout.max_staleness,
        batch_size=config.data.batch_size,
        num_steps=config.run.steps,
        slots=rollout.max_num_seqs + rollout.group_size if rollout.max_staleness else None,
        expected_tokens=rollout.max_new_tokens / 2,
        answer_seconds=rollout.answer_timeout_seconds,
        min_replicas=rollout.min_replicas,
        scores_groups=scores_groups,
        filters_groups=config.algorithm.filter_groups,
        filter_factor=config.algorithm.filter_factor,
    )
