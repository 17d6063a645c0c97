"""Episodes of groups: each member plays one, whose turns go to the replicas as groups of one sample; samples and metrics of them.

An episode that waits on its tools is no load of any replica. A turn prefers the replica that holds the tokens before it. Turns
that a lost replica worked on are generated again elsewhere (dispatch.py). Leaves out processes (episodes/pool.py), what is known
of an episode that goes on (attempt.py), and what the members' rewards are worth (stream.py).
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import logging
import statistics
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from engine.sample import Sample
from megasync.config.schema import Config
from megasync.episodes.record import Asked, History
from megasync.episodes.resolve import identity, resolve_episode
from megasync.episodes.segments import Turn
from megasync.episodes.task import EpisodeLimitError, Played
from megasync.episodes.wire import Ask, Ended
from megasync.hf.folder import model_shape
from megasync.rewards.wire import shown
from megasync.rollouts.attempt import Attempt, TurnGroup, begun, played_of, unfinished
from megasync.rollouts.group import Group

logger = logging.getLogger(__name__)

ATTEMPTS = 3  # of an episode under `retry`, and in evaluations
NUM_NOTED = 3  # failures that are logged, of each kind: raised, returned, took, was, ended
RETURNED = "_returned"
TURNS_KEY, FAILURE_KEY = "rollout.episode_max_turns", "rollout.episode_on_failure"


class EpisodeFailedError(RuntimeError):
    """An episode failed, and the run is to stop then."""


class Player(Protocol):
    """Of EpisodePool."""

    async def run(
        self, task: Any, ask: Callable[[Ask], Any], history: History | None = None
    ) -> tuple[Ended, list[tuple[Any, Turn]]]: ...


@dataclass(frozen=True)
class EpisodeSettings:
    """`max_tokens`: of a prompt with what is sampled after it."""

    max_turns: int
    max_tokens: int
    on_failure: str = "retry"

    def room(self, asked: Ask) -> int:
        """How many tokens a turn may have at most; EpisodeLimitError where it may not be, or has no room."""
        if asked.turn >= self.max_turns:
            raise EpisodeLimitError(f"{TURNS_KEY} = {self.max_turns}")
        room = self.max_tokens - len(asked.prompt_ids)
        if room <= 0:
            told = f"a prompt of {len(asked.prompt_ids)} tokens leaves no room: a sequence has {self.max_tokens} at most"
            raise EpisodeLimitError(told)
        return room


class Episodes:
    """Of one stream; methods are called on its event loop."""

    def __init__(
        self,
        pool: Player,
        settings: EpisodeSettings,
        hand_out: Callable[[list[Group]], None],
        drop: Callable[[Iterable[Group]], None],
        start: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        on_member: Callable[[Group], None],
    ) -> None:
        """`hand_out`, `drop`: the dispatcher's; `start` runs a coroutine; `on_member` hears of each member that has ended."""
        self.pool, self.settings = pool, settings
        self.hand_out, self.drop_turns, self.start, self.on_member = hand_out, drop, start, on_member
        self._noted = Counter[str]()  # failures by kind
        self._keys = itertools.count(1)
        self._waiting: list[Group] = []  # turns that are handed out together, once the loop comes round
        self._tasks: dict[int, list[asyncio.Task[None]]] = {}  # by the group's key
        self._attempts: dict[tuple[int, int], Attempt] = {}  # those that go on, by the group's key and the member

    @property
    def is_busy(self) -> bool:
        return bool(self._tasks)

    def begin(self, groups: Iterable[Group]) -> None:
        """Play the members that are missing."""
        for group in groups:
            group.begun_seconds = group.begun_seconds or time.time()  # an episode may end before it has a turn
            tasks = [self.start(self._member(group, member)) for member in group.missing]
            if tasks:
                self._tasks[group.key] = tasks

    def drop(self, groups: Iterable[Group]) -> None:
        """Nobody waits for these any more."""
        for group in groups:
            group.is_wanted = False
            for member in group.missing:
                self._attempts.pop((group.key, member), None)
            for task in self._tasks.pop(group.key, []):
                task.cancel()

    async def _member(self, group: Group, member: int) -> None:
        played, attempt = None, begun(group, member)
        failures = attempt.number
        while played is None:
            assert group.task is not None
            self._attempts[group.key, member] = attempt
            asks = partial(self._turn, attempt)
            ended, turns = await self.pool.run(replace(group.task, member=member), asks, attempt.history)
            if ended.failure is None:
                played = replace(played_of(attempt, ended, turns), num_failures=failures)
                break
            failures, played = failures + 1, self._after_failure(attempt, ended, failures + 1)
            is_deadly = attempt.history.is_deadly
            attempt = Attempt(group, member, failures, history=History(is_deadly=is_deadly))
        del self._attempts[group.key, member]
        group.complete(member, played)
        if not group.missing:
            group.ended_seconds = time.time()
            self._tasks.pop(group.key, None)
        self.on_member(group)

    def playing(self, group: Group) -> dict[int, Played]:
        """Its members that go on and have turns that ended, as far as they are, for a checkpoint."""
        attempts = {member: self._attempts.get((group.key, member)) for member in group.missing}
        return {member: unfinished(attempt) for member, attempt in attempts.items() if attempt and attempt.history.turns}

    def _after_failure(self, attempt: Attempt, ended: Ended, failures: int) -> Played | None:
        """What takes the episode's place; None: another attempt.

        Raises:
            EpisodeFailedError: the run is to stop.
        """
        assert ended.failure is not None
        assert attempt.group.task is not None
        kind = ended.failure.what.partition(" ")[0]
        self._noted[kind] += 1
        policy, is_evaluation = self.settings.on_failure, attempt.group.key < 0
        told = f"an episode {ended.failure.what}\n  prompt: {shown(attempt.group.task.prompt)}\n{ended.failure.details}".strip()
        if policy == "stop" or (policy == "retry" and failures == ATTEMPTS and not is_evaluation):
            tried = f" {ATTEMPTS} times" if policy == "retry" else ""
            remedy = f"mend it, or write {FAILURE_KEY}=zero or {FAILURE_KEY}=drop to go on without such episodes"
            raise EpisodeFailedError(f"{told}\n  It failed{tried}. Remedy: {remedy}")
        if self._noted[kind] <= NUM_NOTED:
            last = ", others of this kind are only counted" if self._noted[kind] == NUM_NOTED else ""
            logger.warning("%s%s: %s", policy, last, told)
        if (policy == "retry" or is_evaluation) and failures < ATTEMPTS:
            return None
        is_dropped = policy == "drop" and not is_evaluation
        seconds = attempt.waited_seconds + ended.own_seconds, ended.tool_seconds or 0.0
        return Played((), 0.0, "length", 0, *seconds, num_failures=failures, is_dropped=is_dropped)

    # ------------------------------------------------------------------------------------------------ one turn

    async def _turn(self, attempt: Attempt, asked: Ask) -> Turn:
        """EpisodeLimitError as `EpisodeSettings.room`."""
        turn = self._turn_group(attempt, asked)
        assert turn.answer is not None
        attempt.wait()
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._flush)
        self._waiting.append(turn)
        try:
            done = await turn.answer
        finally:
            attempt.go_on()
            if not turn.answer.done() or turn.answer.cancelled():
                turn.is_wanted = False
                self.drop_turns([turn])
        turn.before, attempt.last = None, turn  # or all would stay
        attempt.num_prompt += len(turn.request.prompt_ids)
        attempt.num_held += turn.num_held
        return done

    def _flush(self) -> None:
        waiting, self._waiting = [turn for turn in self._waiting if turn.is_wanted], []
        self.hand_out(waiting)

    def _turn_group(self, attempt: Attempt, asked: Ask) -> TurnGroup:
        own, group = self.settings, attempt.group
        room = own.room(asked)
        request = replace(
            group.request,
            prompt_ids=tuple(asked.prompt_ids.tolist()),
            num_samples=1,
            seed=turn_seed(group.request.seed, attempt.member, attempt.number, asked.turn),
            max_new_tokens=max(1, min(asked.max_new_tokens or group.request.max_new_tokens, group.request.max_new_tokens, room)),
            stop=(*group.request.stop, *asked.stop),
        )
        attempt.asked[asked.turn] = Asked(asked.turn, request.seed, request.max_new_tokens, request.stop)
        turn = TurnGroup(next(self._keys), request, parent=group)
        turn.answer = asyncio.get_running_loop().create_future()
        turn.place, turn.before = group.key, attempt.last
        return turn


