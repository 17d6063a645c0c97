"""Prompts with answers from JSONL, and the order in which steps take them: a pure function of seed and step.

Leaves out tokens, which the tokenizer of the model makes later. No torch in here.

    examples = load_examples("train.jsonl", "question", "answer")
    order = PromptOrder(num_examples=len(examples), batch_size=64, seed=0)
    batch = [examples[index] for index in order.indices(step=0)]
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bridge.layout.splitmix import splitmix64
from megasync.config.errors import ConfigError, nearest_name

SHAPE_REMEDY = 'every line is one JSON object, such as {"question": "1+2=", "answer": "3"}'


@dataclass(frozen=True, slots=True)
class Example:
    """One line of a data file; `line` counts from 1, `extra` holds its other fields."""

    prompt: str
    answer: str
    line: int
    extra: Mapping[str, Any] = field(default_factory=dict, compare=False)


def load_examples(path: str | Path, prompt_key: str, answer_key: str) -> list[Example]:
    """All examples in file order; blank lines are passed over. ConfigError names file, line, reason and remedy."""
    path = Path(path)
    if not path.is_file():
        problem = "is a folder, a JSONL file is expected" if path.is_dir() else "there is no such data file"
        raise ConfigError(f"{path}: {problem}", looked_in=str(path.resolve().parent), remedy=SHAPE_REMEDY)
    with path.open("rb") as file:
        examples = [
            _read_example(f"{path}:{number}", raw, number, prompt_key, answer_key)
            for number, raw in enumerate(file, start=1)
            if raw.strip()
        ]
    if not examples:
        raise ConfigError(f"{path}: holds no examples", remedy=SHAPE_REMEDY)
    return examples


def _read_example(place: str, raw: bytes, number: int, prompt_key: str, answer_key: str) -> Example:
    try:
        fields = json.loads(raw.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        remedy = "save the file as UTF-8"
        raise ConfigError(f"{place}: not UTF-8: {error.reason} at byte {error.start}", remedy=remedy) from error
    except json.JSONDecodeError as error:
        message = f"{place}: not JSON: {error.msg} at column {error.colno}"
        raise ConfigError(message, line=_cut(raw), remedy=SHAPE_REMEDY) from error
    if not isinstance(fields, dict):
        raise ConfigError(f"{place}: a {type(fields).__name__}, not an object", remedy=SHAPE_REMEDY)
    prompt = _text(place, fields, prompt_key, "data.prompt_key")
    answer = _text(place, fields, answer_key, "data.answer_key")
    if not prompt.strip():
        raise ConfigError(f"{place}: the prompt {prompt_key!r} is empty", remedy="take the line out")
    extra = {key: value for key, value in fields.items() if key not in (prompt_key, answer_key)}
    return Example(prompt, answer, number, extra)


def _text(place: str, fields: dict[str, Any], key: str, config_key: str) -> str:
    if key not in fields:
        present = ", ".join(list(fields)[:20]) or "none"
        near = nearest_name(key, fields)
        remedy = f"write {config_key}={near or 'KEY'}, or give the line a {key!r}"
        raise ConfigError(f"{place}: has no key {key!r}", keys=present, nearest=near, remedy=remedy)
    value = fields[key]
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        message = f"{place}: {key!r} is a {type(value).__name__}, a text or a number is expected"
        raise ConfigError(message, remedy="write it as one text")
    return str(value)


def _cut(raw: bytes) -> str:
    text = raw.decode(errors="replace").strip()
    return text if len(text) <= 100 else text[:97] + "..."


@dataclass(frozen=True)
class PromptOrder:
    """Which examples a step takes. Nothing to save: step s holds positions [s * batch_size, (s + 1) * batch_size).

    Position p is in epoch p // num_examples; each epoch is a permutation of all examples, so every example comes once
    an epoch, and a batch may run across the border of two. Without `shuffle` every epoch is in file order.
    """

    num_examples: int
    batch_size: int
    seed: int = 0
    shuffle: bool = True

    def __post_init__(self) -> None:
        if self.num_examples < 1 or self.batch_size < 1:
            raise ValueError(f"{self.num_examples} examples in batches of {self.batch_size}: both must be at least 1")

    def index(self, ordinal: int) -> int:
        """Which example the prompt of that number is, counted from 0 over all steps."""
        epoch, place = divmod(ordinal, self.num_examples)
        return int(epoch_order(self.num_examples, self.seed, epoch)[place]) if self.shuffle else place

    def indices(self, step: int) -> list[int]:
        """The `batch_size` indices into the examples of step `step`, counted from 0."""
        if step < 0:
            raise ValueError(f"step {step}: steps count from 0")
        indices: list[int] = []
        position, end = step * self.batch_size, (step + 1) * self.batch_size
        while position < end:
            epoch, start = divmod(position, self.num_examples)
            taken = min(self.num_examples - start, end - position)
            order = epoch_order(self.num_examples, self.seed, epoch) if self.shuffle else np.arange(self.num_examples)
            indices += order[start : start + taken].tolist()
            position += taken
        return indices


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
