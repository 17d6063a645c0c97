"""A prompt and the answer that was sampled for it, read as a message and split into the tokens of its parts.

Leaves out prompts of a conversation (template.py), and the text as a message (parse.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megasync.episodes.calls.formats import Format
from megasync.episodes.messages import Tool
from megasync.episodes.parse import END_THINK, THINK, Parsed, parse
from megasync.episodes.tokens import Tokens

THINK_TOKENS = 12  # enough for the tag and white space after it


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    ids: list[int]
    text: str  # with marks and without the generation prompt
    continues: bool = False  # the tokens of a former prompt and its answer begin it


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """The sampled tokens for a prompt, and the message that they are read as."""

    prompt: Prompt
    token_ids: list[int]
    parsed: Parsed
    call_ids: tuple[str, ...] = ()


def read_answer(
    tokens: Tokens, form: Format, prompt_ids: Sequence[int], token_ids: Sequence[int], tools: Sequence[Tool]
) -> Parsed:
    """The sampled tokens as a message; the prompt may have begun the reasoning."""
    text = tokens.decode(tokens.without_stop(token_ids))
    return parse(text, form, tools, thinking=tokens.decode(prompt_ids[-THINK_TOKENS:]).rstrip().endswith(THINK))


def parts(tokens: Tokens, answer: Answer) -> tuple[list[int], list[int]]:
    """Tokens of the reasoning and of the rest, without the tags and the white space that a template writes itself."""
    ids = tokens.without_stop(answer.token_ids)
    if not tokens.decode(answer.prompt.ids[-THINK_TOKENS:]).rstrip().endswith(THINK):  # the prompt did not begin the reasoning
        begun = tokens.split(ids, THINK)
        if begun is None or tokens.decode(begun[0]).strip():
            return [], ids
        ids = begun[1]
    reasoning, content = tokens.split(ids, END_THINK) or (ids, [])
    return tokens.trimmed(reasoning), tokens.trimmed(content)
