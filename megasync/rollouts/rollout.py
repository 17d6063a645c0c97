"""Rollouts: the prompts of a run as groups, their rewards, and batches of samples for the trainer. Rank 0 does it.

Leaves out when groups are generated and which of them make a batch (stream.py, scheduler.py), tokens' log-probs under the trainer
(the engine's) and weight sync (the bridge's).
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from engine.batch.batch import SampleTable
from engine.objective.advantages import overlong_penalty
from engine.sample import Sample
from megasync.data.data import Example
from megasync.episodes.pool import EpisodePool
from megasync.episodes.task import Played
from megasync.rewards.pool import RewardPool, Scored, reward_metrics
from megasync.rollouts.evaluation import Evaluation, Outcome, outcome_of, requests_of
from megasync.rollouts.group import Group, StreamSettings, TieWatch, tied_fraction
from megasync.rollouts.progress import Progress
from megasync.rollouts.records import Records
from megasync.rollouts.requests import (
    begins_thinking,
    request_digest,
    reward_digest,
    reward_inputs,
    sample_line,
    task_of,
    token_fields,
    training_request,
)
from megasync.rollouts.stream import RolloutStream
from megasync.rollouts.turns import episode_identity, episode_metrics, episode_samples, episode_settings, members_of

if TYPE_CHECKING:
    from bridge.generation import Completion
    from bridge.replicas.pool import ReplicaPool
    from megasync.config.schema import Config
    from megasync.data.load import RunData
    from megasync.reporting.log import RunLog


@dataclass
class RolloutBatch:
    """The samples of one step, and what their generation took."""

    samples: SampleTable
    metrics: dict[str, float] = field(default_factory=dict)
    lines: list[dict[str, Any]] = field(default_factory=list)  # for samples.jsonl; rank 0's


def without_tokens(batch: RolloutBatch | None) -> RolloutBatch | None:
    """What all ranks get to know of a batch."""
    return None if batch is None else RolloutBatch(batch.samples.only([]), batch.metrics)


class Rollouts:
    """Rank 0's side of a run's stream. `close` ends its thread and the rewards' processes."""

    def __init__(
        self, config: Config, pool: ReplicaPool, data: RunData, rewards: RewardPool, log: RunLog, progress: Progress, step: int
    ) -> None:
        """Go on from `progress` with `step`."""
        self.config, self.prompts, self.examples = config, data.prompts, data.train
        self.rewards, self.timeline, self.note = rewards, log.timeline, log.note
        self.ties = TieWatch(filters_groups=config.algorithm.filter_groups)
        self.order = data.order(config)
        settings = stream_settings(config, scores_groups=rewards.takes_groups)
        self.episodes = EpisodePool(config) if config.rollout.episode else None
        self.identity = episode_identity(config)
        players = (self.episodes, episode_settings(config)) if self.episodes is not None else None
        self.played_by = (self.identity, players[1].max_tokens) if players else ()
        self.stream = RolloutStream(pool, settings, self._group, self._score, log.note, episodes=players)
        has_records = config.rollout.record == "all" or (config.rollout.record == "episodes" and self.episodes is not None)
        self.records = Records(config.run.folder, step)
        self._unrecorded: Sequence[Group] | None = [] if has_records else None  # those of the step that is trained
        self._taken_seconds = 0.0
        self._undecoded: list[npt.NDArray[np.int32]] = []
        self._decoding: asyncio.Future[list[str]]
        self.stream.restore(progress, step)  # what is restored without a reward is scored at once

    def take(self, step: int) -> RolloutBatch | None:
        """Wait for the batch of `step`; its samples, in order of prompts, and metrics. None: too few replicas are left."""
        waited_from = time.time()
        groups = self.stream.take(step)
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
        metrics |= episode_metrics([done for group in groups for done in group.completions if isinstance(done, Played)])
        if self.config.rollout.max_staleness:
            metrics["rollout/lead_batches"] = self.stream.lead.batches
        if self.config.algorithm.filter_groups:
            metrics["rollout/filtered_groups"] = self.stream.num_filtered
        return RolloutBatch(SampleTable.from_samples(samples), metrics, self._lines(groups))

    def record(self, step: int) -> None:
        """What was taken last is trained, as step `step`, counted from 1.

        Raises:
            OSError: the record of the step before it could not be written.
        """
        if self._unrecorded:
            self.records.write(step, self._unrecorded, {"episode": self.identity, "version": step - 1})
            self._unrecorded = []

    def progress(self) -> Progress:
        """What a run that is resumed here needs to know; the records are on the disk. Raises as `record` does."""
        self.records.wait()
        return replace(self.stream.progress(), order=self.order)

    def begun(self) -> Progress:
        """As `progress`, without the samples that have ended: their groups begin anew."""
        self.records.wait()
        return replace(self.stream.begun(), order=self.order)

    def evaluate(self, evaluation: Evaluation) -> Outcome | None:
        """Generate, reward, and count. None: too few replicas are left."""
        requests = requests_of(evaluation, self.prompts, self.config.run.seed)
        pairs = zip(evaluation.examples, requests, strict=True) if self.episodes is not None else ()
        completions = self.stream.generate(requests, [task_of(self.prompts, *pair) for pair in pairs])
        if completions is None:
            return None
        limit = evaluation.sampling.max_new_tokens
        rewards = self.stream.run(self._score_all(evaluation.examples, completions, limit))
        return outcome_of(evaluation, self.prompts, completions, rewards, self.config.run.log_samples)

    def _ties(self, step: int, samples: list[Sample]) -> dict[str, float]:
        """Of rewards with their penalties; a note where nothing is learnt for a while."""
        rewards = learnt_rewards(self.config, samples)
        fraction = tied_fraction(rewards)
        if hint := self.ties.look(step + 1, fraction, [reward for of_group in rewards for reward in of_group]):
            self.note(hint)
        return {"groups/tied_fraction": fraction}

    def close(self) -> None:
        self.stream.close()
        if self.episodes is not None:
            self.episodes.close()
        self.rewards.close()
        self.records.close()

    def _example(self, ordinal: int) -> Example:
        return self.examples[self.order.index(ordinal)]

    def _group(self, ordinal: int) -> Group:
        example = self._example(ordinal)
        request = training_request(self.config, self.prompts, example, ordinal)
        returns_experts = self.config.algorithm.router_replay == "rollout"
        task = task_of(self.prompts, example, request) if self.episodes is not None else None
        asked = request_digest(request, returns_experts=returns_experts, task=task, played_by=self.played_by)
        return Group(ordinal, request, asked, reward_digest(example, self.rewards, request.num_samples), task=task)

    async def _score(self, group: Group, samples: Sequence[int]) -> list[Scored]:
        done = [completion for sample in samples if (completion := group.completions[sample]) is not None]
        return await self._scored(self._example(group.key), done, self.config.rollout.max_new_tokens)

    async def _scored(self, example: Example, done: Sequence[Completion | Played], limit: int) -> list[Scored]:
        """What an episode said it was worth, else what `rollout.reward` says of its last turn."""
        asked = [one for one in done if not isinstance(one, Played) or one.reward is None]
        found = iter(await self._by_rewards(example, asked, limit) if asked else [])
        return [Scored(one.reward, {}) if isinstance(one, Played) and one.reward is not None else next(found) for one in done]

    async def _by_rewards(self, example: Example, done: Sequence[Completion | Played], limit: int) -> list[Scored]:
        ids = [np.array(one.final_ids, np.int32) if isinstance(one, Played) else one.token_ids for one in done]
        thinking = begins_thinking(self.prompts, example)
        return await self.rewards.score_group(reward_inputs(example, done, await self._texts(ids), limit, thinking=thinking))

    async def _texts(self, responses: Sequence[npt.NDArray[np.int32]]) -> list[str]:
        """What is asked for before the loop comes round is decoded together, in one thread."""
        if not self._undecoded:
            self._decoding = asyncio.ensure_future(self._decode())
        place = len(self._undecoded)
        self._undecoded += responses
        return (await self._decoding)[place : place + len(responses)]

    async def _decode(self) -> list[str]:
        responses, self._undecoded = self._undecoded, []
        return await asyncio.to_thread(self.prompts.texts, responses)

    async def _score_all(
        self, examples: Sequence[Example], groups: Sequence[Sequence[Completion | Played]], limit: int
    ) -> list[list[float]]:
        pairs = zip(examples, groups, strict=True)
        scored = await asyncio.gather(*(self._scored(example, group, limit) for example, group in pairs))
        return [[each.total for each in group] for group in scored]

    def _lines(self, groups: list[Group]) -> list[dict[str, Any]]:
        """Of the first response to each of the first `run.log_samples` prompts."""
        firsts = [(group.key, group.completions[0], group.rewards[0]) for group in groups[: self.config.run.log_samples]]
        return [
            sample_line(self.prompts, self._example(key), done, reward)
            | penalty_fields(self.config, done.num_sampled if isinstance(done, Played) else len(done.token_ids))
            | token_fields(self.prompts, done)
            for key, done, reward in firsts
            if done and reward is not None
        ]


