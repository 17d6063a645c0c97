"""Encodes prompts and answers, and decodes responses, with the tokenizer of the model's folder. No torch in here.

Leaves out the data files (load.py).

    Prompts("models/Qwen3-0.6B", config.data).prompt_ids(example)
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache, partial
from itertools import islice
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bridge.detokenizer import Detokenizer, without_end
from engine.sample import Sample
from megasync.config.data_section import DataConfig
from megasync.config.errors import ConfigError, refuse_if
from megasync.data.conversations import Message
from megasync.data.data import Example
from megasync.data.encoding import Encoder
from megasync.data.supervised import Form, Piece, branches
from megasync.data.template import ChatTemplate, check_template
from megasync.data.tokenizer import load_tokenizer, stop_token_ids
from megasync.models.folder import model_shape

CHUNK = 4096  # texts per call of the tokenizer, which encodes them in several threads


class Prompts:
    """Encodes prompts (with data.chat_template as turns) and answers, decodes responses, knows where a response ends.

    `has_turns`: episodes render their prompts with the chat template, even if data.chat_template is false.
    """

    def __init__(self, model_path: str, data: DataConfig, *, has_turns: bool = False) -> None:
        folder = Path(model_path)
        self.vocab_size, self.data = _vocab_size(folder), data
        self.tokenizer, notes = load_tokenizer(folder)
        if data.chat_template and not self.tokenizer.chat_template:
            message = f"data.chat_template = true: the tokenizer in {model_path} has no chat template"
            raise ConfigError(message, remedy="write data.chat_template=false, or take a model with one")
        if data.chat_template:
            check_template(self.tokenizer, data.chat_template_arguments)
        self.stop_token_ids, of_stops = stop_token_ids(folder, self.tokenizer.eos_token_id, self.vocab_size)
        self._notes, self._never_last = [*notes, *of_stops], self.stop_token_ids
        has_template = data.chat_template or (has_turns and bool(self.tokenizer.chat_template))
        self.template = ChatTemplate(self.tokenizer, data.chat_template_arguments) if has_template else None
        if self.template is not None:
            self._end_with_turns(self.template)
        self.encoder = Encoder(self.tokenizer, bos_is_written=data.chat_template)
        self.prompt_ids = lru_cache(maxsize=100_000)(self._prompt_ids)
        self.samples = lru_cache(maxsize=10_000)(self._samples)
        self._has_branches = self._has_end_within = False

    def _end_with_turns(self, template: ChatTemplate) -> None:
        """Adds the token with which the template ends an assistant's turn to the stop tokens."""
        turn, eos = template.turn, self.tokenizer.eos_token_id
        end = self.tokenizer.convert_tokens_to_ids(turn.end) if turn.end else None
        if end is not None and end < self.vocab_size and end not in self.stop_token_ids:
            self.stop_token_ids = (*self.stop_token_ids, end)
            self._notes.append(f"the chat template ends an answer with {turn.end!r}: a response stops there, too")
        if self.data.chat_template:  # other ends may be tokens that begin a turn, as Phi 3's <|assistant|> is
            self._never_last = tuple(each for each in (eos, end) if each is not None)
        self._notes += template.notes()

    @property
    def notes(self) -> list[str]:
        """Notes about the tokenizer and its template; encoding prompts may add some."""
        return [*self._notes, *self.encoder.notes]

    @cached_property
    def detokenizer(self) -> Detokenizer:
        return Detokenizer(self.tokenizer)

    def text(self, token_ids: npt.NDArray[np.int32]) -> str:
        """A response's text (bridge/detokenizer.py), without the token that ended it."""
        return self.texts([token_ids])[0]

    def texts(self, responses: Sequence[npt.NDArray[np.int32]]) -> list[str]:
        """`text` of each response; releases the GIL."""
        return self.detokenizer.texts([without_end(token_ids.tolist(), self.stop_token_ids) for token_ids in responses])

    def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        """The text of each token; if several tokens make one character, the last one has it and the others are empty."""
        return self.detokenizer.pieces(token_ids)

    def prompt_text(self, example: Example) -> str:
        """The prompt as text, with its special tokens."""
        return self.detokenizer.whole(self.prompt_ids(example))

    def supervised(self, example: Example) -> Sample:
        """The example as a sample whose response is the answer and the end of the sequence, or of the template's turn."""
        prompt, texts = self.prompt_ids(example), self._texts([example])
        return Sample(np.array(prompt, np.int32), np.array(self._answers([example], texts, [prompt])[0], np.int32))

    def _samples(self, example: Example) -> list[Sample]:
        """The training samples of an example: `supervised`, or a conversation with the assistant's tokens as sampled ones.

        A conversation makes several samples if the template renders earlier turns differently in later prompts (supervised.py).
        """
        if not example.completion:
            return [self.supervised(example)]
        made = branches(partial(self._render, example), self.turns(example), example.completion, self._form, example.place)
        if len(made) > 1 and not self._has_branches:
            self._has_branches, lines = True, f"{example.place} is the first of those that become several sequences"
            self._notes.append(f"the chat template renders earlier turns differently in later prompts: {lines}")
        return [self._branch(example, pieces) for pieces in made]

    def supervised_batch(self, examples: Sequence[Example]) -> list[Sample]:
        """The samples of all examples; samples of one example have its index as `group`, and `member` 0."""
        made = [self.samples(example) for example in examples]
        return [replace(each, group=group, member=0) for group, own in enumerate(made) for each in own]

    def _branch(self, example: Example, pieces: Sequence[Piece]) -> Sample:
        """A sample of pieces, each encoded as the continuation of the pieces before it, as in sampling."""
        text, ids = pieces[0].text, list(self._prompts([example], [pieces[0].text])[0])
        size, is_trained = len(ids), list[bool]()
        for piece in pieces[1:]:
            own = self.encoder.answers([example], [text], [ids], [piece.text])[0]
            own += [self.stop_token_ids[0]] if piece.needs_end else []
            if piece.is_trained:
                self._note_end_within(example, own)
            text, ids, is_trained = text + piece.text, ids + own, is_trained + [piece.is_trained] * len(own)
        self._check_ids(example, ids[:size], ids[size:])
        return Sample(np.array(ids[:size], np.int32), np.array(ids[size:], np.int32), is_sampled=np.array(is_trained))

    def lengths(self, examples: Iterable[Example], *, with_answers: bool) -> Iterator[int]:
        """Tokens of each prompt; `with_answers`: of the whole supervised sample.

        Raises:
            ConfigError: names the line of a text of no tokens, or of tokens that the model has no embeddings for.
        """
        rest = iter(examples)
        while chunk := list(islice(rest, CHUNK)):
            if with_answers and any(example.completion for example in chunk):
                yield from (max(sample.num_tokens for sample in self.samples(example)) for example in chunk)
                continue
            texts = self._texts(chunk)
            prompts = self._prompts(chunk, texts)
            answers = self._answers(chunk, texts, prompts) if with_answers else [[]] * len(chunk)
            for example, prompt, answer in zip(chunk, prompts, answers, strict=True):
                self._check_ids(example, prompt, answer)
                yield len(prompt) + len(answer)

    def _check_ids(self, example: Example, prompt: Sequence[int], answer: Sequence[int]) -> None:
        refuse_if(not prompt, f"{example.place}: the tokenizer makes no token of the prompt", remedy="take the line out")
        if (highest := max((*prompt, *answer))) >= self.vocab_size:
            message = f"{example.place}: holds the token {highest}, {self.detokenizer.text([highest])!r}, and the model has "
            message += f"embeddings for 0 to {self.vocab_size - 1}"
            raise ConfigError(message, remedy="take tokenizer and model of one folder, or take the line out")

    def _prompt_ids(self, example: Example) -> tuple[int, ...]:
        ids = self._prompts([example], self._texts([example]))[0]
        self._check_ids(example, ids, ())
        return tuple(ids)

    def _texts(self, examples: Sequence[Example]) -> list[str]:
        """The text of each prompt."""
        return self._templated(examples) if self.data.chat_template else [example.prompt for example in examples]

    def _templated(self, examples: Sequence[Example]) -> list[str]:
        return [self._render(example, self.turns(example), generate=True) for example in examples]

    def _prompts(self, examples: Sequence[Example], texts: Sequence[str]) -> list[list[int]]:
        """ConfigError names the line of a prompt that the tokenizer cannot encode, or that ends as a response does."""
        encoded = self.encoder.prompts(examples, texts)
        for example, text, ids in zip(examples, texts, encoded, strict=True):
            if ids and ids[-1] in self._never_last:
                self._check_end(example, text, ids)
        return encoded

    def _check_end(self, example: Example, text: str, ids: Sequence[int]) -> None:
        """ConfigError if the tokenizer or the template adds an end token to the prompt."""
        if self.data.chat_template:
            what = "the model's chat template"
            remedy = "give the tokenizer a template that begins an answer where add_generation_prompt is true"
        elif self.encoder.adds_end(text, ids):
            what = "the tokenizer"
            remedy = "take it out of post_processor in tokenizer.json, and add_eos_token out of tokenizer_config.json"
        else:
            return
        message = f"{example.place}: {what} ends the prompt with {self.detokenizer.text(ids[-1:])!r}"
        raise ConfigError(f"{message}, after which there is nothing more to say", remedy=remedy)

    @cached_property
    def _form(self) -> Form:
        assert self.template is not None
        return Form(self.template.turn, tuple(self.detokenizer.text([each]) for each in self.stop_token_ids))

    def _render(self, example: Example, turns: Sequence[Message], *, generate: bool) -> str:
        """ConfigError names the line of messages that the template refuses or would render incompletely."""
        assert self.template is not None
        self.template.check_row(example.place, turns, example.tools, example.template_arguments)
        try:
            return self.template.render(turns, generate=generate, tools=example.tools, arguments=example.template_arguments)
        except Exception as error:  # a template runs code, with errors of any kind
            message = f"{example.place}: the model's chat template refuses the prompt: {error}"
            roles = ", ".join(turn["role"] for turn in turns)
            remedy = "give it turns that the template takes; data.system_prompt adds a system turn"
            raise ConfigError(message, roles=roles, remedy=remedy) from error

    def turns(self, example: Example) -> list[Message]:
        """The prompt's messages, with data.system_prompt if they have no system turn."""
        messages = [*(example.messages or ({"role": "user", "content": example.prompt},))]
        has_own = not self.data.system_prompt or messages[0]["role"] == "system"
        return messages if has_own else [{"role": "system", "content": self.data.system_prompt}, *messages]

    def _answers(self, examples: Sequence[Example], texts: Sequence[str], prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        """The token ids to train on behind each prompt, the end token included."""
        answers = [self._answer_text(example, text) for example, text in zip(examples, texts, strict=True)]
        end, is_closed = self.stop_token_ids[0], bool(self.data.chat_template and self.template and self.template.turn.end)
        found = self.encoder.answers(examples, texts, prompts, answers)
        made = [ids if is_closed or ids[-1:] == [end] else [*ids, end] for ids in found]
        for example, ids in zip(examples, made, strict=True):
            self._note_end_within(example, ids)
        return made

    def _note_end_within(self, example: Example, answer: Sequence[int]) -> None:
        """Notes the first answer that goes on behind a token that ends a response."""
        within = next((each for each in answer[:-1] if each in self.stop_token_ids), None)
        if within is not None and not self._has_end_within:
            self._has_end_within, text = True, self.detokenizer.text([within])
            self._notes.append(f"{example.place} is the first whose answer continues behind {text!r}, where a response ends")

    def _answer_text(self, example: Example, prompt: str) -> str:
        """The answer with the template's text before it, and behind it up to the end of the turn."""
        if not self.data.chat_template or self.template is None:
            return example.answer
        turn = self.template.turn
        whole = self._render(example, [*self.turns(example), {"role": "assistant", "content": example.answer}], generate=False)
        if turn.end and whole.startswith(prompt) and whole.endswith(turn.close):
            return whole[len(prompt) :].removesuffix(turn.close) + turn.trained_close
        return f"{turn.lead}{example.answer}{turn.trained_close}"


def _vocab_size(folder: Path) -> int:
    """Number of tokens that the model has embeddings for; sys.maxsize for a tokenizer without a model."""
    return model_shape(folder).vocab_size if (folder / "config.json").is_file() else sys.maxsize
