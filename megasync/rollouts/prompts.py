"""Text to tokens and back, with the tokenizer of the model's folder; which examples are short enough. No torch in here.

Leaves out sampling and rewards.

    data = load_data(config)          # ConfigError where too few examples fit
    data.prompts.prompt_ids(data.train[0])
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.sample import Sample
from megasync.config.errors import ConfigError
from megasync.config.model_folder import model_shape
from megasync.config.schema import Config
from megasync.rollouts.data import Example, load_examples

CHUNK = 4096  # texts that the tokenizer's threads share


class Prompts:
    """Encodes prompts (as one user turn with `chat_template`), decodes responses, knows where a response ends."""

    def __init__(self, model_path: str, chat_template: bool) -> None:
        self.tokenizer = _load_tokenizer(Path(model_path))
        self.chat_template = chat_template
        if chat_template and not self.tokenizer.chat_template:
            message = f"data.chat_template = true: the tokenizer in {model_path} has no chat template"
            raise ConfigError(message, remedy="write data.chat_template=false, or take a model with one")
        self.stop_token_ids = _stop_token_ids(model_path, self.tokenizer.eos_token_id)
        self.prompt_ids = lru_cache(maxsize=100_000)(self._prompt_ids)

    def text(self, token_ids: npt.NDArray[np.int32]) -> str:
        """A response's text without its end-of-sequence and other special tokens."""
        text: str = self.tokenizer.decode(token_ids.tolist(), skip_special_tokens=True)
        return text

    def supervised(self, example: Example) -> Sample:
        """The example as a sample whose response is the answer and the end of the sequence."""
        answer = self.tokenizer.encode(example.answer, add_special_tokens=False)
        response = [*answer, *self.stop_token_ids[:1]]
        return Sample(np.array(self.prompt_ids(example), np.int32), np.array(response, np.int32))

    def lengths(self, examples: Iterable[Example], *, with_answers: bool) -> Iterator[int]:
        """Tokens of each prompt; `with_answers`: of the whole supervised sample."""
        rest = iter(examples)
        while chunk := list(islice(rest, CHUNK)):
            answers = self._encode([example.answer for example in chunk], special=False) if with_answers else [()] * len(chunk)
            for prompt, answer in zip(self._prompts(chunk), answers, strict=True):
                yield len(prompt) + len(answer) + with_answers

    def _prompt_ids(self, example: Example) -> tuple[int, ...]:
        return tuple(self._prompts([example])[0])

    def _prompts(self, examples: Sequence[Example]) -> Sequence[Sequence[int]]:
        texts = [example.prompt for example in examples]
        if self.chat_template:
            turns = [[{"role": "user", "content": text}] for text in texts]
            texts = self.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        return self._encode(texts, special=not self.chat_template)

    def _encode(self, texts: list[str], *, special: bool) -> Sequence[Sequence[int]]:
        encoded = self.tokenizer(texts, add_special_tokens=special, return_attention_mask=False, verbose=False)
        ids: list[list[int]] = encoded["input_ids"]
        return ids


def _load_tokenizer(folder: Path) -> Any:
    """From tokenizer.json alone: AutoTokenizer imports torch, and makes up an empty tokenizer where there is none."""
    from transformers import PreTrainedTokenizerFast

    if not (folder / "tokenizer.json").is_file():
        remedy = "put it there: AutoTokenizer.from_pretrained(NAME).save_pretrained(FOLDER) writes it"
        raise ConfigError(f"model.path = {folder}: the folder holds no tokenizer.json", remedy=remedy)
    return PreTrainedTokenizerFast.from_pretrained(folder)


def _stop_token_ids(model_path: str, tokenizer_eos: int | None) -> tuple[int, ...]:
    """The tokenizer's end of sequence first, then those of generation_config.json."""
    found = [] if tokenizer_eos is None else [tokenizer_eos]
    path = Path(model_path) / "generation_config.json"
    if path.is_file():
        eos = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
        found += eos if isinstance(eos, list) else [] if eos is None else [eos]
    if not found:
        message = f"model.path = {model_path}: names no end-of-sequence token, in its tokenizer or generation_config.json"
        raise ConfigError(message, remedy="give tokenizer_config.json an eos_token")
    return tuple(dict.fromkeys(found))


