"""Text to tokens and back, with the tokenizer of the model's folder; which examples are short enough. No torch in here.

Leaves out sampling and rewards.

    data = load_data(config)          # ConfigError where too few examples fit
    data.prompts.prompt_ids(data.train[0])
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from pathlib import Path

import numpy as np
import numpy.typing as npt

from engine.sample import Sample
from megasync.config.data_section import DataConfig, EvalSet
from megasync.config.errors import ConfigError, refuse_if
from megasync.config.schema import Config
from megasync.data.data import Example, PromptOrder, load_examples
from megasync.data.tokenizer import check_template, load_tokenizer, stop_token_ids
from megasync.hf.folder import model_shape

BY_ANSWERS = {"exact_match", "math_verify"}  # rewards that compare with the answer alone
CHUNK = 4096  # texts that the tokenizer's threads share


class Prompts:
    """Encodes prompts (with data.chat_template as turns), decodes responses, knows where a response ends."""

    def __init__(self, model_path: str, data: DataConfig) -> None:
        self.tokenizer, self.vocab_size = load_tokenizer(Path(model_path)), _vocab_size(Path(model_path))
        self.data = data
        if data.chat_template and not self.tokenizer.chat_template:
            message = f"data.chat_template = true: the tokenizer in {model_path} has no chat template"
            raise ConfigError(message, remedy="write data.chat_template=false, or take a model with one")
        if data.chat_template:
            check_template(self.tokenizer, data.chat_template_arguments)
        self.stop_token_ids = stop_token_ids(Path(model_path), self.tokenizer.eos_token_id, self.vocab_size)
        self.prompt_ids = lru_cache(maxsize=100_000)(self._prompt_ids)
        self._token_texts: dict[int, str] = {}

    def text(self, token_ids: npt.NDArray[np.int32]) -> str:
        """A response's text without its end-of-sequence and other special tokens."""
        return self.tokenizer.decode(token_ids.tolist(), skip_special_tokens=True)  # type: ignore[no-any-return]

    def texts(self, responses: Sequence[npt.NDArray[np.int32]]) -> list[str]:
        """`text` of each, while Python's other threads run: of the tokenizers package `decode` holds them up, this does not."""
        if self.tokenizer.clean_up_tokenization_spaces:
            return [self.text(token_ids) for token_ids in responses]
        ids = [token_ids.tolist() for token_ids in responses]
        return self.tokenizer.backend_tokenizer.decode_batch(ids, skip_special_tokens=True)  # type: ignore[no-any-return]

    def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        """The text of each token within a text, special tokens and leading spaces included; a part of a character is U+FFFD."""
        backend, before = self.tokenizer.backend_tokenizer, self.stop_token_ids[0]  # some decoders strip a text's first space
        if new := list(set(token_ids) - self._token_texts.keys()):
            prefix: str = backend.decode([before], skip_special_tokens=False)
            texts: list[str] = backend.decode_batch([[before, each] for each in new], skip_special_tokens=False)
            self._token_texts |= {each: text.removeprefix(prefix) for each, text in zip(new, texts, strict=True)}
        return [self._token_texts[each] for each in token_ids]

    def prompt_text(self, example: Example) -> str:
        """What the model gets, its special tokens included."""
        return self.tokenizer.decode(list(self.prompt_ids(example)))  # type: ignore[no-any-return]

    def supervised(self, example: Example) -> Sample:
        """The example as a sample whose response is the answer and the end of the sequence."""
        answer = self.tokenizer.encode(example.answer, add_special_tokens=False)
        response = [*answer, *self.stop_token_ids[:1]]
        return Sample(np.array(self.prompt_ids(example), np.int32), np.array(response, np.int32))

    def lengths(self, examples: Iterable[Example], *, with_answers: bool) -> Iterator[int]:
        """Tokens of each prompt; `with_answers`: of the whole supervised sample.

        Raises:
            ConfigError: names the line of a text of no tokens, or of tokens that the model has no embeddings for.
        """
        rest = iter(examples)
        while chunk := list(islice(rest, CHUNK)):
            answers = self._encode(chunk, [each.answer for each in chunk], special=False) if with_answers else [()] * len(chunk)
            for example, prompt, answer in zip(chunk, self._prompts(chunk), answers, strict=True):
                self._check_ids(example, prompt, answer)
                yield len(prompt) + len(answer) + with_answers

    def _check_ids(self, example: Example, prompt: Sequence[int], answer: Sequence[int]) -> None:
        refuse_if(not prompt, f"line {example.line}: the tokenizer makes no token of the prompt", remedy="take the line out")
        if (highest := max((*prompt, *answer))) >= self.vocab_size:
            message = f"line {example.line}: holds the token {highest}, {self.tokenizer.decode([highest])!r}, and the model has "
            message += f"embeddings for 0 to {self.vocab_size - 1}"
            raise ConfigError(message, remedy="take tokenizer and model of one folder, or take the line out")

    def _prompt_ids(self, example: Example) -> tuple[int, ...]:
        return tuple(self._prompts([example])[0])

    def _prompts(self, examples: Sequence[Example]) -> Sequence[Sequence[int]]:
        """ConfigError names the line of a prompt that the tokenizer cannot encode, or ends as it would a response."""
        if self.data.chat_template:
            return self._encode(examples, self._templated(examples), special=False)
        encoded = self._encode(examples, [example.prompt for example in examples], special=True)
        for example, ids in zip(examples, encoded, strict=True):
            if ids and (end := ids[-1]) in self.stop_token_ids and not self._ends_with(example, end):
                message = f"line {example.line}: the tokenizer ends the prompt with {self.tokenizer.decode([end])!r}"
                remedy = "take it out of post_processor in tokenizer.json, and add_eos_token out of tokenizer_config.json"
                raise ConfigError(f"{message}, after which there is nothing more to say", remedy=remedy)
        return encoded

    def _ends_with(self, example: Example, token_id: int) -> bool:
        """Whether the prompt itself does, without what the tokenizer adds."""
        return self._encode([example], [example.prompt], special=False)[0][-1:] == [token_id]

    def _templated(self, examples: Sequence[Example]) -> list[str]:
        """ConfigError names the line of messages that the template refuses."""

        def apply(chosen: Sequence[Example]) -> list[str]:
            turns = [self.turns(example) for example in chosen]
            arguments = self.data.chat_template_arguments
            texts: list[str]
            texts = self.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True, **arguments)
            return texts

        try:
            return apply(examples)
        except Exception as error:  # a template runs code, with errors of any kind
            if len(examples) == 1:
                message = f"line {examples[0].line}: the model's chat template refuses the prompt: {error}"
                roles = ", ".join(turn["role"] for turn in self.turns(examples[0]))
                remedy = "give it turns that the template takes; data.system_prompt adds a system turn"
                raise ConfigError(message, roles=roles, remedy=remedy) from error
        return [text for example in examples for text in self._templated([example])]

    def turns(self, example: Example) -> list[dict[str, str]]:
        """The prompt's messages, with data.system_prompt where they bring none."""
        turns = example.turns or (("user", example.prompt),)
        if self.data.system_prompt and turns[0][0] != "system":
            turns = (("system", self.data.system_prompt), *turns)
        return [{"role": role, "content": content} for role, content in turns]

    def _encode(self, examples: Sequence[Example], texts: Sequence[str], *, special: bool) -> Sequence[Sequence[int]]:
        """`texts`: of the examples, of which ConfigError names the line of one that the tokenizer cannot encode."""
        try:
            encoded = self.tokenizer(list(texts), add_special_tokens=special, return_attention_mask=False, verbose=False)
        except Exception as error:  # the tokenizers package raises plain ones, for a character without a token
            if len(examples) == 1:
                message = f"line {examples[0].line}: the tokenizer cannot encode {texts[0]!r:.80}: {error}"
                remedy = "take the line out, or give the tokenizer a token for what it does not know"
                raise ConfigError(message, remedy=remedy) from error
            pairs = zip(examples, texts, strict=True)
            return [ids for example, text in pairs for ids in self._encode([example], [text], special=special)]
        return encoded["input_ids"]  # type: ignore[no-any-return]