def turn_seed(seed: int, member: int, attempt: int, turn: int) -> int:
    """Of a turn's sampling, from the group's seed: the same in a run that is repeated, and shared with no other turn."""
    digest = hashlib.blake2b(f"{seed}/{member}/{attempt}/{turn}".encode(), digest_size=4).digest()
    return int.from_bytes(digest) % 2**31


def episode_samples(played: Played, prompt_ids: npt.NDArray[np.int32], reward: float, place: int, member: int) -> list[Sample]:
    """One for each branch; one without tokens to train where it failed before there were any, none where it was dropped."""
    common: dict[str, Any] = {"reward": reward, "group": place, "member": member, "finish_reason": played.finish_reason}
    if played.is_dropped:
        return []
    if not played.branches:
        return [Sample(prompt_ids, np.empty(0, np.int32), **common)]
    return [
        Sample(
            prompt_ids=branch.token_ids[: branch.prompt_length],
            response_ids=branch.token_ids[branch.prompt_length :],
            rollout_log_probs=branch.log_probs[branch.prompt_length :],
            weight_versions=branch.weight_versions[branch.prompt_length :],
            routed_experts=branch.routed_experts,
            is_sampled=branch.is_sampled[branch.prompt_length :],
            **common,
        )
        for branch in played.branches
    ]


