"""Prompts with answers from data files, and the order in which steps take them: a pure function of seed and step.

Leaves out files and their rows (tables.py), and tokens, which the tokenizer of the model makes later. No torch in here.

    examples = load_examples("train.jsonl", "question", "answer")
    order = PromptOrder(num_examples=len(examples), seed=0)
    batch = [examples[order.index(ordinal)] for ordinal in range(64)]
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from bridge.layout.splitmix import splitmix64
from megasync.config.errors import ConfigError, nearest_name
from megasync.data.tables import SHAPE_REMEDY, Row, read_rows

Turn = tuple[str, str]  # role and content
ROLES = ("system", "user", "assistant")
TURNS_REMEDY = 'write it as [{"role": "user", "content": "1+2="}]'


@dataclass(frozen=True, slots=True)
class Example:
    """One row of a data file. `line` counts from 1: lines of a JSONL file, else rows of a split."""

    prompt: str  # of a list of messages the last one
    answer: str
    line: int
    turns: tuple[Turn, ...] = ()  # the messages, where the prompt is a list of them
    extra: dict[str, Any] = field(default_factory=dict, hash=False)  # the other columns


def load_examples(
    path: str | Path, prompt_key: str, answer_key: str, *, split: str = "", section: str = "data", split_key: str = "data.split"
) -> list[Example]:
    """All examples in their order. A key a.b that is no column itself is field b of column a.

    `answer_key` empty: answers are empty. `section` and `split_key`: which keys of the config an error tells to write.

    Raises:
        ConfigError: names file, line or row, key, reason and remedy.
    """
    path = Path(path)
    columns = [key.partition(".")[0] for key in (prompt_key, answer_key)] + [prompt_key, answer_key]
    rows = read_rows(path, split, split_key, columns)
    examples = [
        _example(place, row, number, (prompt_key, f"{section}.prompt_key"), (answer_key, f"{section}.answer_key"))
        for number, (place, row) in enumerate(rows, start=1)
    ]
    if not examples:
        raise ConfigError(f"{path}: holds no examples", remedy=SHAPE_REMEDY)
    return examples


def _example(place: str, row: Row, number: int, prompt_key: tuple[str, str], answer_key: tuple[str, str]) -> Example:
    prompt = _value(place, row, *prompt_key)
    answer = _text(place, answer_key[0], _value(place, row, *answer_key)) if answer_key[0] else ""
    line = place.rpartition(":")[2]
    turns = _turns(f"{place}: {prompt_key[0]!r}", prompt) if isinstance(prompt, list) else ()
    text = turns[-1][1] if turns else _text(place, prompt_key[0], prompt)
    if not text.strip():
        raise ConfigError(f"{place}: the prompt {prompt_key[0]!r} is empty", remedy="take the line out")
    extra = {name: value for name, value in row.items() if name not in (prompt_key[0], answer_key[0])}
    return Example(text, answer, int(line) if line.isdigit() else number, turns, extra)


def _value(place: str, row: Row, key: str, config_key: str) -> Any:
    value, fields, names = None, row, [key] if key in row else key.split(".")
    for depth, name in enumerate(names):
        if not isinstance(fields, Mapping) or name not in fields:
            _missing(place, key, config_key, names[:depth], fields)
        value = fields = fields[name]
    return value


def _missing(place: str, key: str, config_key: str, above: list[str], fields: Any) -> NoReturn:
    present = [".".join([*above, name]) for name in fields] if isinstance(fields, Mapping) else []
    near = nearest_name(key, present)
    remedy = f"write {config_key}={near or 'KEY'}, or give the line a {key!r}"
    raise ConfigError(f"{place}: has no key {key!r}", keys=", ".join(present[:20]) or "none", nearest=near, remedy=remedy)


def _text(place: str, key: str, value: Any) -> str:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number and not isinstance(value, str):
        message = f"{place}: {key!r} is a {type(value).__name__}, a text or a number is expected"
        raise ConfigError(message, remedy="write it as one text")
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{place}: {key!r} is {value}, which is no number", remedy="take the line out")
    return str(value)


def _turns(place: str, messages: list[Any]) -> tuple[Turn, ...]:
    """Of a list of messages: a system prompt at most, then turns, the last one the user's."""
    for number, message in enumerate(messages, start=1):
        problem = _wrong_message(message, number)
        if problem:
            raise ConfigError(f"{place}: message {number} {problem}", remedy=TURNS_REMEDY)
    if not messages or messages[-1]["role"] != "user":
        problem = f"ends with the {messages[-1]['role']}'s turn" if messages else "is a list without messages"
        raise ConfigError(f"{place} {problem}", remedy="end it with a user's turn, which the model is to answer")
    return tuple((message["role"], message["content"]) for message in messages)


def _wrong_message(message: Any, number: int) -> str:
    if not isinstance(message, Mapping):
        return f"is a {type(message).__name__}, not an object with role and content"
    for name in ("role", "content"):
        if not isinstance(message.get(name), str):
            return f"has a {name} that is a {type(message[name]).__name__}, not a text" if name in message else f"has no {name}"
    if message["role"] not in ROLES:
        return f"has the role {message['role']!r}, not one of {', '.join(ROLES)}"
    if message["role"] == "system" and number > 1:
        return "is a system prompt that is not the first message"
    more = [name for name, value in message.items() if name not in ("role", "content") and value is not None]
    return f"has {more[0]!r}, and role and content are expected" if more else ""


@dataclass(frozen=True)
class PromptOrder:
    """Which example is at which place of the whole run's order. Nothing to save: a step takes the next places.

    Place p is in epoch p // num_examples; each epoch is a permutation of all examples, so every example comes once
    an epoch, and a batch may run across the border of two. Without `shuffle` every epoch is in file order.
    """

    num_examples: int
    seed: int = 0
    shuffle: bool = True

    def index(self, ordinal: int) -> int:
        """Which example the prompt of that number is, counted from 0 over all steps."""
        epoch, place = divmod(ordinal, self.num_examples)
        return int(epoch_order(self.num_examples, self.seed, epoch)[place]) if self.shuffle else place


@lru_cache(maxsize=2)
def epoch_order(num_examples: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """A permutation of range(num_examples), the same on every machine and with every NumPy.

    Indices are sorted by the SplitMix64 hash of (seed, epoch, index), a counter-based random number.
    """
    key = splitmix64(splitmix64(np.array([seed], np.uint64)) + np.uint64(epoch))
    hashes = splitmix64(key + np.arange(num_examples, dtype=np.uint64))
    order = np.argsort(hashes, kind="stable")
    order.flags.writeable = False
    return order
