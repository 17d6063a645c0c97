"""The stream of rollouts beside a pool whose answers come when the test says so."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from bridge.generation import Collected, GenerationRequest, GroupRequest
from bridge.messages import NotServingError
from megasync.episodes.record import History
from megasync.episodes.segments import Turn
from megasync.episodes.task import Task
from megasync.episodes.wire import Ended
from megasync.rewards.pool import Scored
from megasync.rewards.wire import Failure
from megasync.rollouts.dispatch import RepeatedLossError
from megasync.rollouts.group import Group, StreamSettings
from megasync.rollouts.stream import RolloutStream
from megasync.rollouts.turns import EpisodeSettings
from tests.megasync.rollouts.stream_model import ModelPool

SETTINGS = StreamSettings(max_staleness=0, batch_size=1, num_steps=1, slots=1, expected_tokens=1.0, answer_seconds=300.0)


class AskedPool:
    """Of one replica, which owes an answer."""

    members = wanted = (0,)

    def __init__(self) -> None:
        self.asked: list[Future[Collected]] = []
        self.is_asked = threading.Event()

    def collect(self, replica: int, seconds: float) -> Any:
        self.asked.append(Future())
        self.is_asked.set()
        return SimpleNamespace(future=lambda answer=self.asked[-1]: answer)


def test_a_stream_ends_although_an_answer_comes_at_that_moment() -> None:
    """The answer is there when the task that waits for it is cancelled, and has not gone on yet."""
    pool = AskedPool()
    stream = RolloutStream(cast(Any, pool), SETTINGS, cast(Any, None), cast(Any, None), print)
    stream.serve(0)
    assert pool.is_asked.wait(10)
    cancel = stream._cancel

    async def answer_and_cancel() -> None:
        pool.asked[0].set_result(Collected((), 0.0))
        await asyncio.sleep(0)  # the task's future has the result now
        await cancel()
        assert not stream._tasks

    stream._cancel = answer_and_cancel  # type: ignore[method-assign]
    stream.close()
    assert len(pool.asked) == 1


def test_an_answer_that_comes_as_its_replica_is_lost_changes_nothing() -> None:
    """Its groups have gone to the other one by then."""
    pool = ModelPool(2, lambda group, sample: 3)

    async def score(group: Group, samples: list[int]) -> list[Scored]:
        return [Scored(1.0, {}) for _ in samples]

    settings, request = replace(SETTINGS, batch_size=2, slots=None), GenerationRequest((1,), num_samples=2)
    stream = RolloutStream(cast(Any, pool), settings, lambda key: Group(key, request), score, print, pool.loop)

    async def train() -> None:
        pool.sync(0)
        await stream._serve(0)
        await stream._admit(0)
        await asyncio.sleep(3 - 1e-7)  # now both are nearly done
        pool.sync(0, absent={1})
        await stream._serve(0)
        groups = await stream._take(0)
        assert groups is not None and [group.key for group in groups] == [0, 1]
        assert [(number, lane.load.samples) for number, lane in stream._dispatcher._lanes.items()] == [(0, 0)]

    try:
        stream.run(train())
    finally:
        stream.close()


class LateRefusal(ModelPool):
    """Of what it is handed first, after a second."""

    is_first = True

    async def hand_in(self, replica: int, groups: Sequence[GroupRequest]) -> None:
        if self.is_first:
            self.is_first = False
            await asyncio.sleep(1)
            raise NotServingError("its sync broke off")
        await super().hand_in(replica, groups)


def test_a_refusal_that_comes_after_the_next_sync_closes_no_lane() -> None:
    pool = LateRefusal(1, lambda group, sample: 3)

    async def score(group: Group, samples: list[int]) -> list[Scored]:
        return [Scored(1.0, {}) for _ in samples]

    request = GenerationRequest((1,))
    stream = RolloutStream(cast(Any, pool), SETTINGS, lambda key: Group(key, request), score, print, pool.loop)

    async def train() -> list[Group] | None:
        pool.sync(0)
        await stream._serve(0)
        await stream._admit(0)
        await asyncio.sleep(0.5)
        pool.sync(1)
        await stream._serve(1)
        return await stream._take(0)

    try:
        groups = stream.run(train())
        assert groups is not None and [group.key for group in groups] == [0]
    finally:
        stream.close()


class SilentPlayer:
    """Its episodes are over before the model has said anything."""

    async def run(self, task: Task, ask: object, history: History | None = None) -> tuple[Ended, list[tuple[Any, Turn]]]:
        await asyncio.sleep(0.01)
        return Ended(0, reward=1.0), []


class DeadlyPlayer:
    """The first episode has ended its process twice; `known` for each time that one is played: whether it is to be alone."""

    def __init__(self) -> None:
        self.known: dict[int, list[bool]] = {0: [], 1: []}

    async def run(self, task: Task, ask: object, history: History) -> tuple[Ended, list[tuple[Any, Turn]]]:
        await asyncio.sleep(0.01)
        self.known[task.member].append(history.is_deadly)
        if task.member == 0 and len(self.known[0]) < 3:
            history.is_deadly = True
            return Ended(0, failure=Failure("had its process killed by SIGKILL")), []
        return Ended(0, reward=1.0), []


def test_an_episode_that_has_ended_its_process_is_tried_again_alone() -> None:
    request, task, player = GenerationRequest((1,), num_samples=2), Task("?", (1,), ""), DeadlyPlayer()

    async def score(group: Group, samples: Sequence[int]) -> list[Scored]:
        return [Scored(1.0, {}) for _ in samples]

    made, episodes = [Group(0, request, task=task)], (cast(Any, player), EpisodeSettings(max_turns=2, max_tokens=8))
    settings = replace(SETTINGS, slots=None)
    stream = RolloutStream(cast(Any, AskedPool()), settings, made.__getitem__, score, print, episodes=episodes)
    try:
        stream.serve(0)
        stream.admit(0)
        assert stream.take(0) == made
        assert player.known == {0: [False, True, True], 1: [False]}
    finally:
        stream.close()


def test_episodes_without_a_turn_began_when_they_were_played() -> None:
    """And not in 1970: a batch's seconds, and its bar in the timeline, are from the first begin to the last end."""
    request, task = GenerationRequest((1,), num_samples=2), Task("?", (1,), "")
    players = SilentPlayer(), EpisodeSettings(max_turns=2, max_tokens=8)

    async def score(group: Group, samples: Sequence[int]) -> list[Scored]:
        return [Scored(1.0, {}) for _ in samples]

    before, settings = time.time(), replace(SETTINGS, slots=None)
    made = [Group(0, request, task=task)]
    stream = RolloutStream(cast(Any, AskedPool()), settings, made.__getitem__, score, print, episodes=players)
    try:
        stream.serve(0)
        stream.admit(0)
        assert stream.take(0) == made
        assert before <= made[0].begun_seconds <= made[0].ended_seconds <= time.time()
    finally:
        stream.close()


