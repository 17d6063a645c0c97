r"""Text to tokens and back, with marks: places in a text that stand for tokens which are known already.

A sampled answer goes into a chat template as a mark, and its tokens take the mark's place afterwards: what a model sampled is
never tokenised again. Leaves out templates (template.py).

    tokens = Tokens(tokenizer, stop_token_ids)
    tokens.encode("<|im_start|>assistant\n" + mark(0, "content"), {mark(0, "content"): [42, 43]})
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from bridge.detokenizer import Detokenizer, without_end

NONCE = secrets.token_hex(8)  # no text from outside holds it
MARK = re.compile(f"\ue000{NONCE}:\\w+:\\d+\ue001")  # private-use characters: no template trims them


def mark(index: int, part: Literal["reasoning", "content"]) -> str:
    """Stands for a part of the message at that index."""
    return f"\ue000{NONCE}:{part}:{index}\ue001"


class Tokens:
    """A tokenizer of transformers, with the tokens that end an answer."""

    def __init__(self, tokenizer: Any, stop_token_ids: Sequence[int]) -> None:
        self.tokenizer = tokenizer
        self.stop_token_ids = frozenset(stop_token_ids)
        self._backend, self._detokenizer = tokenizer.backend_tokenizer, Detokenizer(tokenizer)

    def encode(self, text: str, known: Mapping[str, Sequence[int]] | None = None) -> list[int]:
        """Special tokens in the text count as such; marks become the tokens that are `known` of them.

        Half a surrogate pair, as a call's arguments may have it, is no text for a tokenizer, and becomes a question mark.
        """
        made: list[int] = []
        text = text.encode(errors="replace").decode()
        end = 0
        for found in MARK.finditer(text):
            made += [*self._encode(text[end : found.start()]), *(known or {})[found[0]]]
            end = found.end()
        return made + self._encode(text[end:])

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids if text else []
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Their text, as rewards see it (bridge/detokenizer.py)."""
        return self._detokenizer.text(token_ids)

    def without_stop(self, token_ids: Sequence[int]) -> list[int]:
        """A sampled answer without the token that ended it."""
        return without_end(token_ids, self.stop_token_ids)

    def is_closed(self, token_ids: Sequence[int]) -> bool:
        return len(token_ids) > 0 and int(token_ids[-1]) in self.stop_token_ids

    def trimmed(self, token_ids: Sequence[int]) -> list[int]:
        """Without tokens of white space alone at both ends."""
        begin, end = 0, len(token_ids)
        while begin < end and not self.decode(token_ids[begin : begin + 1]).strip():
            begin += 1
        while begin < end and not self.decode(token_ids[end - 1 : end]).strip():
            end -= 1
        return list(token_ids[begin:end])

    def split(self, token_ids: Sequence[int], text: str) -> tuple[list[int], list[int]] | None:
        """Tokens before the first occurrence of `text` and those after it, cut at tokens; None where it does not occur.

        A token that holds the occurrence's begin or end and something else is in neither.
        """
        whole = self.decode(token_ids)
        if text not in whole:
            return None
        place = whole.index(text)
        end = _first(len(token_ids), lambda count: text in self.decode(token_ids[:count]))
        begin = _first(end, lambda count: len(self.decode(token_ids[:count])) > place) - 1
        return list(token_ids[:begin]), list(token_ids[end:])


def _first(limit: int, holds: Callable[[int], bool]) -> int:
    """The least number up to `limit` for which it holds, as it does for all above and for `limit`."""
    low, high = 0, limit
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return low
