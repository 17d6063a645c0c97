"""Arguments and results of an episode.

Leaves out the model that it talks to (chat.py).

    async def episode(task: Task, model: Model) -> float | Result | None:
        ...
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megasync.episodes.record import EnvironmentAnswer, TurnRecord
    from megasync.episodes.segments import Branch


@dataclass(frozen=True, slots=True)
class Task:
    """One line of the data; each member of its group plays an episode of it."""

    prompt: str
    prompt_ids: tuple[int, ...]
    answer: str
    extra: Mapping[str, Any] = field(default_factory=dict, hash=False)  # the other fields of the line
    seed: int = 0  # of the group: its members draw the same values from it, and so does a repeated run
    member: int = 0  # of the group
    turns: tuple[tuple[str, str], ...] = ()  # the prompt as messages: role and content, with data.system_prompt
    line: int = 0  # of the data file, from 1


@dataclass(frozen=True, slots=True)
class Result:
    """The result of an episode. Without a reward, `rollout.reward` scores the text of its last turn."""

    reward: float | None
    metrics: Mapping[str, float] = field(default_factory=dict)  # logged as episode/NAME, a mean over episodes
    info: Mapping[str, Any] = field(default_factory=dict)  # for samples.jsonl, as JSON
    is_cut_off: bool = False  # by a limit that the episode caught; its finish_reason is length
    # of each request to the model, in their order; the reward is their sum, or None. Without them the last turn has the reward
    turn_rewards: Sequence[float] | None = None


class EpisodeLimitError(ValueError):
    """A turn would be one too many, or its prompt leaves no room. An episode that does not catch it ends there, cut off."""


@dataclass(frozen=True, slots=True, eq=False)
class EpisodeResult:
    """An episode that has ended, with its training sequences."""

    branches: tuple[Branch, ...] = ()
    reward: float | None = None  # None: to be scored
    finish_reason: str = "stop"  # length: its last turn was cut off, or a limit ended it
    num_turns: int = 0
    seconds: float = 0.0  # from its begin to its end
    tool_seconds: float = 0.0  # of these, in its own code and its tools (tool_clock.py)
    num_failures: int = 0  # attempts that failed
    is_dropped: bool = False  # it failed, and has no part in its group
    num_prompt: int = 0  # tokens of all turns' prompts
    num_held: int = 0  # of these, that the replica had from the turn before, as far as the run knows
    metrics: Mapping[str, float] = field(default_factory=dict)
    info: Mapping[str, Any] = field(default_factory=dict)
    turns: tuple[TurnRecord, ...] = ()
    answers: tuple[EnvironmentAnswer, ...] = ()
    num_resumed: int = 0  # turns of a checkpoint from which it resumed
    is_restart: bool = False  # it could not resume from that checkpoint
    turn_rewards: tuple[float, ...] = ()  # whose sum is `reward`; empty: all of it is the last turn's

    @property
    def num_sampled(self) -> int:
        return sum(int(branch.is_sampled.sum()) for branch in self.branches)

    @property
    def num_given(self) -> int:
        """Tokens behind a branch's prompt that were not sampled in it."""
        return sum(len(branch.token_ids) - branch.prompt_length for branch in self.branches) - self.num_sampled

    def turn_returns(self, reward: float) -> tuple[float, ...]:
        """For each turn, in the order of requests, the sum of its reward and those of later turns. `reward`: of the episode."""
        rewards = self.turn_rewards or (*(0.0,) * (self.num_turns - 1), reward)
        return tuple(math.fsum(rewards[turn:]) for turn in range(len(rewards)))

    @property
    def turn_spans(self) -> list[list[tuple[int, int, int]]]:
        """For each branch: turn, first response token and number of the tokens that were sampled in it."""
        spans: list[list[tuple[int, int, int]]] = [[] for _ in self.branches]
        for turn, record in enumerate(sorted(self.turns, key=lambda record: record.number)):
            first = record.start - self.branches[record.branch].prompt_length
            spans[record.branch].append((turn, first, record.length))
        return spans

    @property
    def oldest(self) -> int | None:
        """The version of the oldest sampled token."""
        versions = [int(branch.weight_versions[branch.is_sampled].min()) for branch in self.branches]
        return min(versions, default=None)

    @property
    def final_ids(self) -> list[int]:
        """The tokens of the turn that ended last, in whichever branch."""
        if not self.turns:
            return []
        last = self.turns[-1]
        ids: list[int] = self.branches[last.branch].token_ids[last.start : last.start + last.length].tolist()
        return ids