def members_of(samples: Sequence[Sample]) -> list[list[Sample]]:
    """Samples by member: branches of an episode together."""
    found: list[list[Sample]] = []
    for sample in samples:
        last = found[-1][0] if found else None
        if last is None or sample.member < 0 or (sample.group, sample.member) != (last.group, last.member):
            found.append([])
        found[-1].append(sample)
    return found


def episode_settings(config: Config) -> EpisodeSettings:
    rollout = config.rollout
    positions = model_shape(config.model.path).max_position_embeddings
    limits = [config.engine.tokens_per_microbatch, rollout.max_model_len or 0, positions]
    return EpisodeSettings(rollout.episode_max_turns, min(filter(None, limits)), rollout.episode_on_failure)


def episode_identity(config: Config) -> str:
    """What tells the episodes of this config from those of another; empty without any."""
    if not config.rollout.episode:
        return ""
    resolve_episode(config.rollout.episode)
    return f"{identity(config.rollout.episode)} {config.rollout.episode_max_turns}"


def episode_metrics(played: Sequence[Played]) -> dict[str, float]:
    """Means over a batch's episodes; `tool_share`: of their time. RETURNED is put behind a name of ours that episodes return."""
    if not played:
        return {}
    names = sorted({name for one in played for name in one.metrics})
    own = {name: [one.metrics[name] for one in played if name in one.metrics] for name in names}
    columns: dict[str, Sequence[float]] = {
        "turns_mean": [one.num_turns for one in played],
        "tool_seconds": [one.tool_seconds for one in played],
        "sampled_tokens": [one.num_sampled for one in played],
        "given_tokens": [one.num_given for one in played],
        "branches": [len(one.branches) for one in played],
    }
    found = {f"episode/{name}": statistics.fmean(values) for name, values in columns.items()} | {
        "episode/failures": float(sum(one.num_failures for one in played)),
        "episode/dropped": float(sum(one.is_dropped for one in played)),
        "episode/prefix_hits": sum(one.num_held for one in played) / max(sum(one.num_prompt for one in played), 1),
        "episode/resumed": float(sum(one.num_resumed > 0 for one in played)),
        "episode/anew": float(sum(one.is_anew for one in played)),
        "episode/tool_share": sum(one.tool_seconds for one in played) / max(sum(one.seconds for one in played), 1e-9),
    }
    keys = {name: f"episode/{name}" if f"episode/{name}" not in found else f"episode/{name}{RETURNED}" for name in own}
    return found | {keys[name]: statistics.fmean(values) for name, values in own.items()}
