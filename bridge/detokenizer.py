"""Sampled token ids as text, for rewards, stop texts, logs, episodes and evaluations alike.

The text of a response is the text that its tokens add to the text before them. Nothing is stripped or cleaned up; special tokens
are kept, and so is a space that belongs to the first token. The token that ended a response is no part of its text
(`without_end`). Where the decoder puts a space between any two tokens (WordPiece, or none) the first has none before it. Bytes
that are no character are U+FFFD.

    tokenizer, switched_off = load("Qwen3-0.6B")
    detokenizer = Detokenizer(tokenizer)
    detokenizer.texts([[19, 17], [20]]), detokenizer.pieces([19, 17])

Leaves out text to ids (megasync/data) and stop texts in vLLM (vllm/serving/stops.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Container, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

NO_CHARACTER = "\ufffd"
BYTE = re.compile("<0x[0-9A-F]{2}>")  # of the decoder ByteFallback


def load(folder: str | Path) -> tuple[Any, list[str]]:
    """The tokenizer of a model's folder, from tokenizer.json, and a note of each saved setting that was switched off.

    Truncation, padding, BPE dropout, the splitting of special tokens, and the clean-up of a decoder would change what a text or
    ids say.
    Raises what transformers and tokenizers raise.
    """
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    backend, off = tokenizer.backend_tokenizer, list[str]()
    if backend.truncation:
        off.append(f"truncation to {backend.truncation['max_length']} tokens")
        backend.no_truncation()
    if backend.padding:
        length = backend.padding.get("length")
        off.append(f"padding to {length} tokens" if length else "padding to the longest text")
        backend.no_padding()
    if dropout := getattr(backend.model, "dropout", None):  # merges at random
        off.append(f"BPE dropout of {dropout:g}")
        backend.model.dropout = None
    if tokenizer.split_special_tokens:
        off.append("split_special_tokens")
        tokenizer.split_special_tokens = False
    backend.encode_special_tokens = False
    state = json.loads(backend.decoder.__getstate__()) if backend.decoder else {}
    if _switch_off_cleanup(state):
        off.append("the decoder's cleanup")
        decoder = backend.decoder
        decoder.__setstate__(json.dumps(state).encode())
        backend.decoder = decoder
    if tokenizer.clean_up_tokenization_spaces:
        off.append("clean_up_tokenization_spaces")
        tokenizer.clean_up_tokenization_spaces = False
    return tokenizer, off


def _switch_off_cleanup(decoder: dict[str, Any]) -> bool:
    """Edits a decoder's JSON. Returns whether the option was on anywhere."""
    inner = [_switch_off_cleanup(each) for each in decoder.get("decoders", ())]
    was_on = bool(decoder.get("cleanup"))
    if was_on:
        decoder["cleanup"] = False
    return was_on or any(inner)


def without_end(token_ids: Sequence[int], ends: Container[int]) -> list[int]:
    """A response without the one token of `ends` that ended it."""
    ids = list(token_ids)
    return ids[:-1] if ids and ids[-1] in ends else ids


