"""An attempt at an episode: its state while it runs, which is part of a checkpoint, and its result.

Leaves out who plays it and who asks the replicas (turns.py).

    attempt = first_attempt(group, member)               # continues one of a checkpoint
    saved = unfinished(attempt)                          # for the next checkpoint
    done = result_of(attempt, ended, turns)
"""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, field
from typing import Any

from megasync.episodes.exchange import EpisodeEnd
from megasync.episodes.record import Asked, History, recorded, turns_of
from megasync.episodes.segments import Turn
from megasync.episodes.task import EpisodeResult
from megasync.rollouts.group import Group

STATE = "state"  # of the environment, in a checkpoint of an unfinished episode


@dataclass
class Attempt:
    """At one episode."""

    group: Group
    member: int
    number: int
    history: History = field(default_factory=History)
    asked: dict[int, Asked] = field(default_factory=dict)  # turns, by their number
    last: Group | None = None  # the turn that ended last
    waited_seconds: float = 0.0  # for the model, while it did nothing else
    num_waiting: int = 0
    waits_since: float = 0.0
    num_prompt: int = 0  # tokens of its turns' prompts
    num_held: int = 0

    def wait(self) -> None:
        if self.num_waiting == 0:
            self.waits_since = time.monotonic()
        self.num_waiting += 1

    def resume(self) -> None:
        self.num_waiting -= 1
        if self.num_waiting == 0:
            self.waited_seconds += time.monotonic() - self.waits_since


def first_attempt(group: Group, member: int) -> Attempt:
    """The first attempt of this process; it continues the episode of a checkpoint, if there is one."""
    saved = group.playing.get(member)
    if saved is None:
        return Attempt(group, member, 0)
    turns = zip(saved.turns, turns_of(saved.branches, saved.turns), strict=True)
    history = History({record.number: turn for record, turn in turns}, dict(enumerate(saved.answers)), saved.info.get(STATE))
    asked = {record.number: Asked(record.number, record.seed, record.max_new_tokens, record.stop) for record in saved.turns}
    return Attempt(group, member, saved.num_failures, history, asked)


def unfinished(attempt: Attempt) -> EpisodeResult:
    """The turns that have ended, and the environment's answers up to the first missing one."""
    history = attempt.history
    branches, turns = recorded((attempt.asked[number], *turn) for number, turn in history.turns.items())
    answers = tuple(history.answers[place] for place in itertools.takewhile(history.answers.__contains__, itertools.count()))
    state = history.state if len(answers) == len(history.answers) else None
    return EpisodeResult(branches, turns=turns, answers=answers, num_failures=attempt.number, info={STATE: state})


def result_of(attempt: Attempt, ended: EpisodeEnd, turns: list[tuple[Any, Turn]]) -> EpisodeResult:
    asked = (attempt.asked[number] for number in ended.kept)
    branches, records = recorded((how, *turn) for how, turn in zip(asked, turns, strict=True))
    is_cut = bool(ended.limit) or ended.is_cut_off or bool(turns and turns[-1][1].finish_reason == "length")
    return EpisodeResult(
        branches=branches,
        reward=0.0 if ended.limit else ended.reward,
        finish_reason="length" if is_cut else "stop",
        num_turns=len(turns),
        seconds=attempt.waited_seconds + ended.own_seconds,
        tool_seconds=ended.tool_seconds or 0.0,
        num_prompt=attempt.num_prompt,
        num_held=attempt.num_held,
        metrics=ended.metrics,
        info=ended.info,
        turns=records,
        answers=attempt.history.answers_in_order,
        num_resumed=len(attempt.history.resumed),
        is_restart=attempt.history.is_restart,
        turn_rewards=ended.turn_rewards,
    )
