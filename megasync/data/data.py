"""Prompts with answers from data files, and the order in which steps take them: a pure function of seed and step.

Leaves out files and their rows (tables.py), messages (conversations.py), and tokens, which the model's tokenizer makes later. No
torch in here.

    examples = load_examples("train.jsonl", "question", "answer")
    order = PromptOrder(num_examples=len(examples), seed=0)
    batch = [examples[order.index(ordinal)] for ordinal in range(64)]
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from bridge.layout.splitmix import splitmix64
from megasync.config.errors import ConfigError, nearest_name, some
from megasync.data.conversations import ARGUMENTS, TOOLS, Message, Turn, answered, as_messages, text_of, tools_of, unwritten
from megasync.data.tables import SHAPE_REMEDY, Note, Row, read_rows

MOST_EXACT = 2**53  # the largest whole number up to which a float holds every one


@dataclass(frozen=True, slots=True)
class Example:
    """One row of a data file. `line` counts from 1: lines of a JSONL file, else rows of a split."""

    prompt: str  # of a list of messages the last one
    answer: str  # of a conversation the last one of the assistant's
    line: int
    messages: tuple[Message, ...] = field(default=(), hash=False)  # where the prompt is a list of them
    extra: dict[str, Any] = field(default_factory=dict, hash=False)  # the other columns
    completion: tuple[Message, ...] = field(default=(), hash=False)  # of a conversation, which begins with an assistant's turn
    tools: tuple[dict[str, Any], ...] = field(default=(), hash=False)  # for the chat template, in OpenAI's form
    template_arguments: dict[str, Any] = field(default_factory=dict, hash=False)  # of this row's chat template

    @property
    def turns(self) -> tuple[Turn, ...]:
        """Role and content of each of the prompt's messages."""
        return tuple((message["role"], message.get("content") or "") for message in self.messages)


@dataclass(frozen=True, slots=True)
class Keys:
    """Which columns hold prompts and answers, and the names of the keys that say so."""

    prompt: str
    answer: str
    section: str = "data"

    @property
    def columns(self) -> list[str]:
        """All that are looked at."""
        return [TOOLS, ARGUMENTS, *(key.partition(".")[0] for key in (self.prompt, self.answer)), self.prompt, self.answer]


def load_examples(
    path: str | Path,
    prompt_key: str,
    answer_key: str,
    *,
    split: str = "",
    section: str = "data",
    split_key: str = "data.split",
    is_supervised: bool = False,
    note: Note = lambda _: None,
) -> list[Example]:
    """All examples in their order. A key a.b that is no column itself is field b of column a.

    `answer_key` empty: answers are empty. `section` and `split_key`: which keys of the config an error tells to write.
    `is_supervised`: a list of messages may end with the assistant's turn, and an answer may be such a list. `note` gets what is
    read in another way than it is written.

    Raises:
        ConfigError: names file, line or row, key, reason and remedy.
    """
    path, keys, told = Path(path), Keys(prompt_key, answer_key, section), dict[str, None]()
    rows = list(read_rows(path, split, split_key, keys.columns, note=told.setdefault))
    _decode_messages(rows, keys, told.setdefault, is_supervised=is_supervised)
    examples = [
        _example(place, row, number, keys, is_supervised=is_supervised) for number, (place, row) in enumerate(rows, start=1)
    ]
    if not examples:
        raise ConfigError(f"{path}: holds no examples", remedy=SHAPE_REMEDY)
    for text in [*told, *_notes(rows, keys)]:
        note(text)
    return examples


def _decode_messages(rows: Sequence[tuple[str, Row]], keys: Keys, note: Note, *, is_supervised: bool) -> None:
    """In place: columns whose every text is a list of messages, as JSON or as Python writes it."""
    for key in [keys.prompt, *([keys.answer] if is_supervised else [])]:
        texts = [row for _, row in rows if isinstance(row.get(key), str)]
        lists = [messages for row in texts if (messages := unwritten(row[key])) is not None]
        if lists and len(lists) == len(texts):
            note(f"the column {key!r} holds lists of messages written as texts, and they are read as messages")
            for row, messages in zip(texts, lists, strict=True):
                row[key] = messages
        elif lists:
            note(f"{len(lists)} of {len(texts)} texts of {key!r} are lists of messages written as texts, and stay texts")


