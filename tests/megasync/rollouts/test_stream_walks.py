"""Random walks of the stream of rollouts in virtual time: filters, lost replicas, broken syncs, evaluations, resumption.

Whatever happens no step waits for ever, no prompt is lost or trained twice, and no load stays with a replica.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from hypothesis import given, settings
from hypothesis import strategies as st

from bridge.generation import Completion, GenerationRequest, GroupRequest
from megasync.episodes.task import EpisodeResult, Task
from megasync.rollouts.group import Group, StreamSettings, oldest_of
from megasync.rollouts.progress import Progress, SavedGroup
from megasync.rewards.pool import Scored
from megasync.rollouts.stream import RolloutStream
from megasync.rollouts.turns import EpisodeSettings, Player
from tests.megasync.rollouts.stream_model import START_SECONDS, ModelPool

LIMIT_SECONDS = 5000.0  # of virtual time; a walk takes a few hundred
LONGEST = 30


@dataclass(frozen=True)
class Ways:
    """The settings of a process of a run, and what its prompts and rewards depend on."""

    settings: StreamSettings
    group_size: int
    first_other: int  # from this ordinal on the data is another
    data: int
    reward: int
    share_equal: float  # of prompts that get equal rewards

    def prompt(self, ordinal: int) -> int:
        return ordinal + (1000 * self.data if ordinal >= self.first_other else 0)

    def rewards(self, prompt: int) -> list[float]:
        chance = random.Random(f"{prompt} {self.reward}")
        equal = chance.random() < self.share_equal
        return [1.0 if equal else float(sample % 2) + self.reward for sample in range(self.group_size)]


@dataclass
class Walk:
    """A run, process by process. What was trained is what the steps up to the last checkpoint took."""

    source: random.Random
    trained: list[tuple[int, int]] = field(default_factory=list)  # ordinal and step
    progress: Progress = field(default_factory=lambda: Progress(0))
    step: int = 0
    notes: list[str] = field(default_factory=list)

    def process(self, ways: Ways, last_step: int) -> None:
        """Train from `step` to `last_step`; a checkpoint somewhere on the way, from which the next one resumes."""
        source, num_replicas = self.source, self.source.randint(1, 3)
        own = replace(ways.settings, min_replicas=source.randint(1, num_replicas), scores_groups=source.random() < 0.3)
        pool = ModelPool(num_replicas, self._length, max_num_seqs=source.choice((2, 8, 1000)), step_seconds=0.1)
        request = GenerationRequest((0,), num_samples=ways.group_size)

        def make_group(ordinal: int) -> Group:
            prompt = ways.prompt(ordinal)
            asked = replace(request, prompt_ids=(prompt,))
            return Group(ordinal, asked, prompt, ways.reward, task=Task(str(prompt), (prompt,), ""))

        async def score(group: Group, samples: Sequence[int]) -> list[Scored]:
            await asyncio.sleep(source.choice((0.0, 0.0, 0.5)))
            rewards = ways.rewards(group.request.prompt_ids[0])
            return [Scored(rewards[sample], {}) for sample in samples]

        episodes = self.episodes(ways)
        stream = RolloutStream(cast(Any, pool), own, make_group, score, self.notes.append, pool.loop, episodes)
        try:
            stream.run(stream.restore(self.progress, self.step))
            stream.run(asyncio.wait_for(self._train(stream, pool, ways, last_step), LIMIT_SECONDS))
        finally:
            stream.close()

    def _length(self, group: GroupRequest, sample: int) -> int:
        return self.source.choice((1, 3, LONGEST))

    async def _train(self, stream: RolloutStream, pool: ModelPool, ways: Ways, last_step: int) -> None:
        own, source, taken = ways.settings, self.source, list(self.trained)
        checkpoint = source.randint(self.step + 1, last_step)
        if last_step == own.num_steps:
            checkpoint = last_step
        await self._publish(stream, pool, self.step)
        for step in range(self.step, last_step):
            await stream.admit(step)
            self._disturb(pool)
            while (groups := await stream.take(step)) is None:
                await self._publish(stream, pool, step)
            self._check(groups, ways, step, stream.take_counts()[1])
            assert stream.take_counts() == (0, 0), "each is counted once"
            if step + 1 == checkpoint < own.num_steps and source.random() < 0.3:  # an error before the batch is trained
                self.progress, self.step, self.trained = await stream.progress(), step, list(taken)
                checkpoint = 0
            stream.mark_trained()
            taken += [(group.key, step) for group in groups]
            await asyncio.sleep(source.choice((0.01, 1.0, 20.0)))
            await self._publish(stream, pool, step + 1)
            while source.random() < 0.2 and await self._evaluate(stream) is None:
                await self._publish(stream, pool, step + 1)
            if step + 1 == checkpoint:
                self.progress, self.step, self.trained = await stream.progress(), step + 1, list(taken)
                if source.random() < 0.3:  # of what was generated and not trained nothing was kept
                    kept = tuple(SavedGroup(group.key) for group in self.progress.groups)
                    self.progress = replace(self.progress, groups=kept)
        while stream._is_busy:
            await self._publish(stream, pool, last_step)
            await asyncio.sleep(1.0)
        for slot in stream.dispatcher.slots.values():
            assert slot.load.samples == 0 and abs(slot.load.tokens) < 1e-6

    async def _publish(self, stream: RolloutStream, pool: ModelPool, version: int) -> None:
        if self.source.random() < 0.2:  # it breaks off at one of them, and works the next time
            self.source.choice(list(pool.replicas.values())).is_open = False
            await asyncio.sleep(0.3)
        await self._scale(stream, pool)
        there = sorted(pool.replicas.keys() - pool.gone)
        absent = {replica for replica in there if self.source.random() < (0.5 if replica in pool.lost else 0.1)}
        while len(pool.wanted - absent - pool.starting) < stream.settings.min_replicas:
            absent = set()
            await asyncio.sleep(START_SECONDS)  # they are waited for
        pool.sync(version, absent | pool.starting)
        await stream.serve(version)

    async def _scale(self, stream: RolloutStream, pool: ModelPool) -> None:
        """Now and then there are to be others, or more or fewer; who is to leave goes once it has nothing to do."""
        if self.source.random() < 0.2:
            count = self.source.randint(stream.settings.min_replicas, stream.settings.min_replicas + 2)
            pool.scale(self.source.sample(range(count + 1), count))
        busy = await stream.release_idle()
        assert busy <= pool.leaving | pool.lost
        pool.dismiss(pool.leaving - busy)

    def _disturb(self, pool: ModelPool) -> None:
        if self.source.random() < 0.3:
            pool.loop.call_later(self.source.choice((0.0, 0.05, 1.0)), pool.kill, self.source.choice(list(pool.replicas)))

    def episodes(self, ways: Ways) -> tuple[Player, EpisodeSettings] | None:
        """Who plays those of the groups' members."""
        return None

    async def _evaluate(self, stream: RolloutStream) -> object:
        requests = [GenerationRequest((7,), num_samples=2)] * self.source.randint(1, 5)
        answered = await stream.generate(requests, [Task("7", (7,), "")] * len(requests))
        assert answered is None or [len(samples) for samples in answered] == [2] * len(requests)
        return answered

    def _check(self, groups: list[Group], ways: Ways, step: int, num_discarded: int) -> None:
        """`num_discarded`: groups with equal rewards since the batch before; others replace them, as far as they may."""
        own = ways.settings
        num_missing = own.batch_size - sum(len(set(group.rewards)) > 1 or not own.filters_groups for group in groups)
        assert len(groups) <= own.batch_size and num_missing <= max(0, num_discarded - (own.filter_factor - 1) * own.batch_size)
        for group in groups:
            prompt = ways.prompt(group.key)
            assert group.rewards == ways.rewards(prompt)
            for completion in group.completions:
                assert completion is not None
                self._check_sample(completion, prompt)
                oldest = oldest_of(completion)
                assert oldest is None or 0 <= step - oldest <= own.max_staleness

    def _check_sample(self, completion: Completion | EpisodeResult, prompt: int) -> None:
        assert isinstance(completion, Completion) and completion.token_ids[0] == prompt


