"""Samplers: which prompts come next, where that is not all in turn. `data.sampler` names one of ours, or a class of your own.

    class Mine:                                          # data.sampler: my_module:Mine
        def __init__(self, examples, seed, **arguments): ...     # arguments: data.sampler_arguments
        def __iter__(self): ...                          # indices of examples: one pass; asked again for the next
        def state_dict(self): ...                        # as JSON has it; the following prompts depend on nothing else
        def load_state_dict(self, state): ...
        def observe(self, visits): ...                   # may be left out: the rewards of what was trained

The protocol of torch's stateful samplers. It runs on rank 0, in the thread of the rollouts. An index comes twice in a batch only
where a new pass begins between the two. Leaves out who trains the prompts (rollouts/). No torch in here.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from megasync.config.data_section import DataConfig
from megasync.config.errors import ConfigError, nearest_name
from megasync.config.named import IMPORT_PATH, import_named
from megasync.data.data import Example, PromptOrder, turn

METHODS = ("__iter__", "state_dict", "load_state_dict")


@dataclass(frozen=True)
class Visit:
    """A prompt that was trained, or discarded since all of its rewards are equal. `step`: counted from 1."""

    index: int
    step: int
    rewards: tuple[float, ...]  # of its samples


class PromptSampler(Protocol):
    """See above; a method `observe(visits: Sequence[Visit])` is called after each batch where there is one."""

    def __iter__(self) -> Iterator[int]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Difficulty:
    """All examples in turn, but those whose rewards were all equal at `visits` visits in a row rest for `rest_steps` steps.

    One that has rested and is equal again rests again. Where all of a source rest those come back that have rested longest.
    Sources, of which `weights` has each one's share by name, take turns as in PromptOrder; a pass ends where one of them has been
    through its examples.
    """

    def __init__(
        self,
        examples: Sequence[Example],
        seed: int,
        *,
        visits: int = 2,
        rest_steps: int = 20,
        weights: Mapping[str, float] | None = None,
    ) -> None:
        for name, value in (("visits", visits), ("rest_steps", rest_steps)):
            if type(value) is not int or value < 1:
                raise ValueError(f"{name} = {value!r}: a whole number of at least 1 is expected")
        self.seed, self.visits, self.rest_steps = seed, visits, rest_steps
        self.weights = weights or {"": 1.0}
        found = {name: [index for index, each in enumerate(examples) if each.source == name] for name in self.weights}
        self.sources = list(found.values()) if weights else [list(range(len(examples)))]
        self.places, self.turns, self.step = [0] * len(self.sources), 0, 0
        self.ends: list[int] = []  # of the pass, by source; none before it has begun
        self.equal: dict[int, int] = {}  # visits in a row with equal rewards, by index
        self.until: dict[int, int] = {}  # the step after which an index comes back

    def __iter__(self) -> Iterator[int]:
        if not self.ends:  # else it goes on, in a resumed run
            for own in self.sources:
                self._wake(own)
            self.ends = [(place // len(own) + 1) * len(own) for place, own in zip(self.places, self.sources, strict=True)]
        while True:
            source, _ = turn(tuple(self.weights.values()), self.turns)
            index = self._next(source, self.ends[source])
            if index is None:
                self.ends = []
                return
            self.turns += 1
            yield index

    def _wake(self, source: Sequence[int]) -> None:
        """If all prompts of a source rest, let the ones that have rested longest return."""
        steps = [self.until.get(index, 0) for index in source]
        if min(steps) > self.step:
            for index, step in zip(source, steps, strict=True):
                if step == min(steps):
                    del self.until[index]

    def _next(self, source: int, end: int) -> int | None:
        """The source's next example that does not rest; None at `end`."""
        own = self.sources[source]
        order = PromptOrder(len(own), self.seed + source)
        while self.places[source] < end:
            index = own[order.index(self.places[source])]
            self.places[source] += 1
            if self.until.get(index, 0) <= self.step:
                return index
        return None

    def observe(self, visits: Sequence[Visit]) -> None:
        for visit in visits:
            self.step = visit.step
            is_equal = len(set(visit.rewards)) <= 1
            self.equal[visit.index] = min(self.visits, self.equal.get(visit.index, 0) + 1) if is_equal else 0
            if self.equal[visit.index] == self.visits:
                self.until[visit.index] = visit.step + self.rest_steps

    def state_dict(self) -> dict[str, Any]:
        own = {"places": self.places, "ends": self.ends, "turns": self.turns, "step": self.step}
        return {**own, "equal": [*self.equal.items()], "until": [*self.until.items()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if len(state["places"]) != len(self.sources):
            raise ValueError(f"{len(state['places'])} sources, and data.train has {len(self.sources)}")
        self.places, self.turns, self.step = state["places"], state["turns"], state["step"]
        self.ends = state.get("ends", [])  # absent in older checkpoints
        self.equal, self.until = dict(state["equal"]), dict(state["until"])


SAMPLERS: dict[str, Callable[..., Any]] = {"difficulty": Difficulty}
ARGUMENTS = ("visits", "rest_steps")  # that a config gives them


def make_sampler(data: DataConfig, examples: Sequence[Example], seed: int) -> PromptSampler:
    """A new one.

    Raises:
        ConfigError: there is no such class, it cannot be made, or lacks a method.
    """
    headline, name = f"data.sampler = {data.sampler!r}", data.sampler
    make = SAMPLERS.get(name)
    if make is None and not IMPORT_PATH.fullmatch(name):
        lines = {"choices": ", ".join([*SAMPLERS, "package.module:Class"]), "nearest": nearest_name(name, SAMPLERS)}
        raise ConfigError(f"{headline}: there is no such sampler", **lines, remedy="write data.sampler=difficulty, or a class")
    if make is None:
        module, make = import_named(name, headline)
        if not isinstance(make, type):
            raise ConfigError(f"{headline}: is no class of {module.__file__}", remedy="name a class")
    arguments = data.sampler_arguments
    if name in SAMPLERS:
        _check_arguments(arguments)
    if name in SAMPLERS and data.train_sources:
        arguments = {"weights": {source: each.weight for source, each in data.train_sources.items()}, **arguments}
    try:
        sampler: PromptSampler = make(examples, seed, **arguments)
    except Exception as error:
        given = f"data.sampler_arguments = {data.sampler_arguments}"
        raise ConfigError(f"{headline}: {type(error).__name__}: {error}", given=given, remedy="mend the class or them") from error
    if missing := [method for method in METHODS if not callable(getattr(sampler, method, None))]:
        remedy = "write it, so that a resumed run continues where it was (megasync/data/sampler.py)"
        raise ConfigError(f"{headline}: has no {', '.join(missing)}", needs=", ".join(METHODS), remedy=remedy)
    return sampler


def _check_arguments(arguments: Mapping[str, Any]) -> None:
    """ConfigError for an argument that our samplers do not have."""
    for name in (each for each in arguments if each not in ARGUMENTS):
        near, key = nearest_name(name, ARGUMENTS), f"data.sampler_arguments.{name}"
        message = f"{key} = {arguments[name]!r}: there is no such argument"
        remedy = f"write data.sampler_arguments.{near}" if near else "leave it out"
        raise ConfigError(message, choices=", ".join(ARGUMENTS), nearest=near, remedy=remedy)


class SampledOrder:
    """The examples of a run's prompts, by ordinal, as a sampler draws them: each once, when it is asked for first."""

    def __init__(self, data: DataConfig, examples: Sequence[Example], seed: int) -> None:
        self.name, self.batch_size, self.num_examples = data.sampler, data.batch_size, len(examples)
        self.sampler = make_sampler(data, examples, seed)
        self._pass = self._begin()
        self._drawn: dict[int, int] = {}  # by ordinal, until it is trained
        self._batch, self._in_batch = -1, set[int]()

    def index(self, ordinal: int) -> int:
        """Index of the example of a prompt.

        Raises:
            ConfigError: the sampler gives none, one that does not exist, or one that the batch has.
        """
        if ordinal not in self._drawn:
            if ordinal // self.batch_size != self._batch:
                self._batch, self._in_batch = ordinal // self.batch_size, set()
            self._drawn[ordinal] = self._draw()
        return self._drawn[ordinal]

    def _begin(self) -> Iterator[int]:
        with self._own("__iter__"):
            return iter(self.sampler)

    def _next(self) -> int | None:
        with self._own("__iter__"):
            return next(self._pass, None)

    @contextmanager
    def _own(self, method: str) -> Iterator[None]:
        """ConfigError for any error of the sampler's own code."""
        try:
            yield
        except Exception as error:
            message = f"data.sampler = {self.name!r}: {method} raised {type(error).__name__}: {error}"
            raise ConfigError(message, remedy="mend the class") from error

    def _draw(self) -> int:
        drawn = self._next()
        if drawn is None:
            self._pass, self._in_batch = self._begin(), set()
            drawn = self._next()
        headline, remedy = f"data.sampler = {self.name!r}", f"give indices from 0 to {self.num_examples - 1}"
        if drawn is None:
            raise ConfigError(f"{headline}: a pass over the data gave no index", remedy=remedy)
        try:
            index = operator.index(drawn)
        except TypeError:
            raise ConfigError(f"{headline}: gave {drawn!r}, which is no index", remedy=remedy) from None
        if not 0 <= index < self.num_examples:
            raise ConfigError(f"{headline}: gave {index}, and there are {self.num_examples} examples", remedy=remedy)
        if index in self._in_batch:
            remedy = "give each index once a pass, or begin a new pass"
            raise ConfigError(f"{headline}: gave {index} twice in a batch of data.batch_size = {self.batch_size}", remedy=remedy)
        self._in_batch.add(index)
        return index

    def observe(self, step: int, rewards: Iterable[tuple[int, Sequence[float]]]) -> None:
        """These prompts, by ordinal, are done with; `step` trains them, or has discarded them."""
        done = {ordinal: Visit(self._drawn[ordinal], step, tuple(own)) for ordinal, own in sorted(rewards)}
        if (look := getattr(self.sampler, "observe", None)) is not None:
            with self._own("observe"):
                look([*done.values()])
        for ordinal in done:
            del self._drawn[ordinal]

    def state(self) -> str:
        """The sampler's, and the prompts that are drawn and not done with."""
        own = {"name": self.name, "num_examples": self.num_examples, "drawn": [*self._drawn.items()]}
        with self._own("state_dict"):
            state = self.sampler.state_dict()
        try:
            return json.dumps({**own, "state": state})
        except (TypeError, ValueError) as error:
            message = f"data.sampler = {self.name!r}: its state is not what JSON has: {error}"
            raise ConfigError(message, remedy="return numbers, texts, lists and dicts from state_dict") from error

    def restore(self, state: str) -> str:
        """Continue from a `state`; a note where it is not this sampler's, which then begins at its start."""
        saved: dict[str, Any] = json.loads(state) if state else {"name": "", "num_examples": self.num_examples}
        if (saved["name"], saved["num_examples"]) != (self.name, self.num_examples):
            then = f"data.sampler was {saved['name']!r}, with {saved['num_examples']} examples, and is {self.name!r}, with"
            return f"{then} {self.num_examples}: it begins at its start"
        try:
            self.sampler.load_state_dict(saved["state"])
        except Exception as error:
            message = f"data.sampler = {self.name!r}: cannot load its state: {type(error).__name__}: {error}"
            raise ConfigError(message, remedy="mend load_state_dict, or write checkpoint.resume=never") from error
        self._pass, self._drawn = self._begin(), dict(saved["drawn"])
        return ""


def check_sampler(data: DataConfig, examples: Sequence[Example], seed: int) -> None:
    """Draw two batches before anything starts, and the second once more from the state between.

    Raises:
        ConfigError: as SampledOrder; or the restored sampler draws other prompts.
    """
    if not data.sampler:
        if data.sampler_arguments:
            message = f"data.sampler_arguments = {data.sampler_arguments}: there is no data.sampler"
            raise ConfigError(message, remedy="write data.sampler, or leave data.sampler_arguments out")
        return
    first, second = SampledOrder(data, examples, seed), SampledOrder(data, examples, seed)
    batch = range(data.batch_size)
    trained = [first.index(ordinal) for ordinal in batch]
    first.observe(1, [(ordinal, (0.0, 1.0)) for ordinal in batch])
    second.restore(first.state())
    batch = range(data.batch_size, 2 * data.batch_size)
    found = [[order.index(ordinal) for ordinal in batch] for order in (first, second)]
    if found[0] != found[1]:
        places = f"{found[0][:4]} and {found[1][:4]} after {trained[-4:]}"
        message = f"data.sampler = {data.sampler!r}: with its state restored it draws other examples ({places})"
        raise ConfigError(message, remedy="let state_dict hold all that the next index depends on")