@dataclass(frozen=True)
class RunData:
    """What a run trains on and is evaluated on: examples that fit, the tokenizer, and what there is to say of the others."""

    prompts: Prompts
    train: list[Example]
    held_out: list[Example]
    notes: list[str]


def load_data(config: Config) -> RunData:
    """Read the data files, tokenise them, and drop or refuse what is too long (`data.too_long`).

    Raises:
        ConfigError: a file or the tokenizer cannot be used, or too few examples are short enough.
    """
    prompts, notes = Prompts(config.model.path, config.data.chat_template), list[str]()
    train, held_out = (_that_fit(config, key, examples, prompts, notes) for key, examples in read_files(config).items())
    return RunData(prompts, train, held_out, notes)


def read_files(config: Config) -> dict[str, list[Example]]:
    """All examples of data.train and data.eval; of an empty data.eval none.

    Raises:
        ConfigError: names the key, the file and the line.
    """
    data = config.data
    if not data.train:
        raise ConfigError("data.train is not set", remedy="set data.train to a JSONL file")
    examples: dict[str, list[Example]] = {}
    for key, path in (("data.train", data.train), ("data.eval", data.eval)):
        try:
            examples[key] = load_examples(path, data.prompt_key, data.answer_key) if path else []
        except ValueError as error:
            raise ConfigError(f"{key}: {error}") from error
    return examples


def _that_fit(config: Config, key: str, examples: list[Example], prompts: Prompts, notes: list[str]) -> list[Example]:
    is_sft, drops = config.algorithm.name == "sft", config.data.too_long == "drop"
    response = 0 if is_sft else config.rollout.max_new_tokens
    of = "prompt and answer" if is_sft else f"prompt and rollout.max_new_tokens = {response}"
    name, limit = _shortest_limit(config, prompts, is_trained_on=is_sft or key == "data.train")
    lengths = [length + response for length in prompts.lengths(examples, with_answers=is_sft)]
    fitting = [example for example, length in zip(examples, lengths, strict=True) if length <= limit]
    if len(fitting) == len(examples):
        return fitting
    what = f"{key}: {len(examples) - len(fitting)} of {len(examples)} examples are too long"
    least = min(config.data.batch_size, len(examples)) if key == "data.train" else 1
    if drops and len(fitting) >= least:
        notes.append(f"{what} and dropped: {of} together have more than {name} = {limit} tokens")
        return fitting
    length, line = max(zip(lengths, (example.line for example in examples), strict=True))
    remedy = f"take out or shorten what is longer, or raise {name}" if drops else "write data.too_long=drop"
    left = f"{len(fitting)}, {least} are needed" if drops else ""
    longest = f"line {line}, {length} tokens of {of}"
    raise ConfigError(what, longest=longest, allowed=f"{limit} tokens: {name}", left=left, remedy=remedy)


def _shortest_limit(config: Config, prompts: Prompts, *, is_trained_on: bool) -> tuple[str, int]:
    """What bounds a sequence most, and to how many tokens."""
    limits = {"engine.tokens_per_microbatch": config.engine.tokens_per_microbatch} if is_trained_on else {}
    if positions := model_shape(config.model.path).max_position_embeddings:
        limits["the model's max_position_embeddings"] = positions
    if config.algorithm.name == "grpo" and config.rollout.max_model_len is not None:
        limits["rollout.max_model_len"] = config.rollout.max_model_len
    elif config.algorithm.name == "grpo":  # vllm/config/model.py:2552 takes the smaller of positions and this one
        limits["the tokenizer's model_max_length"] = prompts.tokenizer.model_max_length
    return min(limits.items(), key=lambda item: item[1], default=("", sys.maxsize))
