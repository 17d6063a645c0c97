"""Prompts with answers from data files, and the order in which steps take them: a pure function of seed and step.

Leaves out files and their rows (tables.py), messages (conversations.py), and tokens, which the model's tokenizer makes later. No
torch in here.

    examples = load_examples("train.jsonl", "question", "answer")
    order = PromptOrder(num_examples=len(examples), seed=0)
    batch = [examples[order.index(ordinal)] for ordinal in range(64)]
"""

from __future__ import annotations

import heapq
import math
import re
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from bridge.layout.splitmix import splitmix64
from megasync.config.data_section import ANSWER_KEY
from megasync.config.errors import ConfigError, nearest_name, some
from megasync.data.conversations import (
    ARGUMENTS,
    TOOLS,
    TURNS_REMEDY,
    Message,
    Turn,
    answered,
    as_messages,
    is_like_messages,
    text_of,
    tools_of,
    unwritten,
)
from megasync.data.tables import SHAPE_REMEDY, Note, Row, read_rows

POINT_ZERO = re.compile(r"-?\d+\.0")  # as pandas writes whole numbers of a column where some are missing
MAX_EXACT_INTEGER = 2**53  # a float represents every whole number up to this one


@dataclass(frozen=True, slots=True)
class Example:
    """One row of a data file. `line` counts from 1: lines of a JSONL file, else rows of a split."""

    prompt: str  # text; for a list of messages the content of the last one
    answer: str  # text; for a conversation the last assistant turn
    line: int
    messages: tuple[Message, ...] = field(default=(), hash=False)  # the prompt, if it is a list of messages
    extra: dict[str, Any] = field(default_factory=dict, hash=False)  # the other columns
    completion: tuple[Message, ...] = field(default=(), hash=False)  # a conversation from its first assistant turn on
    tools: tuple[dict[str, Any], ...] = field(default=(), hash=False)  # for the chat template, in OpenAI's form
    template_arguments: dict[str, Any] = field(default_factory=dict, hash=False)  # variables of this row for the chat template
    source: str = ""  # the name of its source in data.train, where there are several
    rewards: tuple[str, ...] = ()  # names of rollout.reward that score it; empty: all
    in_shard: str = field(default="", compare=False)  # line or row and file, if the split has several files

    @property
    def place(self) -> str:
        """Line or row of the example, for error messages."""
        return self.in_shard or f"line {self.line}"

    @property
    def turns(self) -> tuple[Turn, ...]:
        """Role and content of each of the prompt's messages."""
        return tuple((message["role"], message.get("content") or "") for message in self.messages)


@dataclass(frozen=True, slots=True)
class Keys:
    """The columns of prompts and answers. `section`: section of the config that names them, for error messages."""

    prompt: str
    answer: str
    section: str = "data"

    @property
    def columns(self) -> list[str]:
        """All columns that are read."""
        return [TOOLS, ARGUMENTS, *(key.partition(".")[0] for key in (self.prompt, self.answer)), self.prompt, self.answer]


def load_examples(  # noqa: PLR0913 # how a file is read, by name
    path: str | Path,
    prompt_key: str,
    answer_key: str,
    *,
    split: str = "",
    section: str = "data",
    split_key: str = "data.split",
    is_supervised: bool = False,
    trains: bool = True,
    note: Note = lambda _: None,
) -> list[Example]:
    """All examples in the order of the files. A key a.b is field b of column a, unless there is a column a.b.

    `answer_key` empty: answers are empty. `section` and `split_key`: config keys that error messages name. `is_supervised`: a
    list of messages may end with the assistant's turn, and an answer may be a list of messages. With `trains` there has to be
    one, and all of its turns are the completion, else the last one alone. `note` gets a line about each conversion of values.

    Raises:
        ConfigError: names file, line or row, key, reason and remedy.
    """
    path, keys, notes = Path(path), Keys(prompt_key, answer_key, section), dict[str, None]()
    rows = list(read_rows(path, split, split_key, keys.columns, note=notes.setdefault))
    has_shards = len({place.rpartition(":")[0] for place, _ in rows}) > 1
    _decode_messages(rows, keys, notes.setdefault, is_supervised=is_supervised)
    examples = [
        _example(place, row, number, keys, is_supervised=is_supervised, trains=trains, has_shards=has_shards)
        for number, (place, row) in enumerate(rows, start=1)
    ]
    if not examples:
        raise ConfigError(f"{path}: holds no examples", remedy=SHAPE_REMEDY)
    for text in [*notes, *_notes(rows, keys)]:
        note(text)
    return examples


