"""An attempt at an episode, and its turns as groups of one sample; how far it is, for a checkpoint, and what it came to.

Leaves out who plays it and who asks the replicas (turns.py).

    attempt = begun(group, member)                       # where a checkpoint has it
    saved = unfinished(attempt)                          # for the next one
    done = played_of(attempt, ended, turns)
"""

from __future__ import annotations

import asyncio
import itertools
import time
from dataclasses import dataclass, field
from typing import Any

from bridge.generation import Completion
from megasync.episodes.record import Asked, History, recorded, turns_of
from megasync.episodes.segments import Turn
from megasync.episodes.task import Played
from megasync.episodes.wire import Ended
from megasync.rollouts.group import Group

STATE = "state"  # of the environment, in what a checkpoint has of an episode that goes on


@dataclass
class TurnGroup(Group):
    """One turn of an episode: a group of one sample, in the place of its episode's group.

    `before`: the turn that came before it. What was computed with the weights of another version is of no use to it.
    """

    parent: Group | None = None
    answer: asyncio.Future[Completion] | None = None
    before: TurnGroup | None = None

    @property
    def can_be_refused(self) -> bool:
        return True

    def refuse(self, error: Exception) -> None:
        if self.answer is not None and not self.answer.done():
            self.answer.set_exception(ValueError(str(error)))

    def held(self, version: int) -> tuple[int | None, int]:
        """By the turn before it, or by the first turn of another member."""
        former: Group | None = self.before or self.parent
        if former is None or former.oldest != version:
            return None, 0
        sampled = former.completions[0] if isinstance(former, TurnGroup) else None
        held = len(former.request.prompt_ids) + (len(sampled.token_ids) if isinstance(sampled, Completion) else 0)
        return former.replica, min(held, len(self.request.prompt_ids))

    def begin(self, replica: int, version: int) -> None:
        super().begin(replica, version)
        if self.parent is not None:
            self.parent.begin(replica, version)


@dataclass
class Attempt:
    """At one episode."""

    group: Group
    member: int
    number: int
    history: History = field(default_factory=History)
    asked: dict[int, Asked] = field(default_factory=dict)  # turns, by their number
    last: TurnGroup | None = None  # of its turns, that has ended
    waited_seconds: float = 0.0  # for the model, while nothing else went on
    num_waiting: int = 0
    waits_since: float = 0.0
    num_prompt: int = 0  # tokens of its turns' prompts
    num_held: int = 0

    def wait(self) -> None:
        if self.num_waiting == 0:
            self.waits_since = time.monotonic()
        self.num_waiting += 1

    def go_on(self) -> None:
        self.num_waiting -= 1
        if self.num_waiting == 0:
            self.waited_seconds += time.monotonic() - self.waits_since


def take_in(turn: TurnGroup) -> None:
    """Its sample has ended."""
    (completion,) = turn.completions
    assert turn.answer is not None
    assert isinstance(completion, Completion)
    if not turn.answer.done():
        turn.answer.set_result(completion)


def begun(group: Group, member: int) -> Attempt:
    """The first attempt of this process, which goes on where a checkpoint has it."""
    saved = group.playing.get(member)
    if saved is None:
        return Attempt(group, member, 0)
    turns = zip(saved.turns, turns_of(saved.branches, saved.turns), strict=True)
    history = History({record.number: turn for record, turn in turns}, dict(enumerate(saved.answers)), saved.info.get(STATE))
    asked = {record.number: Asked(record.number, record.seed, record.max_new_tokens, record.stop) for record in saved.turns}
    return Attempt(group, member, saved.num_failures, history, asked)


def unfinished(attempt: Attempt) -> Played:
    """With the turns that have ended. Answers in places behind one that has none yet are left out."""
    history = attempt.history
    branches, turns = recorded((attempt.asked[number], *turn) for number, turn in history.turns.items())
    answers = tuple(history.answers[place] for place in itertools.takewhile(history.answers.__contains__, itertools.count()))
    state = history.state if len(answers) == len(history.answers) else None
    return Played(branches, turns=turns, answers=answers, num_failures=attempt.number, info={STATE: state})


def played_of(attempt: Attempt, ended: Ended, turns: list[tuple[Any, Turn]]) -> Played:
    asked = (attempt.asked[number] for number in ended.kept)
    branches, records = recorded((how, *turn) for how, turn in zip(asked, turns, strict=True))
    is_cut = bool(ended.limit) or ended.is_cut_off or bool(turns and turns[-1][1].finish_reason == "length")
    return Played(
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
        is_anew=attempt.history.is_anew,
    )