def _vocab_size(folder: Path) -> int:
    """How many tokens the model has embeddings for; of a tokenizer without a model nothing is known."""
    return model_shape(folder).vocab_size if (folder / "config.json").is_file() else sys.maxsize


@dataclass(frozen=True)
class RunData:
    """What a run trains on and is evaluated on: examples that fit, the tokenizer, and what there is to say of the others."""

    prompts: Prompts
    train: list[Example]
    held_out: list[Example]  # where data.eval is a path
    notes: list[str]
    eval_sets: dict[str, list[Example]] = field(default_factory=dict)  # by name, where it is sets
    counts: dict[str, tuple[int, int]] = field(default_factory=dict)  # by key: examples that fit, and all that there are

    def order(self, config: Config) -> PromptOrder:
        """In which `train` is trained."""
        return PromptOrder(len(self.train), config.run.seed, config.data.shuffle)


def load_data(config: Config, *, trains: bool = True) -> RunData:
    """Read the data files, tokenise them, and drop or refuse what is too long (`data.too_long`); data.train where it `trains`.

    Raises:
        ConfigError: a file or the tokenizer cannot be used, or too few examples are short enough.
    """
    prompts, notes = Prompts(config.model.path, config.data), list[str]()
    read = read_files(config, trains=trains)
    for key, examples in read.items():
        _check_answers(config, key, examples)
    fitting = {key: _that_fit(config, key, examples, prompts, notes) for key, examples in read.items()}
    counts = {key: (len(fitting[key]), len(examples)) for key, examples in read.items()}
    sets = {name: fitting[f"data.eval.{name}"] for name in config.data.eval_sets}
    return RunData(prompts, fitting.get("data.train", []), fitting.get("data.eval", []), notes, sets, counts)