def _decode_messages(rows: Sequence[tuple[str, Row]], keys: Keys, note: Note, *, is_supervised: bool) -> None:
    """Decodes, in place, columns whose texts are all lists of messages, as JSON or as Python literals."""
    for key in [keys.prompt, *([keys.answer] if is_supervised else [])]:
        texts = [row for _, row in rows if isinstance(row.get(key), str)]
        lists = [messages for row in texts if (messages := unwritten(row[key])) is not None]
        if lists and len(lists) == len(texts):
            note(f"the column {key!r} holds lists of messages written as texts, and they are read as messages")
            for row, messages in zip(texts, lists, strict=True):
                row[key] = messages
        elif lists:
            note(f"{len(lists)} of {len(texts)} texts of {key!r} are lists of messages written as texts, and stay texts")
        elif num_alike := sum(is_like_messages(row[key]) for row in texts):
            reason = "look like messages, are no list of them in JSON or Python, and stay texts"
            note(f"{num_alike} of {len(texts)} texts of {key!r} {reason}")


def _notes(rows: Sequence[tuple[str, Row]], keys: Keys) -> list[str]:
    """Notes about answers that are floating-point numbers or written as such, and about unusable columns of tools."""
    answers = [_field(row, keys.answer) for _, row in rows] if keys.answer else []
    floats = [value for value in answers if isinstance(value, float) and str(value) != _number(value)]
    notes = []
    if floats:
        shown = some((f"{value} as {_number(value)}" for value in floats), 2)
        notes.append(f"{len(floats)} of {len(rows)} answers {keys.answer!r} are floating-point numbers, written out: {shown}")
    if any(abs(value) > MAX_EXACT_INTEGER for value in floats):
        notes.append(f"answers {keys.answer!r} above 2**53 are floating-point numbers and may have lost digits")
    pointed = [value for value in answers if isinstance(value, str) and POINT_ZERO.fullmatch(value)]
    if pointed and len(pointed) == sum(value not in (None, "") for value in answers):
        shown = f"{pointed[0]!r}, which exact_match does not take for {pointed[0][:-2]!r}"
        notes.append(f"all answers {keys.answer!r} are texts such as {shown}")
    unread = {name for _, row in rows for name in (TOOLS, ARGUMENTS) if row.get(name) and tools_of(name, row[name]) is None}
    notes += [f"the column {name!r} does not have TRL's format and is not rendered into prompts" for name in sorted(unread)]
    return notes


def _example(place: str, row: Row, number: int, keys: Keys, *, is_supervised: bool, trains: bool, has_shards: bool) -> Example:
    prompt, where = _value(place, row, keys.prompt, f"{keys.section}.prompt_key"), f"{place}: {keys.prompt!r}"
    messages = as_messages(where, prompt, may_answer=is_supervised) if isinstance(prompt, list) else ()
    completion: tuple[Message, ...] = ()
    if messages and messages[-1]["role"] == "assistant":
        messages, completion = answered(where, messages, last=not trains)
        if not trains and isinstance(_field(row, keys.answer) if keys.answer else None, str | int | float):
            completion = ()  # the answer has a column of its own
    needs_answer = is_supervised and trains
    has_no_answer = keys.answer == ANSWER_KEY and needs_answer and messages and _field(row, keys.answer) is None
    has_answer = keys.answer and not completion and not has_no_answer
    answer = _value(place, row, keys.answer, f"{keys.section}.answer_key") if has_answer else ""
    if is_supervised and isinstance(answer, list):
        completion = as_messages(f"{place}: {keys.answer!r}", answer, may_answer=True, is_completion=True)
        messages = messages or ({"role": "user", "content": _text(place, keys.prompt, prompt)},)
        if not trains:
            messages, completion = answered(where, (*messages, *completion), last=True)
    if needs_answer and messages and not completion and answer == "":
        message = f"{where} ends with the {messages[-1]['role']}'s turn, and there is no answer to train on"
        raise ConfigError(message, remedy="end it with the assistant's turn, or name the answers' column in data.answer_key")
    text = messages[-1].get("content") or "" if messages else _text(place, keys.prompt, prompt)
    if not text.strip():
        raise ConfigError(f"{place}: the prompt {keys.prompt!r} is empty", remedy="take the line out")
    file, kind, line = place.rpartition(": row ") if ": row " in place else place.rpartition(":")
    return Example(
        text,
        text_of(completion[-1]) if completion else _text(place, keys.answer, answer),
        int(line) if kind == ":" else number,
        messages,
        {name: value for name, value in row.items() if name not in (keys.prompt, keys.answer)},
        completion,
        tuple(tools_of(TOOLS, row.get(TOOLS)) or ()),
        dict(tools_of(ARGUMENTS, row.get(ARGUMENTS)) or {}),
        in_shard=f"{'line' if kind == ':' else 'row'} {line} of {Path(file).name}" if has_shards else "",
    )