def samples_of(group: Group, place: int) -> list[Sample]:
    """What the trainer gets of a group that is done; `place` is its place in the batch."""
    prompt_ids, found = np.array(group.request.prompt_ids, np.int32), list[Sample]()
    for member, (done, reward) in enumerate(zip(group.completions, group.rewards, strict=True)):
        if done is None or reward is None:
            continue
        if isinstance(done, Played):
            found += episode_samples(done, prompt_ids, reward, place, member)
            continue
        found.append(
            Sample(
                prompt_ids=prompt_ids,
                response_ids=done.token_ids,
                rollout_log_probs=done.log_probs,
                weight_versions=done.weight_versions,
                routed_experts=done.routed_experts,
                reward=reward,
                group=place,
                member=member,
                finish_reason=done.finish_reason,
            )
        )
    return found


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


def penalty_fields(config: Config, num_tokens: int) -> dict[str, float]:
    """What `algorithm.truncated = penalise` adds to the reward of a response of so many tokens, -1 to 0; {} without it."""
    if config.algorithm.truncated != "penalise":
        return {}
    return {"penalty": overlong_penalty(num_tokens, config.rollout.max_sampled_tokens, config.algorithm.overlong_buffer)}


def learnt_rewards(config: Config, samples: Sequence[Sample]) -> list[list[float]]:
    """Of each group, with their penalties: what advantages are made of."""
    groups: dict[int, list[float]] = {}
    for member in members_of(samples):
        penalty = penalty_fields(config, sum(one.num_sampled for one in member)).get("penalty", 0.0)
        groups.setdefault(member[0].group, []).append(member[0].reward + penalty)
    return list(groups.values())


