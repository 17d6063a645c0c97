"""Rollouts: the prompts of a run as groups, their rewards, and batches of samples for the trainer. Rank 0 does it.

Leaves out when groups are generated and which of them make a batch (stream.py, scheduler.py), tokens' log-probs under the trainer
(the engine's) and weight sync (the bridge's).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from bridge.generation import Completion
from engine.algorithm import GROUPED
from engine.batch.batch import SampleTable
from engine.config import is_own
from engine.sample import Sample
from megasync.data.data import Example
from megasync.data.sampler import SampledOrder
from megasync.episodes.pool import EpisodePool
from megasync.episodes.task import EpisodeResult
from megasync.rewards.judges.judge import NO_JUDGES, Judges
from megasync.rewards.pool import RewardPool, Scored, reward_metrics
from megasync.rollouts.evaluation import Evaluation, Outcome, outcome_of, requests_of
from megasync.rollouts.filters import filter_input, resolve_filter
from megasync.rollouts.group import Group, StreamSettings
from megasync.rollouts.metrics import (
    UniformRewardMonitor,
    batch_metrics,
    episode_metrics,
    learnt_rewards,
    penalty_fields,
    penalty_metrics,
    source_metrics,
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
    from megasync.rollouts.teachers import Teachers
    from megasync.served.protocol import ServedModel


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

    def __init__(
        self,
        config: Config,
        pool: ReplicaPool,
        data: RunData,
        log: RunLog,
        progress: Progress,
        step: int,
        teachers: Teachers | None = None,
        judges: Mapping[str, ServedModel] = NO_JUDGES,
    ) -> None:
        """Continue from `progress` with `step`. `teachers`: teachers that are asked here. `judges`: on replicas, by name."""
        self.config, self.data, self.prompts = config, data, data.prompts
        self.rewards = RewardPool(config.rollout, Judges(config.judges, judges, config.run.folder))
        self.timeline, self.note = log.timeline, log.note
        needs_parts = config.algorithm.advantage == "gdpo" or is_own(config.algorithm.advantage)
        self.part_names = tuple(self.rewards.weights) if needs_parts else ()
        self.ties = UniformRewardMonitor(filters_groups=config.algorithm.filter_groups)
        self.scorer, self.teachers = Scorer(data.prompts, self.rewards), teachers
        self.order = data.order(config)
        self.sampled = SampledOrder(config.data, data.train, config.run.seed) if config.data.sampler else None
        if self.sampled is not None and (found := self.sampled.restore(progress.sampler)) and progress.num_trained:
            log.note(found)
        settings = stream_settings(config, scores_groups=self.rewards.takes_groups)
        self.episodes = EpisodePool(config) if config.rollout.episode else None
        self.identity = episode_identity(config)
        players = (self.episodes, episode_settings(config)) if self.episodes is not None else None
        self.played_by = (self.identity, players[1].max_tokens) if players else ()
        self.filter = resolve_filter(config.rollout.filter) if config.rollout.filter else None
        of_groups = (self._group, self._score)
        self.stream = RolloutStream(
            pool, settings, *of_groups, log.note, episodes=players, is_worth_training=self._is_worth_training
        )
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
        kept = [(place, group) for place, group in enumerate(groups) if not group.is_refused]
        samples = [sample for place, group in kept for sample in samples_of(group, place)] or [_nothing(groups[0])]
        seconds = ended - begun if begun >= self._taken_seconds else done - self._taken_seconds
        self._taken_seconds = done
        metrics = batch_metrics(samples, step, seconds, done - waited_from)
        scored = [one for group in groups for one in group.scored[group.num_greedy :]]
        metrics |= reward_metrics([one for one in scored if one is not None])
        metrics |= self.rewards.judges.metrics()
        metrics |= penalty_metrics(self.config, [sum(one.num_sampled for one in member) for member in members_of(samples)])
        metrics |= self._ties(step, samples)
        metrics |= episode_metrics([done for group in groups for done in group.completions if isinstance(done, EpisodeResult)])
        if self.teachers is not None:
            metrics |= self.teachers.metrics()
        if self.config.rollout.max_staleness:
            metrics["rollout/lead_batches"] = self.stream.lead.batches
        num_aborted, num_filtered = self.stream.take_counts()
        if self.config.rollout.oversample > 1:
            metrics["rollout/aborted_groups"] = num_aborted
        if self.stream.settings.filters_groups:
            metrics["rollout/filtered_groups"] = num_filtered
        metrics |= source_metrics([(self._example(group.key).source, group.own_rewards) for group in groups])
        table, lines = SampleTable.from_samples(samples), self._lines(groups)
        self.stream.run(self._observe(step + 1, groups))
        return RolloutBatch(table, table, metrics, lines)

    async def _observe(self, step: int, groups: Sequence[Group]) -> None:
        """The sampler hears of the rewards of groups that are taken, and of those that were discarded before them."""
        if self.sampled is not None:
            self.sampled.observe(step, [(group.key, group.own_rewards) for group in (*groups, *self.stream.discarded)])

    def record(self, step: int) -> None:
        """The batch that was taken last is trained, as step `step`, counted from 1.

        Raises:
            OSError: the record of the step before it could not be written.
        """
        self.stream.mark_trained()
        if self._unrecorded:
            self.records.write(step, self._unrecorded, {"episode": self.identity, "version": step - 1})
            self._unrecorded = []

    def progress(self, *, with_samples: bool = True) -> Progress:
        """For a run that resumes here; the records are on the disk. Raises as `record` does.

        Without samples the groups that have begun start again.
        """
        self.records.wait()
        return self.stream.run(self._progress(with_samples=with_samples))

    async def _progress(self, *, with_samples: bool) -> Progress:
        """All of one moment, in which no prompt begins."""
        progress = await self.stream.progress(with_samples=with_samples)
        return replace(progress, order=self.order, sampler=self.sampled.state() if self.sampled is not None else "")

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
        """The share of groups with equal rewards, penalties included; notes where nothing is learnt for a while."""
        rewards = learnt_rewards(self.config, samples)
        fraction = tied_fraction(rewards)
        hint = self.ties.observe(step + 1, fraction, [total for of_group in rewards for total, *_ in of_group])
        if hint and self.config.algorithm.advantage in GROUPED:
            self.note(hint)
        return {"groups/tied_fraction": fraction}

    def close(self) -> None:
        """Ends every part, also where another part's end fails; that error is raised then. Safe to repeat."""
        with ExitStack() as ends:
            ends.callback(self.records.close)
            ends.callback(self.rewards.close)
            if self.episodes is not None:
                ends.callback(self.episodes.close)
            ends.callback(self.stream.close, self._close_served)

    async def _close_served(self) -> None:
        """Once no sample is scored any more, which could open a judge again."""
        async with AsyncExitStack() as ends:
            ends.push_async_callback(self.rewards.judges.close)
            if self.teachers is not None:
                ends.push_async_callback(self.teachers.close)

    def _example(self, ordinal: int) -> Example:
        return self.data.train[(self.sampled or self.order).index(ordinal)]

    def _group(self, ordinal: int) -> Group:
        example = self._example(ordinal)
        request = training_request(self.config, self.prompts, example, ordinal)
        algorithm = self.config.algorithm
        returned = {"returns_experts": algorithm.router_replay == "rollout", "returns_support": algorithm.support_replay}
        task = task_of(self.prompts, example, request) if self.episodes is not None else None
        asked = request_digest(request, **returned, task=task, played_by=self.played_by)
        scored_by = reward_digest(example, self.rewards, request.num_samples)
        own: dict[str, Any] = {"part_names": self.part_names, "has_teacher": self.teachers is not None}
        own["credits_turns"] = algorithm.credit == "turn"
        return Group(ordinal, request, asked, scored_by, task=task, **own)

    def _is_worth_training(self, group: Group) -> bool:
        """By the filters that the config has: a named one, and the user's own."""
        if self.config.algorithm.filter_groups and not group.is_worth_training:
            return False
        group.is_refused = self.filter is not None and not self.filter(filter_input(group, self._example(group.key)))
        return not group.is_refused

    async def _score(self, group: Group, samples: Sequence[int]) -> list[Scored]:
        """Rewards, and a teacher's scores; only these where the reward is known from a checkpoint."""
        example, limit = self._example(group.key), self.config.rollout.max_new_tokens
        known = all(sample in group.rewarded for sample in samples)
        unknown = [sample for sample in samples if sample not in group.rewarded or (self.rewards.takes_groups and not known)]
        rewards = self.scorer.score(example, _completions(group, unknown), limit)
        if self.teachers is None:
            return await rewards
        done = _completions(group, samples)
        new, scores = await asyncio.gather(rewards, self.teachers.score(example.source, group.request.prompt_ids, done))
        scored = {**group.rewarded, **dict(zip(unknown, new, strict=True))}
        return [replace(scored[sample], teacher=own) for sample, own in zip(samples, scores, strict=True)]

    def _lines(self, groups: list[Group]) -> list[dict[str, Any]]:
        """Log lines of the first response to each of the first `run.log_samples` prompts."""
        chosen = [(group, group.num_greedy) for group in groups[: self.config.run.log_samples]]
        firsts = [(group.key, group.completions[first], group.rewards[first]) for group, first in chosen]
        return [
            sample_line(self.prompts, self._example(key), done, reward)
            | penalty_fields(self.config, done.num_sampled if isinstance(done, EpisodeResult) else len(done.token_ids))
            | token_fields(self.prompts, done)
            for key, done, reward in firsts
            if done and reward is not None
        ]


def _completions(group: Group, samples: Sequence[int]) -> list[Completion | EpisodeResult]:
    return [done for sample in samples if (done := group.completions[sample]) is not None]


def _nothing(group: Group) -> Sample:
    """The sample of a batch whose episodes were all dropped, or groups refused: no token is trained."""
    return Sample(np.array(group.request.prompt_ids, np.int32), np.empty(0, np.int32), turn_returns=(0.0,))


def stream_settings(config: Config, *, scores_groups: bool) -> StreamSettings:
    """With no staleness a batch is handed out whole, so that its contents do not depend on the order of completion."""
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
        filters_groups=config.algorithm.filter_groups or bool(config.rollout.filter),
        filter_factor=config.algorithm.filter_factor,
        oversample=rollout.oversample,
    )