def _value(place: str, row: Row, key: str, config_key: str) -> Any:
    value, fields, names = None, row, [key] if key in row else key.split(".")
    for depth, name in enumerate(names):
        if not isinstance(fields, Mapping) or name not in fields:
            _missing(place, key, config_key, names[:depth], fields)
        value = fields = fields[name]
    return value


def _field(row: Row, key: str) -> Any:
    """Like `_value`, but None if the key is missing."""
    value: Any = row
    for name in [key] if key in row else key.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _missing(place: str, key: str, config_key: str, above: list[str], fields: Any) -> NoReturn:
    if not isinstance(fields, Mapping):
        remedy = f"write {config_key}={'.'.join(above)}, or give the line a {key!r}"
        raise ConfigError(f"{place}: {'.'.join(above)!r} is a {type(fields).__name__}, without a field {key!r}", remedy=remedy)
    present = [".".join([*above, name]) for name in fields]
    near = nearest_name(key, present)
    remedy = f"write {config_key}={near or 'KEY'}, or give the line a {key!r}"
    raise ConfigError(f"{place}: has no key {key!r}", keys=", ".join(present[:20]) or "none", nearest=near, remedy=remedy)


def _text(place: str, key: str, value: Any) -> str:
    if value is None:
        raise ConfigError(f"{place}: {key!r} is empty: null, or no label", remedy="fill it in, or take the line out")
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number and not isinstance(value, str):
        message = f"{place}: {key!r} is a {type(value).__name__}, a text or a number is expected"
        is_message = isinstance(value, Mapping) and "content" in value
        raise ConfigError(message, remedy=TURNS_REMEDY if is_message else "write it as one text")
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{place}: {key!r} is {value}, which is no number", remedy="take the line out")
    return _number(value) if isinstance(value, float) else str(value)


def _number(value: float) -> str:
    """The number without exponent and .0, as a model writes it: a missing value turns a column of whole numbers into floats."""
    return np.format_float_positional(value, trim="-")


@dataclass(frozen=True)
class PromptOrder:
    """The order of examples over all epochs, as a function of the seed: there is no state to save.

    Place p is in epoch p // num_examples. Each epoch is a permutation of all examples, so that every example occurs once per
    epoch; a batch may span two epochs. Without `shuffle` every epoch is in file order.

    With `sources`, the number of examples and the weight of each, these lie one after the other; each has epochs of its own, and
    they take turns (`turn`), so that of the first p prompts each has its share to within one or, of many sources, a few.
    """

    num_examples: int
    seed: int = 0
    shuffle: bool = True
    sources: tuple[tuple[int, float], ...] = ()

    def index(self, ordinal: int) -> int:
        """Index of the example at place `ordinal`, counted from 0 over all steps."""
        if self.sources:
            source, place = turn(tuple(weight for _, weight in self.sources), ordinal)
            first = sum(number for number, _ in self.sources[:source])
            return first + PromptOrder(self.sources[source][0], self.seed + source, self.shuffle).index(place)
        epoch, place = divmod(ordinal, self.num_examples)
        return int(epoch_order(self.num_examples, self.seed, epoch)[place]) if self.shuffle else place


def turn(weights: tuple[float, ...], ordinal: int) -> tuple[int, int]:
    """Whose turn it is at place `ordinal`, and how many it had before.

    The turn j of a source with weight w comes at time (j + 1/2) / w; at equal times the first source is first.
    """
    sources, turns, due = _turns(weights)
    while len(sources) <= ordinal:
        _, source, place = heapq.heappop(due)
        sources.append(source)
        turns.append(place)
        heapq.heappush(due, ((place + 1.5) / weights[source], source, place + 1))
    return sources[ordinal], turns[ordinal]


@lru_cache(maxsize=8)
def _turns(weights: tuple[float, ...]) -> tuple[array[int], array[int], list[tuple[float, int, int]]]:
    """Sources and their turns by ordinal, as far as they were asked for; the next turn of each source, a heap."""
    due = [(0.5 / weight, source, 0) for source, weight in enumerate(weights)]
    heapq.heapify(due)
    return array("H"), array("Q"), due


@lru_cache(maxsize=256)  # more than there are sources, which take turns: a miss sorts a whole source
def epoch_order(num_examples: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """A permutation of range(num_examples), the same on every machine and with every NumPy.

    Indices are sorted by the SplitMix64 hash of (seed, epoch, index), a counter-based random number.
    """
    key = splitmix64(splitmix64(np.array([seed], np.uint64)) + np.uint64(epoch))
    hashes = splitmix64(key + np.arange(num_examples, dtype=np.uint64))
    order = np.argsort(hashes, kind="stable")
    order.flags.writeable = False
    return order
