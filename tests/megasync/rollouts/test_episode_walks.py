"""Random walks of the stream with episodes, in virtual time: tools of any length, failures, branches, kills in mid-turn, updates.

No step waits for ever, no prompt is lost or trained twice, no turn is lost or trained twice, and no load stays with a replica.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge.generation import Completion, GenerationRequest
from megasync.episodes.record import History, turns_of
from megasync.episodes.segments import Turn
from megasync.episodes.task import EpisodeLimitError, EpisodeResult, Task
from megasync.episodes.exchange import Ask, EpisodeEnd
from megasync.workers.failure import Failure
from megasync.rollouts.group import Group, StreamSettings
from megasync.rollouts.scheduler import Load, choose_for_turn, choose_replica
from megasync.rollouts.turns import EpisodeFailedError, EpisodeSettings, Player, turn_seed
from tests.megasync.rollouts.stream_model import ModelPool, streaming
from tests.megasync.rollouts.test_stream_walks import Walk, Ways, random_ways

MOST_TURNS, GIVEN = 4, 10_000


@dataclass
class RandomPlayer:
    """Plays episodes whose tools take virtual time; each token behind the first turn's prompt is the prompt's own.

    One that goes on asks what it had asked for, most times, and takes its former turns.
    """

    source: random.Random
    fails: float
    running: int = 0

    num_resumed: int = 0

    async def run(self, task: Task, ask: Any, history: History | None = None) -> tuple[EpisodeEnd, list[tuple[Any, Turn]]]:
        self.running += 1
        history = history or History()
        try:
            if history.turns and self.source.random() < 0.2:
                history.forget()
            return await self._play(task, ask, history)
        finally:
            self.running -= 1

    async def _play(self, task: Task, ask: Any, history: History) -> tuple[EpisodeEnd, list[tuple[Any, Turn]]]:
        source, ids, turns, limit = self.source, list(task.prompt_ids), list[tuple[Any, Turn]](), ""
        for number, former in sorted(history.turns.items()):
            await asyncio.sleep(source.choice((0.0, 0.1)))
            assert number == len(turns) and former[0][0] == task.prompt_ids[0]
            turns.append(former)
            ids = [*former[0].tolist(), *former[1].token_ids.tolist(), GIVEN]
            history.resumed.add(number)
            self.num_resumed += 1
        for number in range(len(turns), max(len(turns) + 1, source.randint(1, MOST_TURNS + 1))):
            await asyncio.sleep(source.choice((0.0, 0.0, 0.1, 3.0)))
            if source.random() < self.fails:
                return EpisodeEnd(failure=Failure("failed on purpose")), []
            if number and source.random() < 0.2:  # what was said is forgotten: a branch
                ids = [*task.prompt_ids, GIVEN + 1]
            if source.random() < 0.1:
                await self._ask_for_nonsense(ask, number)
            prompt = np.array(ids, np.int32)
            try:
                turn = await ask(Ask(0, number, prompt, None, ()))
            except EpisodeLimitError as error:
                limit = str(error)
                break
            history.turns[number] = prompt, turn
            turns.append((prompt, turn))
            ids += [*turn.token_ids.tolist(), GIVEN]
        return EpisodeEnd(tuple(range(len(turns))), source.choice((None, 0.0)) if limit else None, limit=limit), turns

    async def _ask_for_nonsense(self, ask: Any, number: int) -> None:
        """Which the replica refuses, beside turns of others that it takes."""
        try:
            await ask(Ask(0, number, np.array([-1]), None, ()))
        except EpisodeLimitError:
            return
        except ValueError:
            return
        raise AssertionError("it was taken")


class EpisodeWalk(Walk):
    """As Walk, and what it trains is made of episodes."""

    def __init__(self, source: random.Random, policy: str) -> None:
        super().__init__(source)
        self.policy, self.players = policy, list[RandomPlayer]()

    def episodes(self, ways: Ways) -> tuple[Player, EpisodeSettings]:
        fails = {"stop": 0.0, "retry": 0.002}.get(self.policy, 0.1)
        self.players.append(RandomPlayer(self.source, fails))
        return self.players[-1], EpisodeSettings(MOST_TURNS, 200, self.policy)

    def _check_sample(self, completion: Completion | EpisodeResult, prompt: int) -> None:
        assert isinstance(completion, EpisodeResult) and completion.num_turns <= MOST_TURNS
        assert bool(completion.branches) == bool(completion.num_turns)
        for branch in completion.branches:
            sampled = branch.token_ids[branch.is_sampled]
            assert set(sampled.tolist()) == {prompt}, "tokens of another episode"
            given = Counter(branch.token_ids[~branch.is_sampled].tolist())
            assert given[prompt] <= 1 and given.keys() <= {prompt, GIVEN, GIVEN + 1}
            assert (np.diff(branch.weight_versions) >= 0).all()
        assert completion.tool_seconds <= completion.seconds + 1e-6
        assert len(completion.turns) == completion.num_turns and not (completion.is_restart and completion.num_resumed)
        assert len({(one.number, one.seed) for one in completion.turns}) == completion.num_turns
        for prompt_ids, turn in turns_of(completion.branches, completion.turns):
            assert set(turn.token_ids.tolist()) == {prompt} and prompt_ids[0] == prompt


def walked(seed: int, *, filters: bool, policy: str, changes: bool = False) -> EpisodeWalk:
    """To its end, process by process; `changes` as for test_stream_walks.py."""
    source = random.Random(seed)
    num_steps, share_equal = source.randint(1, 6), source.choice((0.2, 0.6)) if filters else 0.0
    walk, ways = EpisodeWalk(source, policy), None
    while walk.step < num_steps:
        ways = random_ways(source, num_steps, ways, share_equal, changes=changes, oversamples=False)
        walk.process(ways, source.choice((num_steps, source.randint(walk.step + 1, num_steps))))
    return walk


def test_episodes_of_a_checkpoint_go_on_with_their_turns() -> None:
    assert sum(player.num_resumed for seed in range(20) for player in walked(seed, filters=False, policy="zero").players) > 5


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**32 - 1), st.booleans(), st.sampled_from(["stop", "zero", "drop", "retry"]), st.booleans())
def test_a_walk_of_episodes_loses_nothing_and_comes_to_its_end(seed: int, filters: bool, policy: str, changes: bool) -> None:
    walk = walked(seed, filters=filters, policy=policy, changes=changes)
    assert not any(player.running for player in walk.players), "an episode was left behind"
    ordinals = [ordinal for ordinal, _ in walk.trained]
    assert len(set(ordinals)) == len(ordinals), "a prompt was trained twice"
    if not filters:
        left = {group.key for group in walk.progress.groups}
        assert sorted(left.union(ordinals)) == list(range(walk.progress.num_begun)), "a prompt was lost"


loads = st.dictionaries(st.integers(0, 4), st.builds(Load, st.integers(0, 6), st.floats(0, 1000)), max_size=5)


@settings(deadline=None, max_examples=200)
@given(loads, st.none() | st.integers(0, 5), st.integers(0, 500), st.none() | st.integers(1, 6))
def test_a_turn_stays_with_its_tokens_unless_that_replica_is_far_busier(
    of_replicas: dict[int, Load], held_by: int | None, num_held: int, limit: int | None
) -> None:
    chosen, least = choose_for_turn(of_replicas, held_by, num_held, limit), choose_replica(of_replicas, 1, limit)
    assert (chosen is None) == (least is None)
    if chosen is None or least is None:
        return
    own = of_replicas[chosen]
    assert limit is None or own.samples == 0 or own.samples < limit, "there is room"
    assert chosen in (held_by, least)
    if chosen == held_by != least:
        assert own.tokens <= 2 * of_replicas[least].tokens + num_held
    elif held_by in of_replicas and held_by != least:
        held = of_replicas[held_by]
        is_full = limit is not None and held.samples >= limit
        assert is_full or held.tokens > 2 * of_replicas[least].tokens + num_held


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(*[st.integers(0, 50)] * 4), min_size=2, max_size=20, unique=True))
def test_turns_share_no_seed(turns: list[tuple[int, int, int, int]]) -> None:
    assert len({turn_seed(*turn) for turn in turns}) == len(turns)
    assert turn_seed(*turns[0]) == turn_seed(*turns[0])


@pytest.mark.parametrize(("policy", "pattern"), [("stop", "It failed. Remedy"), ("retry", "It failed 3 times. Remedy")])
def test_a_run_stops_with_what_the_episode_said(policy: str, pattern: str) -> None:
    pool = ModelPool(1, lambda group, sample: 3)
    request = GenerationRequest((1,), num_samples=2)

    def make_group(ordinal: int) -> Group:
        return Group(ordinal, request, task=Task("Whose?", (1,), ""))

    own = StreamSettings(0, 1, 1, None, 5.0, 60.0)
    episodes = RandomPlayer(random.Random(0), fails=1.0), EpisodeSettings(2, 100, policy)
    with streaming(pool, own, make_group, None, episodes) as stream:

        async def train() -> None:
            await stream.serve(0)
            await stream.admit(0)
            await stream.take(0)

        with pytest.raises(EpisodeFailedError, match=pattern) as caught:
            stream.run(train())
    text = str(caught.value)
    assert "an episode failed on purpose" in text and "prompt: 'Whose?'" in text and "rollout.episode_on_failure=drop" in text