def test_a_step_for_which_nothing_runs_is_told_with_its_numbers() -> None:
    """No group was ever admitted."""
    stream = RolloutStream(cast(Any, AskedPool()), SETTINGS, cast(Any, None), cast(Any, None), print)
    try:
        stream.serve(0)
        told = "step 1 waits for a batch, and nothing runs.*not trained: none; discarded: 0; .*data.batch_size=1, rollout.max_st"
        with pytest.raises(RuntimeError, match=told):
            stream.take(0)
    finally:
        stream.close()


def test_a_group_with_which_every_replica_dies_ends_the_run() -> None:
    """The replica is started anew each time, until the same group has seen the end of five."""
    deaths = list[float]()

    async def score(group: Group, samples: list[int]) -> list[Scored]:
        return [Scored(1.0, {}) for _ in samples]

    def length(group: GroupRequest, sample: int) -> int:
        if group.key == 1:
            deaths.append(pool.loop.time())
            pool.loop.call_later(0.5, pool.kill, 0)
        return 3

    pool = ModelPool(1, length)
    settings, request = replace(SETTINGS, batch_size=2, slots=None), GenerationRequest((1,), num_samples=1)
    stream = RolloutStream(cast(Any, pool), settings, lambda key: Group(key, request), score, print, pool.loop)

    async def train() -> None:
        pool.sync(0)
        await stream._serve(0)
        await stream._admit(0)
        while await stream._take(0) is None:
            await asyncio.sleep(1)
            pool.sync(0)
            await stream._serve(0)

    try:
        with pytest.raises(RepeatedLossError, match=r"^5 replicas were lost with the same prompts in them"):
            stream.run(train())
    finally:
        stream.close()
    assert len(deaths) == 5
