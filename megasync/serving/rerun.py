"""The environments of recorded episodes, run again against the recorded turns: no replica is asked, each turn answers as it did.

Where an environment, a tool or the episode's function gives something else than then, its episode ends there and is named. Leaves
out whether the model would sample the same again (compare.py).

    changes = rerun(config, {12: members})[12]
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

import numpy as np

from megasync.config.errors import refuse_if
from megasync.config.schema import Config
from megasync.data.load import RunData, load_data
from megasync.data.prompts import Prompts
from megasync.episodes.pool import EpisodePool
from megasync.episodes.record import EnvironmentAnswer, History, turns_of
from megasync.episodes.segments import Turn
from megasync.episodes.task import Played, Task
from megasync.episodes.wire import Ask
from megasync.rollouts.records import RecordedGroup
from megasync.rollouts.requests import task_of
from megasync.rollouts.turns import EpisodeSettings, episode_settings

SHOWN = 60  # characters or tokens


@dataclass(frozen=True)
class Change:
    """`turn`, from 1: the turn after which something else came; 0: before the first."""

    group: int
    member: int
    turn: int
    what: str


def rerun(config: Config, steps: Mapping[int, Mapping[tuple[int, int], RecordedGroup]]) -> dict[int, list[Change]]:
    """What differs first in each episode of a step where something does. Members that were dropped, or failed, are left out.

    Raises:
        ConfigError: the data is another than it was.
    """
    data = load_data(config)
    again = {step: _again(config, data, members) for step, members in steps.items()}
    found = iter(asyncio.run(_all(config, [each for of_step in again.values() for each in of_step])))
    changes = {step: [next(found) for _ in of_step] for step, of_step in again.items()}
    return {step: [change for change in of_step if change is not None] for step, of_step in changes.items()}


def _again(config: Config, data: RunData, members: Mapping[tuple[int, int], RecordedGroup]) -> list[_Again]:
    order, again = data.order(config), list[_Again]()
    for (key, member), group in members.items():
        played: Any = group.members[member]
        example = data.train[order.index(key)]
        same = data.prompts.prompt_ids(example) == group.request.prompt_ids
        message = f"episode {key}/{member}: line {example.line} of data.train is another one than it was"
        refuse_if(not same, message, remedy="bring the data back that the run was trained on, or write data.train=FILE")
        if played.turns:
            task = replace(task_of(data.prompts, example, group.request), member=member)
            again.append(_Again(key, task, played, episode_settings(config), data.prompts))
    return again


async def _all(config: Config, again: list[_Again]) -> list[Change | None]:
    pool = EpisodePool(config)
    try:
        return await asyncio.gather(*(each.play(pool) for each in again))
    finally:
        pool.close()


class _Again:
    """One episode."""

    def __init__(self, group: int, task: Task, played: Played, settings: EpisodeSettings, prompts: Prompts) -> None:
        self.group, self.task, self.played, self.settings, self.prompts = group, task, played, settings, prompts
        self.turns = dict(zip((one.number for one in played.turns), turns_of(played.branches, played.turns), strict=True))
        self.asked, self.refused = set[int](), list[Change]()

    async def play(self, pool: EpisodePool) -> Change | None:
        history = History()
        ended, _ = await pool.run(self.task, self._ask, history)
        is_over = not self.refused and ended.failure is None
        if change := self._answers(history.answers_in_order, is_over=is_over):
            return change
        if self.refused:
            return self.refused[0]
        last = max(self.asked, default=-1) + 1
        if ended.failure is not None:
            return self._change(last, f"it {ended.failure.what}")
        if missing := self.turns.keys() - self.asked:
            return self._change(last, f"it ended, and turn {min(missing) + 1} had come")
        reward = 0.0 if ended.limit else ended.reward
        same = reward == self.played.reward
        return None if same else self._change(last, f"its reward was {self.played.reward}, and is {reward}")

    async def _ask(self, asked: Ask) -> Turn:
        """As it was answered then.

        Raises:
            ValueError: it is another question.
        """
        self.settings.room(asked)
        known, ids = self.turns.get(asked.turn), asked.prompt_ids
        if known is None:
            self.refused.append(self._change(asked.turn, f"it asks for turn {asked.turn + 1}, which is not recorded"))
        elif not np.array_equal(known[0], ids):
            length = min(len(known[0]), len(ids))
            differs = known[0][:length] != ids[:length]
            first = int(np.argmax(differs)) if differs.any() else length
            then, now = (self._shown(each[first : first + SHOWN]) for each in (known[0], ids))
            told = f"the prompt of turn {asked.turn + 1} differs from token {first + 1} on: it went on {then}, and does {now}"
            self.refused.append(self._change(asked.turn, told))
        if self.refused or known is None:
            raise ValueError("it is not as it was recorded")
        self.asked.add(asked.turn)
        return known[1]

    def _answers(self, now: tuple[EnvironmentAnswer, ...], *, is_over: bool) -> Change | None:
        """The first that differs. Those that are missing count where the episode came to its end."""
        for then, own in zip_longest(self.played.answers, now):
            if own is None:
                return self._change(then.turn, f"{_called(then)} was asked for, and is not") if is_over else None
            if then is None:
                return self._change(own.turn, f"{_called(own)} was not asked for, and is")
            if (then.what, then.asked) != (own.what, own.asked):
                return self._change(own.turn, f"{_called(then)} was asked for, and is {_called(own)}")
            if then.value != own.value:
                return self._change(own.turn, f"{_called(then)} answered {_short(then.value)}, and answers {_short(own.value)}")
        return None

    def _change(self, turn: int, what: str) -> Change:
        return Change(self.group, self.task.member, turn, what)

    def _shown(self, ids: Any) -> str:
        return _short(self.prompts.detokenizer.text(ids.tolist())) if len(ids) else "no further"


def _called(answer: EnvironmentAnswer) -> str:
    return f"{answer.what}({_short(answer.asked)})"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 2 * SHOWN else f"{text[: 2 * SHOWN]} ..."