def _notes(rows: Sequence[tuple[str, Row]], keys: Keys) -> list[str]:
    """What of the rows is taken in another way than it is written."""
    answers = [_field(row, keys.answer) for _, row in rows] if keys.answer else []
    floats = [value for value in answers if isinstance(value, float) and str(value) != _number(value)]
    notes = []
    if floats:
        shown = some((f"{value} as {_number(value)}" for value in floats), 2)
        notes.append(f"{len(floats)} of {len(rows)} answers {keys.answer!r} are floating-point numbers, written out: {shown}")
    if any(abs(value) > MOST_EXACT for value in floats):
        notes.append(f"answers {keys.answer!r} above 2**53 may have lost digits where they became floating-point numbers")
    unread = {name for _, row in rows for name in (TOOLS, ARGUMENTS) if row.get(name) and tools_of(name, row[name]) is None}
    notes += [f"the column {name!r} is not what TRL's is, and is not rendered into prompts" for name in sorted(unread)]
    return notes


def _example(place: str, row: Row, number: int, keys: Keys, *, is_supervised: bool) -> Example:
    prompt, where = _value(place, row, keys.prompt, f"{keys.section}.prompt_key"), f"{place}: {keys.prompt!r}"
    messages = as_messages(where, prompt, may_answer=is_supervised) if isinstance(prompt, list) else ()
    completion: tuple[Message, ...] = ()
    if messages and messages[-1]["role"] == "assistant":
        messages, completion = answered(where, messages)
    answer = _value(place, row, keys.answer, f"{keys.section}.answer_key") if keys.answer and not completion else ""
    if is_supervised and isinstance(answer, list):
        completion = as_messages(f"{place}: {keys.answer!r}", answer, may_answer=True, is_completion=True)
        messages = messages or ({"role": "user", "content": _text(place, keys.prompt, prompt)},)
    text = messages[-1].get("content") or "" if messages else _text(place, keys.prompt, prompt)
    if not text.strip():
        raise ConfigError(f"{place}: the prompt {keys.prompt!r} is empty", remedy="take the line out")
    line = place.rpartition(":")[2]
    return Example(
        text,
        text_of(completion[-1]) if completion else _text(place, keys.answer, answer),
        int(line) if line.isdigit() else number,
        messages,
        {name: value for name, value in row.items() if name not in (keys.prompt, keys.answer)},
        completion,
        tuple(tools_of(TOOLS, row.get(TOOLS)) or ()),
        dict(tools_of(ARGUMENTS, row.get(ARGUMENTS)) or {}),
    )


def _value(place: str, row: Row, key: str, config_key: str) -> Any:
    value, fields, names = None, row, [key] if key in row else key.split(".")
    for depth, name in enumerate(names):
        if not isinstance(fields, Mapping) or name not in fields:
            _missing(place, key, config_key, names[:depth], fields)
        value = fields = fields[name]
    return value


def _field(row: Row, key: str) -> Any:
    """As `_value`, None where there is none."""
    value: Any = row
    for name in [key] if key in row else key.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _missing(place: str, key: str, config_key: str, above: list[str], fields: Any) -> NoReturn:
    present = [".".join([*above, name]) for name in fields] if isinstance(fields, Mapping) else []
    near = nearest_name(key, present)
    remedy = f"write {config_key}={near or 'KEY'}, or give the line a {key!r}"
    raise ConfigError(f"{place}: has no key {key!r}", keys=", ".join(present[:20]) or "none", nearest=near, remedy=remedy)


def _text(place: str, key: str, value: Any) -> str:
    if value is None:
        raise ConfigError(f"{place}: {key!r} is empty: null, or no label", remedy="fill it in, or take the line out")
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number and not isinstance(value, str):
        message = f"{place}: {key!r} is a {type(value).__name__}, a text or a number is expected"
        raise ConfigError(message, remedy="write it as one text")
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{place}: {key!r} is {value}, which is no number", remedy="take the line out")
    return _number(value) if isinstance(value, float) else str(value)


def _number(value: float) -> str:
    """As a model would write it: 72 for 72.0, which a column of whole numbers becomes where one is missing; no exponent."""
    return np.format_float_positional(value, trim="-")


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
