"""Encodes prompts, and answers that continue them, as token ids. No torch in here.

Leaves out making the texts (prompts.py, template.py), and decoding (bridge/detokenizer.py).

    encoder = Encoder(tokenizer, bos_is_written=False)
    ids = encoder.prompts(examples, ["12+30="])
    encoder.answers(examples, ["12+30="], ids, ["42"])    # with a Llama 2, too, of "42" and not of " 42"
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from megasync.config.errors import ConfigError

if TYPE_CHECKING:
    from megasync.data.data import Example


class Encoder:
    """`bos_is_written`: the texts contain their special tokens, as a chat template writes them; else the tokenizer adds them."""

    def __init__(self, tokenizer: Any, *, bos_is_written: bool) -> None:
        self.tokenizer, self.backend, self._is_written = tokenizer, tokenizer.backend_tokenizer, bos_is_written
        bos = tokenizer.bos_token_id
        self._front = _added_front(self.backend) if not bos_is_written else [] if bos is None else [bos]
        self.notes = list[str]()

    @cached_property
    def continuing(self) -> Any:
        """The tokenizers.Tokenizer for a text that continues another one."""
        return continuing(self.backend)

    def prompts(self, examples: Sequence[Example], texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text. If both the text and the tokenizer or template write the begin token, it is kept once, with a
        note.
        """
        encoded = self._encode(examples, texts, special=not self._is_written)
        size, twice = len(self._front), [*self._front, *self._front]
        for place, ids in enumerate(encoded):
            if size and ids[: 2 * size] == twice:
                encoded[place] = ids[size:]
                self._note_twice(examples[place])
        return encoded

    def answers(
        self, examples: Sequence[Example], texts: Sequence[str], prompts: Sequence[Sequence[int]], answers: Sequence[str]
    ) -> list[list[int]]:
        """Token ids of each answer, which follow its prompt's.

        Prompt and answer are encoded together if the ids of both begin with the prompt's. The answer is encoded alone, by
        `continuing`, if they do not, if the prompt ends with an added token, or if the tokenizer would put spaces into it, as
        behind each added token.
        """
        alone = self._encode(examples, answers, special=False, backend=self.continuing)
        wholes = self.prompts(examples, [text + answer for text, answer in zip(texts, answers, strict=True)])
        added = self.backend.get_added_tokens_decoder().keys()
        puts_spaces = self.continuing is not self.backend

        def follows(prompt: Sequence[int], whole: Sequence[int], ids: Sequence[int]) -> bool:
            is_plain = added.isdisjoint([*prompt[-1:], *(ids if puts_spaces else [])])
            if not (prompt and is_plain and whole[: len(prompt)] == list(prompt)):
                return False
            decode = self.backend.decode
            return not puts_spaces or decode(whole[len(prompt) :]).lstrip() == decode(list(ids)).lstrip()

        made = zip(prompts, wholes, alone, strict=True)
        return [whole[len(prompt) :] if follows(prompt, whole, ids) else ids for prompt, whole, ids in made]

    def adds_end(self, text: str, prompt: Sequence[int]) -> bool:
        """Whether the tokenizer adds the last id of the prompt to those of the text."""
        return prompt[-1:] != self.backend.encode(text, add_special_tokens=False).ids[-1:]  # type: ignore[no-any-return]

    def _note_twice(self, example: Example) -> None:
        if not self.notes:
            front = self.backend.decode(self._front, skip_special_tokens=False)
            adds = f"{front!r} that the {'template' if self._is_written else 'tokenizer'} adds"
            self.notes.append(f"the prompt of {example.place} begins with the {adds}: prompts have it once")

    def _encode(
        self, examples: Sequence[Example], texts: Sequence[str], *, special: bool, backend: Any = None
    ) -> list[list[int]]:
        """Token ids of one text per example. ConfigError names the line of a text that the tokenizer cannot encode."""
        try:
            made = (backend or self.backend).encode_batch_fast(list(texts), add_special_tokens=special)
            return [each.ids for each in made]
        except Exception as error:  # the tokenizers package raises plain ones, for a character without a token
            if len(examples) == 1:
                message = f"{examples[0].place}: the tokenizer cannot encode {texts[0]!r:.80}: {error}"
                remedy = "take the line out, or give the tokenizer an unknown token"
                raise ConfigError(message, remedy=remedy) from error
            pairs = zip(examples, texts, strict=True)
            return [ids for one, text in pairs for ids in self._encode([one], [text], special=special, backend=backend)]


def continuing(backend: Any) -> Any:
    """A tokenizers.Tokenizer that puts no space before a text, for a text that continues another one.

    Metaspace (Llama 2, Mistral), `Prepend` and byte-level BPE with a prefix space do so at the beginning of each text.
    """
    names = [name for name in ("normalizer", "pre_tokenizer") if getattr(backend, name) is not None]
    parts = {name: json.loads(getattr(backend, name).__getstate__()) for name in names}
    without = {name: _without_prefix(part) for name, part in parts.items()}
    if without == parts:
        return backend
    from tokenizers import Tokenizer

    state = {**json.loads(backend.to_str()), **without}
    for token in state["added_tokens"]:
        if token["normalized"] and "normalizer" in parts:  # it matches normalized text
            token["content"] = backend.normalizer.normalize_str(token["content"])
    return Tokenizer.from_str(json.dumps(state))


def _without_prefix(part: dict[str, Any]) -> dict[str, Any]:
    """The JSON of a normalizer or pre-tokenizer."""
    kind = str(part.get("type"))
    if kind == "Prepend":
        return {"type": "Sequence", "normalizers": []}
    changes: dict[str, dict[str, Any]] = {"Metaspace": {"prepend_scheme": "never"}, "ByteLevel": {"add_prefix_space": False}}
    lists = [key for key in ("normalizers", "pretokenizers") if key in part]
    inner: dict[str, Any] = {key: [_without_prefix(each) for each in part[key]] for key in lists}
    return {**part, **changes.get(kind, {}), **inner}


def _added_front(backend: Any) -> list[int]:
    """The ids that the tokenizer puts before a text by itself, such as the beginning of a sequence."""
    try:
        plain, whole = (backend.encode("0", add_special_tokens=special).ids for special in (False, True))
    except Exception:  # noqa: BLE001 - a plain one, for a character without a token
        plain, whole = [], backend.encode("", add_special_tokens=True).ids
    sizes = [size for size in range(len(whole)) if whole[size : size + len(plain)] == plain]
    return whole[: sizes[0]] if sizes else []
