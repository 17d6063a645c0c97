"""A run's data: all examples that are short enough, the tokenizer, and notes for the user. No torch in here.

    data = load_data(config)          # ConfigError where too few examples fit
    data.prompts.prompt_ids(data.train[0])

Leaves out files and their rows (tables.py, data.py) and tokens (prompts.py).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megasync.config.data_section import DataConfig, DataFile, EvalSet
from megasync.config.errors import ConfigError, refuse_if, some
from megasync.config.schema import Config
from megasync.data.conversations import ARGUMENTS, RENDERED, TOOLS
from megasync.data.data import Example, PromptOrder, load_examples
from megasync.data.lengths import length_limits
from megasync.data.prompts import Prompts
from megasync.data.tables import Note, media_columns
from megasync.models.folder import is_vision_language

BY_ANSWERS = {"exact_match", "math_verify"}  # rewards that only compare with the answer


@dataclass(frozen=True)
class RunData:
    """Examples that fit into the limits of length, the tokenizer, and notes about dropped examples and conversions."""

    prompts: Prompts
    train: list[Example]
    held_out: list[Example]  # of data.eval, if it is a path
    notes: list[str]
    eval_sets: dict[str, list[Example]] = field(default_factory=dict)  # of data.eval by name, if it is sets
    counts: dict[str, tuple[int, int]] = field(default_factory=dict)  # by key: number of examples that fit, and of all

    @property
    def by_source(self) -> dict[str, list[Example]]:
        """The examples of `train` by key: data.train, or data.train.NAME of each source."""
        found: dict[str, list[Example]] = {}
        for example in self.train:
            found.setdefault(f"data.train.{example.source}" if example.source else "data.train", []).append(example)
        return found or {"data.train": []}

    def order(self, config: Config) -> PromptOrder:
        """The order of `train` in training."""
        weights = {f"data.train.{name}": each.weight for name, each in config.data.train_sources.items()}
        sources = tuple((self.counts[key][0], weight) for key, weight in weights.items())
        return PromptOrder(len(self.train), config.run.seed, config.data.shuffle, sources)


def load_data(config: Config, *, trains: bool = True) -> RunData:
    """Reads the data files, tokenises them, and drops or refuses long examples (`data.too_long`). `trains`: read data.train.

    Raises:
        ConfigError: a file or the tokenizer cannot be used, or too few examples are short enough.
    """
    prompts, notes = Prompts(config.model.path, config.data, has_turns=bool(config.rollout.episode)), list[str]()
    read = read_files(config, trains=trains, note=notes.append)
    for key, examples in read.items():
        _check_answers(config, key, examples)
    fitting = {key: _fitting(config, key, examples, prompts, notes) for key, examples in read.items()}
    counts = {key: (len(fitting[key]), len(examples)) for key, examples in read.items()}
    sets = {name: fitting[f"data.eval.{name}"] for name in config.data.eval_sets}
    train = [example for key, examples in fitting.items() if is_trained(key) for example in examples]
    if prompts.template and config.algorithm.name == "sft" and any(each.answer for each in train):
        notes += prompts.template.supervised_notes()
    return RunData(prompts, train, fitting.get("data.eval", []), [*prompts.notes, *notes], sets, counts)


def read_files(config: Config, *, trains: bool = True, note: Note = lambda _: None) -> dict[str, list[Example]]:
    """All examples by key: data.train (if `trains`), data.eval or data.eval.NAME. `note` gets a line about each conversion.

    Without `trains` sets may be those of supervised steps: the prompt of a conversation is what comes before its last answer.

    Raises:
        ConfigError: names the key, the file and the line.
    """
    data, is_supervised = config.data, config.algorithm.name == "sft"
    if trains and not data.train:
        raise ConfigError("data.train is not set", remedy="set data.train to a JSONL file")
    examples: dict[str, list[Example]] = {}
    for key, source in _sources(config).items():
        if is_trained(key) and not trains:
            continue
        columns, notes = (source.prompt_key or data.prompt_key, source.answer_key or data.answer_key), list[str]()
        section = key if key.count(".") > 1 else "data" if is_trained(key) or is_supervised or not trains else "data.eval.NAME"
        split_key = key if key == "data.eval" else f"{section}.split"
        try:
            where: dict[str, Any] = {"split": source.split, "section": section, "split_key": split_key}
            takes_turns = is_supervised or not trains
            loaded = load_examples(source.path, *columns, **where, is_supervised=takes_turns, trains=trains, note=notes.append)
            _check_media(config, source, split_key)
            own = key.removeprefix("data.train.") if key.startswith("data.train.") else ""
            examples[key] = [replace(each, source=own, rewards=source.rewards) for each in loaded[: source.limit]]
        except ValueError as error:
            named = error if isinstance(error, ConfigError) else ConfigError(str(error))
            raise ConfigError(f"{key}: {named.headline}", **named.lines) from error
        check_turns(f"{key}: {source.path}", examples[key], data)
        if config.rollout.episode:
            _check_histories(f"{key}: {source.path}", examples[key])
        for text in [*notes, *unrendered(examples[key], data)]:
            note(f"{key}: {text}")
    return examples


def _check_media(config: Config, source: DataFile, split_key: str) -> None:
    """ConfigError where the model has vision layers and the data images, video or audio: only text is trained."""
    if not is_vision_language(config.model.path):
        return
    names = media_columns(Path(source.path), source.split, split_key)
    message = f"{source.path}: has the columns {', '.join(map(repr, names))}, and of {config.model.path} only the text is trained"
    refuse_if(names, message, remedy="take data without images, sounds or videos, or take the columns out")


def unrendered(examples: Sequence[Example], data: DataConfig) -> Iterator[str]:
    """Notes about columns that a user may expect in prompts, but that are not rendered."""
    if not data.chat_template and any(example.tools or example.template_arguments for example in examples):
        yield f"the columns {TOOLS!r} and {ARGUMENTS!r} are for chat templates, and data.chat_template = false"
    if any(isinstance(each.extra.get("system"), str) and "system" not in [role for role, _ in each.turns] for each in examples):
        yield "the column 'system' is not part of prompts: write prompts as messages, the first with the role system"


def check_turns(place: str, examples: Iterable[Example], data: DataConfig) -> None:
    """ConfigError if a prompt is a list of messages and there is no chat template to render it."""
    line = next((example.place for example in examples if example.messages and not data.chat_template), "")
    message = f"{place}: {line} holds a list of messages, and data.chat_template = false"
    refuse_if(line, message, remedy="write data.chat_template=true, or write the prompt as one text")


def _check_histories(place: str, examples: Iterable[Example]) -> None:
    """ConfigError if a message has fields that an episode would not see: its task has only role and content of each message."""
    for example in examples:
        lost = [name for message in example.messages for name in RENDERED if message.get(name)]
        message = f"{place}: {example.place} has a message with {some(lost, 1)}, and episodes get role and content alone"
        remedy = "put them into a column of their own, which the episode gets in task.extra"
        refuse_if(lost, message, remedy=remedy)


def _check_answers(config: Config, key: str, examples: list[Example]) -> None:
    """ConfigError if all answers are empty and training or the reward needs them."""
    reward, only = config.rollout.reward, _sources(config)[key].rewards
    scored = {reward} if isinstance(reward, str) else {name for name, weight in reward.items() if weight}
    scored = scored.intersection(only or scored)
    is_sft, by_answers = config.algorithm.name == "sft", scored <= BY_ANSWERS and not config.rollout.episode
    why = "supervised steps train on them" if is_sft else f"rollout.reward = {', '.join(scored)} is always 0 without"
    is_empty = not any(example.answer.strip() for example in examples)
    remedy = "write data.answer_key=KEY" if is_sft else "write data.answer_key=KEY, or a rollout.reward that needs no answers"
    message, answer_key = f"{key}: all {len(examples)} answers are empty, and {why}", config.data.answer_key or "none"
    refuse_if(is_empty and (is_sft or by_answers), message, answer_key=answer_key, remedy=remedy)


def is_trained(key: str) -> bool:
    """Whether the key is data.train or a source of it."""
    return key == "data.train" or key.startswith("data.train.")


def _sources(config: Config) -> dict[str, DataFile]:
    """Training and evaluation sets by full key; none for an empty data.eval."""
    data = config.data
    sources: dict[str, DataFile] = {f"data.train.{name}": each for name, each in data.train_sources.items()}
    if isinstance(data.train, str):
        sources = {"data.train": DataFile(path=data.train, split=data.split)}
    if isinstance(data.eval, str):
        return sources | ({"data.eval": DataFile(path=data.eval)} if data.eval else {})
    return sources | {f"data.eval.{name}": each for name, each in data.eval.items()}


def _fitting(config: Config, key: str, examples: list[Example], prompts: Prompts, notes: list[str]) -> list[Example]:
    source = _sources(config)[key]
    own_limit = source.max_new_tokens if isinstance(source, EvalSet) else None
    is_sft, drops = config.algorithm.name == "sft", config.data.too_long == "drop"
    response = 0 if is_sft else own_limit or config.rollout.max_new_tokens
    response_key = f"{key}.max_new_tokens" if own_limit else "rollout.max_new_tokens"
    of = "prompt and answer" if is_sft else f"prompt and {response_key} = {response}"
    limits = length_limits(config, is_trained_on=is_sft or is_trained(key))
    name, limit = min(limits.items(), key=lambda item: item[1], default=("", sys.maxsize))
    try:
        lengths = [length + response for length in prompts.lengths(examples, with_answers=is_sft)]
    except ConfigError as error:
        raise ConfigError(f"{key}: {error.headline}", **error.lines) from error
    fitting = [example for example, length in zip(examples, lengths, strict=True) if length <= limit]
    if len(fitting) == len(examples):
        return fitting
    what = f"{key}: {len(examples) - len(fitting)} of {len(examples)} examples are too long"
    least = min(config.data.batch_size, len(examples)) if key == "data.train" else 1
    if drops and len(fitting) >= least:
        notes.append(f"{what} and dropped: {of} together have more than {name} = {limit} tokens")
        return fitting
    length, example = max(zip(lengths, examples, strict=True), key=lambda pair: pair[0])
    ways = [] if is_sft else [f"lower {response_key}"]
    ways += [f"raise {name}"] if all(length <= most for each, most in limits.items() if each.startswith("the ")) else []
    remedy = ", or ".join(["remove or shorten longer examples", *ways]) if drops else "write data.too_long=drop"
    left = f"{len(fitting)}, {least} are needed" if drops else ""
    longest = f"{example.place}, {length} tokens of {of}"
    raise ConfigError(what, longest=longest, allowed=f"{limit} tokens: {name}", left=left, remedy=remedy)
