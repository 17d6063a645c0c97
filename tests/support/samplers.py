"""Samplers that say what a test has written for them, as tokens of a small tokenizer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from megasync.episodes.chat import Model
from megasync.episodes.segments import Recorder, Turn
from megasync.episodes.template import TemplateRenderer
from megasync.episodes.tokens import Tokens
from tests.support.chat_families import FAMILIES, Family

FAMILY = FAMILIES["qwen3"]


class Lines:
    """A sampler that says the given lines one after the other, the stop token last; an empty line waits for ever."""

    def __init__(self, *lines: str, family: Family = FAMILY) -> None:
        self.tokens, self.stops = Tokens(family.tokenizer(), family.stop_token_ids()), family.stop_token_ids()[:1]
        self.lines = list(lines)
        self.prompts: list[list[int]] = []
        self.options: list[tuple[int | None, tuple[str, ...]]] = []
        self.num_cancelled = 0

    async def __call__(self, prompt_ids: Sequence[int], *, max_new_tokens: int | None = None, stop: Sequence[str] = ()) -> Turn:
        self.prompts.append(list(prompt_ids))
        self.options.append((max_new_tokens, tuple(stop)))
        line = self.lines.pop(0)
        try:
            await asyncio.sleep(0 if line else 3600)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        ids = [*self.tokens.encode(line), *self.stops]
        cut = ids[:max_new_tokens]
        return Turn(cut, [-1] * len(cut), [3] * len(cut), "length" if len(cut) < len(ids) else "stop")


def model_of(sampler: Lines) -> Model:
    return Model(sampler, TemplateRenderer(sampler.tokens), Recorder())