def penalty_metrics(config: Config, lengths: Sequence[int]) -> dict[str, float]:
    """The mean penalty; `reward/mean` is without it."""
    penalties = [penalty for length in lengths for penalty in penalty_fields(config, length).values()]
    return {"reward/penalty_mean": statistics.fmean(penalties)} if penalties else {}


def batch_metrics(samples: list[Sample], step: int, seconds: float, waited_seconds: float) -> dict[str, float]:
    """Rewards, lengths and staleness of a batch whose generation took `seconds`, of which training waited for a part."""
    tokens = sum(sample.num_sampled for sample in samples)
    own = [sample.weight_versions[sample.is_sampled] if len(sample.is_sampled) else sample.weight_versions for sample in samples]
    versions = sum(int(each.sum(dtype=np.int64)) for each in own)
    oldest = min(int(each.min(initial=step)) for each in own)
    firsts = [member[0] for member in members_of(samples)]
    rewards = [sample.reward for sample in firsts]
    return {
        "reward/mean": statistics.fmean(rewards),
        "reward/std": statistics.pstdev(rewards),
        "response/tokens_mean": tokens / len(firsts),
        "response/truncated_fraction": statistics.fmean(sample.finish_reason == "length" for sample in firsts),
        "staleness/mean": (step * tokens - versions) / max(tokens, 1),
        "staleness/max": step - oldest,
        "rollout/seconds": seconds,
        "rollout/wait_seconds": waited_seconds,
        "rollout/tokens_per_second": tokens / max(seconds, 1e-9),
    }
