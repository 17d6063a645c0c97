"""`rollout.filter`: a function of the user's own that decides which groups are worth training. No torch in here.

    keep = resolve_filter("my_module:some_right")
    keep(FilterInput(prompt="12+34=", answer="46", extra={}, rewards=(0.0, 1.0), parts=({}, {}), num_tokens=(3, 4)))   # True

Leaves out the named filter, algorithm.filter_groups (engine/objective/advantages.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megasync.config.errors import ConfigError
from megasync.config.named import own_object
from megasync.data.data import Example
from megasync.episodes.task import EpisodeResult
from megasync.rollouts.group import Group

KEY = "rollout.filter"
WANTED = "a function of one FilterInput (megasync/rollouts/filters.py), which returns true for a group to train on, else false"


@dataclass(frozen=True)
class FilterInput:
    """The rewarded samples of one prompt."""

    prompt: str
    answer: str
    extra: Mapping[str, Any]  # the other fields of the data file's line
    rewards: Sequence[float]  # of each sample, weighted sums
    parts: Sequence[Mapping[str, float]]  # of each sample its rewards by name, without weights; empty where not known
    num_tokens: Sequence[int]  # of each sample, sampled ones
    source: str = ""  # the name of the prompt's source in data.train, where there are several


Filter = Callable[[FilterInput], bool]
TRIALS = (
    FilterInput("12+34=", "46", {}, (0.0, 1.0), ({"exact_match": 0.0}, {"exact_match": 1.0}), (3, 4)),
    FilterInput("5+6=", "11", {}, (0.0, 0.0), ({}, {}), (3, 4)),
)


def resolve_filter(path: str) -> Filter:
    """The function, whose errors name it; tried on two groups.

    Raises:
        ConfigError: it cannot be imported, does not take one FilterInput, raises, or returns no bool.
    """
    function = own_object(KEY, path, WANTED, ["a FilterInput"])

    def keep(group: FilterInput) -> bool:
        try:
            found = function(group)
        except Exception as error:
            raise ConfigError(f"{KEY} = {path}: raised {type(error).__name__}: {error}", remedy=f"name {WANTED}") from error
        if not isinstance(found, bool):
            raise ConfigError(f"{KEY} = {path}: returned {type(found).__name__} {found!r}, not a bool", remedy=f"name {WANTED}")
        return found

    for trial in TRIALS:
        keep(trial)
    return keep


def filter_input(group: Group, example: Example) -> FilterInput:
    """A filter's view of a finished group, without its greedy sample and without dropped episodes."""
    kept = group.trained_members
    done, scored = [group.completions[one] for one in kept], [group.scored[one] for one in kept]
    return FilterInput(
        prompt=example.prompt,
        answer=example.answer,
        extra=example.extra,
        rewards=tuple(one.total for one in scored if one),
        parts=tuple(one.parts for one in scored if one),
        num_tokens=tuple(one.num_sampled if isinstance(one, EpisodeResult) else len(one.token_ids) for one in done if one),
        source=example.source,
    )
