"""Episodes of groups: each member plays one, whose turns go to the replicas as groups of one sample.

An episode that waits on its tools is no load of any replica. A turn prefers the replica that holds the tokens before it. Turns
that a lost replica worked on are generated again elsewhere (dispatch.py). Leaves out processes (episodes/pool.py), what is known
of a running episode (attempt.py), and rewards (scoring.py).
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from megasync.config.schema import Config
from megasync.data.lengths import scored_tokens
from megasync.episodes.exchange import Ask, EpisodeEnd
from megasync.episodes.record import Asked, History
from megasync.episodes.resolve import identity, resolve_episode
from megasync.episodes.segments import Turn
from megasync.episodes.task import EpisodeLimitError, EpisodeResult
from megasync.models.folder import model_shape
from megasync.rewards.failures import shown
from megasync.rollouts.attempt import Attempt, first_attempt, result_of, unfinished
from megasync.rollouts.events import EpisodeEnded, EventThread, TurnAsked
from megasync.rollouts.group import Group

logger = logging.getLogger(__name__)

ATTEMPTS = 3  # of an episode under `retry`, and in evaluations
NUM_NOTED = 3  # failures that are logged, of each kind: raised, returned, took, was, ended
TURNS_KEY, FAILURE_KEY = "rollout.episode_max_turns", "rollout.episode_on_failure"


class EpisodeFailedError(RuntimeError):
    """An episode failed, and the run is to stop then."""


class Player(Protocol):
    """Plays episodes, as EpisodePool does."""

    async def run(
        self, task: Any, ask: Callable[[Ask], Any], history: History | None = None
    ) -> tuple[EpisodeEnd, list[tuple[Any, Turn]]]: ...


@dataclass(frozen=True)
class EpisodeSettings:
    """`max_tokens`: of a prompt together with its sampled tokens."""

    max_turns: int
    max_tokens: int
    on_failure: str = "retry"

    def room(self, asked: Ask) -> int:
        """How many tokens a turn may have at most; EpisodeLimitError where it may not be, or has no room."""
        if asked.turn >= self.max_turns:
            raise EpisodeLimitError(f"{TURNS_KEY} = {self.max_turns}")
        room = self.max_tokens - len(asked.prompt_ids)
        if room <= 0:
            problem = f"a prompt of {len(asked.prompt_ids)} tokens leaves no room: a sequence has {self.max_tokens} at most"
            raise EpisodeLimitError(problem)
        return room


class Episodes:
    """The episodes of one stream. Its methods are called on the event loop; its tasks report by events."""

    def __init__(self, player: Player, settings: EpisodeSettings, events: EventThread) -> None:
        self.player, self.settings, self.events = player, settings, events
        self._num_failures = Counter[str]()  # by kind
        self._keys = itertools.count(1)  # of turns
        self._tasks: dict[int, list[asyncio.Task[None]]] = {}  # by the group's key
        self._attempts: dict[tuple[int, int], Attempt] = {}  # that run, by the group's key and the member

    @property
    def is_busy(self) -> bool:
        return bool(self._tasks)

    def begin(self, groups: Iterable[Group]) -> None:
        """Play the members that are missing."""
        for group in groups:
            group.begun_seconds = group.begun_seconds or time.time()  # an episode may end before it has a turn
            tasks = [self.events.start(self._play(group, member)) for member in group.missing]
            if tasks:
                self._tasks[group.key] = tasks

    def drop(self, groups: Iterable[Group]) -> None:
        """Nobody waits for these any more."""
        for group in groups:
            for member in group.missing:
                self._attempts.pop((group.key, member), None)
            for task in self._tasks.pop(group.key, []):
                task.cancel()

    async def _play(self, group: Group, member: int) -> None:
        played, attempt = None, first_attempt(group, member)
        failures = attempt.number
        while played is None:
            assert group.task is not None
            self._attempts[group.key, member] = attempt
            asks = partial(self._turn, attempt)
            ended, turns = await self.player.run(replace(group.task, member=member), asks, attempt.history)
            if ended.failure is None:
                played = replace(result_of(attempt, ended, turns), num_failures=failures)
                break
            failures, played = failures + 1, self._after_failure(attempt, ended, failures + 1)
            is_deadly = attempt.history.is_deadly
            attempt = Attempt(group, member, failures, history=History(is_deadly=is_deadly))
        self.events.put(EpisodeEnded(group, member, played))

    def finish(self, event: EpisodeEnded) -> None:
        """A member's episode has ended."""
        group = event.group
        self._attempts.pop((group.key, event.member), None)
        group.complete(event.member, event.played)
        if not group.missing:
            group.ended_seconds = time.time()
            self._tasks.pop(group.key, None)

    def playing(self, group: Group) -> dict[int, EpisodeResult]:
        """Its unfinished episodes that have turns, by member, for a checkpoint."""
        attempts = {member: self._attempts.get((group.key, member)) for member in group.missing}
        return {member: unfinished(attempt) for member, attempt in attempts.items() if attempt and attempt.history.turns}

    def _after_failure(self, attempt: Attempt, ended: EpisodeEnd, failures: int) -> EpisodeResult | None:
        """The result that replaces a failed episode; None: another attempt.

        Raises:
            EpisodeFailedError: `rollout.episode_on_failure` stops the run.
        """
        assert ended.failure is not None
        assert attempt.group.task is not None
        kind = ended.failure.what.partition(" ")[0]
        self._num_failures[kind] += 1
        policy, is_evaluation = self.settings.on_failure, attempt.group.key < 0
        text = f"an episode {ended.failure.what}\n  prompt: {shown(attempt.group.task.prompt)}\n{ended.failure.details}".strip()
        if policy == "stop" or (policy == "retry" and failures == ATTEMPTS and not is_evaluation):
            tried = f" {ATTEMPTS} times" if policy == "retry" else ""
            remedy = f"mend it, or write {FAILURE_KEY}=zero or {FAILURE_KEY}=drop to continue without such episodes"
            raise EpisodeFailedError(f"{text}\n  It failed{tried}. Remedy: {remedy}")
        if self._num_failures[kind] <= NUM_NOTED:
            last = ", others of this kind are only counted" if self._num_failures[kind] == NUM_NOTED else ""
            logger.warning("%s%s: %s", policy, last, text)
        if (policy == "retry" or is_evaluation) and failures < ATTEMPTS:
            return None
        is_dropped = policy == "drop" and not is_evaluation
        seconds = attempt.waited_seconds + ended.own_seconds, ended.tool_seconds or 0.0
        return EpisodeResult((), 0.0, "length", 0, *seconds, num_failures=failures, is_dropped=is_dropped)

    # ------------------------------------------------------------------------------------------------ one turn

    async def _turn(self, attempt: Attempt, asked: Ask) -> Turn:
        """EpisodeLimitError as `EpisodeSettings.room`."""
        turn = self._turn_group(attempt, asked)
        assert turn.answer is not None
        attempt.wait()
        self.events.put(TurnAsked(turn))
        try:
            done = await turn.answer
        finally:
            attempt.resume()
            if not turn.answer.done() or turn.answer.cancelled():
                turn.is_wanted = False
        turn.before, attempt.last = None, turn  # a chain would keep all turns in memory
        attempt.num_prompt += len(turn.request.prompt_ids)
        attempt.num_held += turn.num_held
        return done

    def _turn_group(self, attempt: Attempt, asked: Ask) -> Group:
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
        answer = asyncio.get_running_loop().create_future()
        return Group(next(self._keys), request, episode=group, before=attempt.last, answer=answer)


def turn_seed(seed: int, member: int, attempt: int, turn: int) -> int:
    """The seed of a turn's sampling, from the group's seed: the same in a repeated run, and shared with no other turn."""
    digest = hashlib.blake2b(f"{seed}/{member}/{attempt}/{turn}".encode(), digest_size=4).digest()
    return int.from_bytes(digest) % 2**31


def episode_settings(config: Config) -> EpisodeSettings:
    rollout = config.rollout
    positions = model_shape(config.model.path).max_position_embeddings
    limits = [config.engine.tokens_per_microbatch, rollout.max_model_len or 0, positions, scored_tokens(config)]
    return EpisodeSettings(rollout.episode_max_turns, min(filter(None, limits)), rollout.episode_on_failure)


def episode_identity(config: Config) -> str:
    """Changes with the code of the episodes and their limits; empty without episodes."""
    if not config.rollout.episode:
        return ""
    resolve_episode(config.rollout.episode)
    return f"{identity(config.rollout.episode)} {config.rollout.episode_max_turns}"