def read_files(config: Config, *, trains: bool = True) -> dict[str, list[Example]]:
    """All examples of data.train, where it `trains`, data.eval and data.eval.NAME, those that are given.

    Raises:
        ConfigError: names the key, the file and the line.
    """
    data = config.data
    if trains and not data.train:
        raise ConfigError("data.train is not set", remedy="set data.train to a JSONL file")
    examples: dict[str, list[Example]] = {}
    for key, source in _sources(config).items():
        if key == "data.train" and not trains:
            continue
        columns = source.prompt_key or data.prompt_key, source.answer_key or data.answer_key
        section = key if key.startswith("data.eval.") else "data"
        split_key = key if key == "data.eval" else f"{section}.split"
        try:
            found = load_examples(source.path, *columns, split=source.split, section=section, split_key=split_key)
            examples[key] = found[: source.limit]
        except ValueError as error:
            raise ConfigError(f"{key}: {error}") from error
        check_turns(f"{key}: {source.path}", examples[key], data)
    return examples


def check_turns(place: str, examples: Iterable[Example], data: DataConfig) -> None:
    """ConfigError where a prompt is a list of messages, and nothing makes a text of them."""
    line = next((example.line for example in examples if example.turns and not data.chat_template), 0)
    message = f"{place}: line {line} holds a list of messages, and data.chat_template = false"
    refuse_if(line, message, remedy="write data.chat_template=true, or make one text of it")


def _check_answers(config: Config, key: str, examples: list[Example]) -> None:
    """ConfigError where all answers are empty, and what trains or scores has nothing else to go by."""
    reward = config.rollout.reward
    scored = {reward} if isinstance(reward, str) else {name for name, weight in reward.items() if weight}
    is_sft, by_answers = config.algorithm.name == "sft", scored <= BY_ANSWERS and not config.rollout.episode
    why = "supervised steps train on them" if is_sft else f"rollout.reward = {', '.join(scored)} is always 0 without"
    is_empty = not any(example.answer.strip() for example in examples)
    remedy = "write data.answer_key=KEY" if is_sft else "write data.answer_key=KEY, or a rollout.reward that needs no answers"
    message, answer_key = f"{key}: all {len(examples)} answers are empty, and {why}", config.data.answer_key or "none"
    refuse_if(is_empty and (is_sft or by_answers), message, answer_key=answer_key, remedy=remedy)


def _sources(config: Config) -> dict[str, EvalSet]:
    """By full key; of an empty data.eval none."""
    data = config.data
    sources = {"data.train": EvalSet(path=data.train, split=data.split)}
    if isinstance(data.eval, str):
        return sources | ({"data.eval": EvalSet(path=data.eval)} if data.eval else {})
    return sources | {f"data.eval.{name}": each for name, each in data.eval.items()}


def _that_fit(config: Config, key: str, examples: list[Example], prompts: Prompts, notes: list[str]) -> list[Example]:
    own_limit = _sources(config)[key].max_new_tokens
    is_sft, drops = config.algorithm.name == "sft", config.data.too_long == "drop"
    response = 0 if is_sft else own_limit or config.rollout.max_new_tokens
    response_key = f"{key}.max_new_tokens" if own_limit else "rollout.max_new_tokens"
    of = "prompt and answer" if is_sft else f"prompt and {response_key} = {response}"
    name, limit = _shortest_limit(config, prompts, is_trained_on=is_sft or key == "data.train")
    try:
        lengths = [length + response for length in prompts.lengths(examples, with_answers=is_sft)]
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from error
    fitting = [example for example, length in zip(examples, lengths, strict=True) if length <= limit]
    if len(fitting) == len(examples):
        return fitting
    what = f"{key}: {len(examples) - len(fitting)} of {len(examples)} examples are too long"
    least = min(config.data.batch_size, len(examples)) if key == "data.train" else 1
    if drops and len(fitting) >= least:
        notes.append(f"{what} and dropped: {of} together have more than {name} = {limit} tokens")
        return fitting
    length, line = max(zip(lengths, (example.line for example in examples), strict=True))
    ways = [] if is_sft else [f"lower {response_key}"]  # of a model and its tokenizer the limit is what it is
    ways += [f"raise {name}"] if not name.startswith("the ") else []
    remedy = ", or ".join(["take out or shorten what is longer", *ways]) if drops else "write data.too_long=drop"
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