class Detokenizer:
    """`tokenizer`: transformers' PreTrainedTokenizerFast, as `load` returns it."""

    def __init__(self, tokenizer: Any) -> None:
        self.backend = tokenizer.backend_tokenizer
        added = {number: token.content for number, token in sorted(self.backend.get_added_tokens_decoder().items())}
        alone = self.backend.decode_batch([[number] for number in added], skip_special_tokens=False)
        exact = (number for number, text in zip(added, alone, strict=True) if text == added[number] != "")
        # before each text: some decoders strip the first space of all, or treat the first token in another way
        self.context = [number for number in [next(exact, None)] if number is not None]
        self._prefix: str = self._decode(self.context)
        self._joiner = " " if self.context and self._decode(self.context * 2) == f"{self._prefix} {self._prefix}" else ""
        decoded = self._decode_batch([[number] for number in added])
        self._apart = {  # added tokens whose characters the decoder would take for bytes that are none: <é> in byte-level BPE
            number: content
            for (number, content), text in zip(added.items(), decoded, strict=True)
            if NO_CHARACTER in text and not BYTE.fullmatch(content)
        }

    def text(self, token_ids: Sequence[int]) -> str:
        """The text that the ids add."""
        return self.texts([token_ids])[0]

    def texts(self, sequences: Sequence[Sequence[int]]) -> list[str]:
        """`text` of each, while Python's other threads run: the tokenizers package's `decode` would hold them up."""
        cut = [self._cut(list(ids)) for ids in sequences]
        decoded = iter(self._decode_batch([part for parts in cut for part in parts if not isinstance(part, str)]))
        joined = ("".join(part if isinstance(part, str) else next(decoded) for part in parts) for parts in cut)
        return [text.removeprefix(self._joiner) for text in joined]

    def whole(self, token_ids: Sequence[int]) -> str:
        """The text of ids with nothing before them, such as a prompt's."""
        ids = list(token_ids)
        return self._decode(ids) if self._apart.keys().isdisjoint(ids) else self.text(ids)

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        """The text of each token; joined, they are `text`. Of a character's tokens the last one has it, the others are empty."""
        stream, whole = self.stream(), self.text(token_ids)
        pieces = [stream.step(each) for each in token_ids]
        joined = "".join(pieces)
        if pieces and whole.startswith(joined):
            pieces[-1] += whole[len(joined) :]
            return pieces
        ends = [0]  # bytes that are no text can change what stands before them: up to where does what each leaves agree
        for text in self.texts([token_ids[: count + 1] for count in range(len(token_ids))]):
            ends.append(max(ends[-1], _num_common(text, whole)))
        return [whole[begin:end] for begin, end in pairwise(ends)]

    def stream(self) -> TextStream:
        """Detokenizes token by token."""
        return TextStream(self)

    def _cut(self, ids: list[int]) -> list[list[int] | str]:
        """Ids for the decoder, and between them the texts of tokens that are kept from it."""
        if self._apart.keys().isdisjoint(ids):
            return [ids]
        parts, run = list[list[int] | str](), list[int]()
        for each in ids:
            if each in self._apart:
                parts += [run, self._apart[each]]
                run = []
            else:
                run.append(each)
        return [*parts, run]

    def _decode(self, ids: list[int]) -> str:
        return self.backend.decode(ids, skip_special_tokens=False)  # type: ignore[no-any-return]

    def _decode_batch(self, runs: Sequence[list[int]]) -> list[str]:
        decoded = self.backend.decode_batch([[*self.context, *ids] for ids in runs], skip_special_tokens=False)
        return [text.removeprefix(self._prefix) for text in decoded]


class TextStream:
    """A text that grows by a token at a time; a character's bytes are held back until it is whole."""

    def __init__(self, detokenizer: Detokenizer) -> None:
        self._of, self._begun, self._held = detokenizer, False, list[int]()
        self._restart()

    def step(self, token_id: int) -> str:
        """The text that this token adds, including text that was held back before it."""
        kept: str | None = self._of._apart.get(token_id)
        if kept is not None:
            text = "".join(self._of._decode_batch([self._held])) + kept
            self._restart()
        else:
            text = self._decoded(token_id)
            self._held = [] if text else [*self._held, token_id]
        if text and not self._begun:
            self._begun, text = True, text.removeprefix(self._of._joiner)
        return text

    def _decoded(self, token_id: int) -> str:
        text: str | None
        try:
            text = self._stream.step(self._of.backend, token_id)
        except Exception:  # noqa: BLE001 - a plain one, where bytes change what stands before them (vllm-project/vllm#17448)
            self._restart()
            text = self._stream.step(self._of.backend, token_id)
        return text or ""

    def _restart(self) -> None:
        from tokenizers.decoders import DecodeStream

        self._stream: Any = DecodeStream(ids=self._of.context, skip_special_tokens=False)
        self._held = []


def _num_common(one: str, other: str) -> int:
    """Characters at their beginnings that are the same."""
    pairs = zip(one, other, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
