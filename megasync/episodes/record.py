"""The record of an episode, from which it can be played again: how turns were asked for, and the answers of environments.

Tokens, log-probs and versions are the branches'; a turn is a place in one of them. Leaves out files (rollouts/records.py).

    branches, turns = recorded([(asked, prompt_ids, turn), ...])
    prompt_ids, turn = turns_of(branches, turns)[0]
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from bridge.generation import TOKEN_ARRAYS, part_of_support
from megasync.episodes.segments import Branch, Recorder, Turn

if TYPE_CHECKING:
    from engine.sample import IntArray

MAX_ANSWER_CHARACTERS = 1_000_000  # of one answer as JSON; of a longer one the first SHOWN_CHARACTERS are kept, for logs
SHOWN_CHARACTERS = 1000


class Asked(NamedTuple):
    """The request for a turn, without its prompt and the settings that all turns of the run share."""

    number: int  # in the episode's order, from 0 on
    seed: int
    max_new_tokens: int
    stop: tuple[str, ...]


class TurnRecord(NamedTuple):
    """`length` tokens of a branch from `start` on, which were sampled after those before them."""

    branch: int
    start: int
    length: int
    finish_reason: str
    number: int
    seed: int
    max_new_tokens: int
    stop: tuple[str, ...]


class EnvironmentAnswer(NamedTuple):
    """The answer of an environment or a tool."""

    turn: int  # how many turns had been asked for before
    what: str  # init | reset | step | call NAME
    asked: Any  # the action or the arguments, as JSON has them
    value: Any  # the answer, as JSON has it
    is_whole: bool = True  # false: JSON cannot have it, or it was too long; `value` is a text to be shown then


@dataclass
class History:
    """An episode up to now, so that it can resume in another worker or run. It grows with the episode."""

    turns: dict[int, tuple[IntArray, Turn]] = field(default_factory=dict)  # prompt and what was sampled, by number
    answers: dict[int, EnvironmentAnswer] = field(default_factory=dict)  # by place
    state: Any = None  # of the environment after all of `answers`, as JSON has it
    resumed: set[int] = field(default_factory=set)  # turns of a checkpoint that answered again
    is_deadly: bool = False  # it, or an attempt before it, ended its process: it is played alone
    is_restart: bool = False  # a question or an answer after a resume was not the same: sampled again from there on

    def forget(self) -> None:
        """It starts from its begin."""
        self.turns.clear()
        self.answers.clear()
        self.resumed.clear()
        self.state, self.is_restart = None, True

    def keep_answer(self, place: int, answer: EnvironmentAnswer, state: Any, *, is_other: bool) -> None:
        """`is_other`: answers kept from that place on are not asked for any more."""
        for other in [other for other in self.answers if is_other and other > place]:
            del self.answers[other]
        self.answers[place], self.state = answer, state

    @property
    def answers_in_order(self) -> tuple[EnvironmentAnswer, ...]:
        return tuple(self.answers[place] for place in sorted(self.answers))


def recorded(turns: Iterable[tuple[Asked, Any, Turn]]) -> tuple[tuple[Branch, ...], tuple[TurnRecord, ...]]:
    """The branches that these turns, each with its prompt, make; and where in them each of those with tokens is."""
    recorder, records = Recorder(), []
    for asked, prompt_ids, turn in turns:
        if len(turn.token_ids):
            recorder.add(prompt_ids, turn)
            records.append(TurnRecord(recorder.last_branch, len(prompt_ids), len(turn.token_ids), turn.finish_reason, *asked))
    return tuple(recorder.branches()), tuple(records)


def turns_of(branches: Sequence[Branch], records: Iterable[TurnRecord]) -> list[tuple[IntArray, Turn]]:
    """The turns again, each with its prompt."""
    found = []
    for record in records:
        branch, end = branches[record.branch], record.start + record.length
        ids, log_probs, versions = (getattr(branch, name)[record.start : end] for name in TOKEN_ARRAYS)
        support = part_of_support(branch.support, len(branch.token_ids), slice(record.start, end))
        turn = Turn(ids, log_probs, versions, record.finish_reason, branch.routed_experts[: end - 1], support)
        found.append((branch.token_ids[: record.start], turn))
    return found


def as_json(value: Any, *, keeps_keys: bool = True) -> tuple[Any, bool]:
    """The value as JSON has it; a text to be shown, and False, where JSON cannot have it or it is too long."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        return repr(value)[:SHOWN_CHARACTERS], False
    if len(text) > MAX_ANSWER_CHARACTERS or (keeps_keys and not _has_its_keys(value)):
        return text[:SHOWN_CHARACTERS], False
    return json.loads(text), True


def _has_its_keys(value: Any) -> bool:
    """Whether all keys of its mappings are strings; JSON would convert others."""
    unread = [value]
    while unread:
        one = unread.pop()
        if isinstance(one, dict):
            if not all(isinstance(key, str) for key in one):
                return False
            unread += one.values()
        elif isinstance(one, list | tuple):
            unread += one
    return True


def _unsent(place: int, answer: EnvironmentAnswer, state: Any, is_other: bool) -> None:
    """Not recorded."""


class Answers:
    """The answers of one episode, in its worker. Those of a checkpoint are given again, as long as the questions are the same.

    place, former = answers.next("step", action)
    if former is None:
        answers.keep(place, "step", action, environment.step(action))
    """

    def __init__(
        self,
        former: Mapping[int, EnvironmentAnswer] | None = None,
        state: Any = None,
        num_turns: Callable[[], int] = lambda: 0,
        send: Callable[[int, EnvironmentAnswer, Any, bool], None] = _unsent,
    ) -> None:
        """`state`: of the environment after all of `former`; `num_turns`: that were asked for up to now; `send`: to who keeps
        them.
        """
        self._former, self.state = dict(former or {}), state
        self._num_turns, self._send = num_turns, send
        self._next, self._others = 0, set[int]()

    @property
    def has_more(self) -> bool:
        """Whether there is a former answer in the next place."""
        return self._next in self._former

    def next(self, what: str, asked: Any) -> tuple[int, EnvironmentAnswer | None]:
        """The place of the current request, and the recorded answer to it."""
        place, self._next = self._next, self._next + 1
        former = self._former.get(place)
        if former is not None and former.is_whole and (former.what, former.asked, True) == (what, *as_json(asked)):
            return place, former
        if former is not None:
            self._former, self.state = {other: one for other, one in self._former.items() if other < place}, None
            self._others.add(place)
        return place, None

    def keep(self, place: int, what: str, asked: Any, value: Any, state: Any = None) -> None:
        """`state`: of the environment after it, where that is known."""
        kept, is_whole = as_json(value)
        answer = EnvironmentAnswer(self._num_turns(), what, as_json(asked)[0], kept, is_whole)
        self._send(place, answer, state, place in self._others)
