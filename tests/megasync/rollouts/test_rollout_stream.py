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
from megasync.episodes.exchange import EpisodeEnd
from megasync.workers.failure import Failure
from megasync.rollouts.dispatch import RepeatedLossError
from megasync.rollouts.group import Group, StreamSettings
from megasync.rollouts.stream import RolloutStream
from megasync.rollouts.turns import EpisodeSettings
from tests.megasync.rollouts.stream_model import ModelPool, streaming

SETTINGS = StreamSettings(max_staleness=0, batch_size=1, num_steps=1, slots=None, expected_tokens=1.0, answer_seconds=300.0)
ONE, PAIR, NOTHING = GenerationRequest((1,)), GenerationRequest((1,), num_samples=2), cast(Any, None)


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


async def begin(stream: RolloutStream, pool: ModelPool) -> None:
    """The first step."""
    pool.sync(0)
    await stream.serve(0)
    await stream.admit(0)


def keys(groups: list[Group] | None) -> list[int]:
    return [group.key for group in groups or []]


def test_a_stream_ends_although_an_answer_comes_at_that_moment() -> None:
    """The answer is there when the task that waits for it is cancelled, and has not gone on yet."""
    pool = AskedPool()
    with streaming(pool, SETTINGS, NOTHING) as stream:
        stream.run(stream.serve(0))
        assert pool.is_asked.wait(60)
        cancel = stream.events.cancel

        async def answer_and_cancel() -> None:
            pool.asked[0].set_result(Collected((), 0.0))
            await asyncio.sleep(0)  # the task's future has the result now
            await cancel()
            assert not stream.events._tasks

        stream.events.cancel = answer_and_cancel  # type: ignore[method-assign]
    assert len(pool.asked) == 1


def test_an_answer_that_comes_as_its_replica_is_lost_changes_nothing() -> None:
    """Its groups have gone to the other one by then."""
    pool = ModelPool(2, lambda group, sample: 3)
    with streaming(pool, replace(SETTINGS, batch_size=2), lambda key: Group(key, PAIR)) as stream:

        async def train() -> None:
            await begin(stream, pool)
            await asyncio.sleep(3 - 1e-7)  # now both are nearly done
            pool.sync(0, absent={1})
            await stream.serve(0)
            assert keys(await stream.take(0)) == [0, 1]
            assert [(number, slot.load.samples) for number, slot in stream.dispatcher.slots.items()] == [(0, 0)]

        stream.run(train())


class LateRefusal(ModelPool):
    """Of what it is handed first, after a second."""

    is_first = True

    async def hand_in(self, replica: int, groups: Sequence[GroupRequest]) -> None:
        if self.is_first:
            self.is_first = False
            await asyncio.sleep(1)
            raise NotServingError("its sync broke off")
        await super().hand_in(replica, groups)


def test_a_refusal_that_comes_after_the_next_sync_closes_no_slot() -> None:
    pool = LateRefusal(1, lambda group, sample: 3)
    with streaming(pool, SETTINGS, lambda key: Group(key, ONE)) as stream:

        async def train() -> list[Group] | None:
            await begin(stream, pool)
            await asyncio.sleep(0.5)
            pool.sync(1)
            await stream.serve(1)
            return await stream.take(0)

        assert keys(stream.run(train())) == [0]


class SilentPlayer:
    """Its episodes are over before the model has said anything."""

    async def run(self, task: Task, ask: object, history: History | None = None) -> tuple[EpisodeEnd, list[tuple[Any, Turn]]]:
        await asyncio.sleep(0.01)
        return EpisodeEnd(reward=1.0), []


class DeadlyPlayer:
    """The first episode has ended its process twice; `known` for each time that one is played: whether it is to be alone."""

    def __init__(self) -> None:
        self.known: dict[int, list[bool]] = {0: [], 1: []}

    async def run(self, task: Task, ask: object, history: History) -> tuple[EpisodeEnd, list[tuple[Any, Turn]]]:
        await asyncio.sleep(0.01)
        self.known[task.member].append(history.is_deadly)
        if task.member == 0 and len(self.known[0]) < 3:
            history.is_deadly = True
            return EpisodeEnd(failure=Failure("had its process killed by SIGKILL")), []
        return EpisodeEnd(reward=1.0), []


def played(player: object) -> Group:
    """A group of two members."""
    made = [Group(0, PAIR, task=Task("?", (1,), ""))]
    episodes = player, EpisodeSettings(max_turns=2, max_tokens=8)
    with streaming(AskedPool(), SETTINGS, made.__getitem__, episodes=episodes) as stream:
        stream.run(stream.serve(0))
        stream.run(stream.admit(0))
        assert stream.run(stream.take(0)) == made
    return made[0]


def test_an_episode_that_has_ended_its_process_is_tried_again_alone() -> None:
    player = DeadlyPlayer()
    played(player)
    assert player.known == {0: [False, True, True], 1: [False]}


def test_episodes_without_a_turn_began_when_they_were_played() -> None:
    """And not in 1970: a batch's seconds, and its bar in the timeline, are from the first begin to the last end."""
    before = time.time()
    group = played(SilentPlayer())
    assert before <= group.begun_seconds <= group.ended_seconds <= time.time()


def test_a_step_for_which_nothing_runs_raises_with_the_numbers() -> None:
    """No group was ever admitted."""
    with streaming(AskedPool(), SETTINGS, NOTHING) as stream:
        stream.run(stream.serve(0))
        with pytest.raises(RuntimeError, match=r"step 1 waits for a batch, and nothing runs.*not trained: none; discarded: 0; "):
            stream.run(stream.take(0))


def test_a_group_with_which_every_replica_dies_ends_the_run() -> None:
    """The replica is restarted each time, until the same group has seen the end of five."""
    deaths = list[float]()

    def length(group: GroupRequest, sample: int) -> int:
        if group.key == 1:
            deaths.append(pool.loop.time())
            pool.loop.call_later(0.5, pool.kill, 0)
        return 3

    pool = ModelPool(1, length)
    with streaming(pool, replace(SETTINGS, batch_size=2), lambda key: Group(key, ONE)) as stream:

        async def train() -> None:
            await begin(stream, pool)
            while await stream.take(0) is None:
                await asyncio.sleep(1)
                pool.sync(0)
                await stream.serve(0)

        with pytest.raises(RepeatedLossError, match=r"^5 replicas were lost with the same prompts in them"):
            stream.run(train())
    assert len(deaths) == 5