def random_ways(
    source: random.Random, num_steps: int, former: Ways | None, share_equal: float, *, changes: bool, oversamples: bool = True
) -> Ways:
    slots = source.choice((None, 3, 12, 40))
    staleness, batch_size, group_size = source.choice((0, 1, 1, 2, 4)), source.randint(1, 8), source.randint(1, 4)
    if former is not None and not changes:
        staleness, batch_size = former.settings.max_staleness, former.settings.batch_size
    own = StreamSettings(staleness, batch_size, num_steps, slots, 5.0, 60.0)
    own = replace(own, filters_groups=share_equal > 0, filter_factor=source.randint(1, 3))
    own = replace(own, oversample=source.choice((1.0, 1.3, 2.0)) if oversamples and not staleness else 1.0)
    data = (0, 0, 0) if former is None else (former.first_other, former.data, former.reward)
    if changes and source.random() < 0.5:
        data = (source.randint(0, 40), source.randint(0, 9), source.randint(0, 1))
    return Ways(own, group_size, *data, share_equal)


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 2**32 - 1), filters=st.booleans(), changes=st.sampled_from((True, True, False)))
def test_a_walk_loses_nothing_and_comes_to_its_end(seed: int, filters: bool, changes: bool) -> None:
    """`changes`: batch size, staleness, data and reward are others at a resume."""
    source = random.Random(seed)
    num_steps, share_equal = source.randint(1, 10), source.choice((0.2, 0.6, 1.0)) if filters else 0.0
    walk, ways = Walk(source), None
    while walk.step < num_steps:
        ways = random_ways(source, num_steps, ways, share_equal, changes=changes)
        walk.process(ways, source.choice((num_steps, source.randint(walk.step + 1, num_steps))))
    ordinals = [ordinal for ordinal, _ in walk.trained]
    assert len(set(ordinals)) == len(ordinals), "a prompt was trained twice"
    if not filters:
        left = {group.key for group in walk.progress.groups}
        assert sorted(left.union(ordinals)) == list(range(walk.progress.num_begun)), "a prompt was lost"
        assert not left or changes or (ways is not None and ways.settings.oversample > 1), "aborted ones come back"
