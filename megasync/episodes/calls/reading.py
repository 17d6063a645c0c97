"""All tool calls of a text, in their order, and the text around them.

read_calls('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>', "hermes", tools)
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megasync.episodes.calls.arguments import UnreadableError
from megasync.episodes.calls.cursor import ARGUMENTS, Call, Cursor
from megasync.episodes.calls.formats import BLOCKS, Block, Format, names_of
from megasync.episodes.messages import Tool


@dataclass(frozen=True, slots=True)
class Broken:
    """A call that cannot be read: as the model wrote it, and why."""

    text: str
    why: str


class Read(NamedTuple):
    """`content`: the text outside of calls, and calls that cannot be read."""

    content: str
    calls: list[Call]
    broken: list[Broken]


def read_calls(text: str, form: Format, tools: Sequence[Tool]) -> Read:
    """All calls in the text, in their order."""
    return _llama(text, tools) if form == "llama" else _blocks(text, BLOCKS[form], tools)


def _blocks(text: str, block: Block, tools: Sequence[Tool]) -> Read:
    tags, place = block.tags(tools), 0
    kept, calls, broken = list[str](), list[Call](), list[Broken]()
    last: tuple[int, int, int] | None = None  # of a block that was read: its begin, and what there was before it
    while found := tags.search(text, place):
        kept.append(text[place : found.start()])
        begin, state = found.start(), (found.start(), len(kept), len(calls))
        try:
            cursor = Cursor(text, begin, tools)
            calls += _read_block(cursor, found[0], block)
            place, last = cursor.place, state
        except UnreadableError as error:
            if last and found[0] == block.end_value:  # the block before it may have gone on, with its end in a value
                begin, num_kept, num_calls = last
                del kept[num_kept:], calls[num_calls:]
            place, last = _end_of_broken(text, found, block, tags), None
            broken.append(Broken(text[begin:place], str(error)))
            kept.append(text[begin:place])
    return Read("".join(kept) + text[place:], calls, broken)


def _read_block(cursor: Cursor, tag: str, block: Block) -> list[Call]:
    if tag in block.others:
        raise UnreadableError(f"{tag} stands outside of a call")
    if tag == "[" and cursor.text[: cursor.place].strip():
        raise UnreadableError("calls without tags are the whole answer, and text comes before them")
    return block.read(cursor)


def _end_of_broken(text: str, found: re.Match[str], block: Block, tags: re.Pattern[str]) -> int:
    """Behind the last tag before the next block, or where that begins."""
    begins, end = block.begins[:1] if found[0] == block.begins[0] else block.begins, 0
    for tag in tags.finditer(text, found.end()):
        if tag[0] in begins:
            return end or tag.start()
        end = tag.end() if tag[0] in block.others else 0
    return end or (found.end() if found[0] in block.others else len(text))


def _llama(text: str, tools: Sequence[Tool]) -> Read:
    """Without tags: an object that names an offered tool is a call, and so is an object with a name and parameters."""
    start = text.strip().removeprefix("<|python_start|><|python_end|>")  # Llama 4's begin of a call without text before it
    start = start.removeprefix("<|python_start|>").removesuffix("<|python_end|>")
    is_marked, start = start.startswith("<|python_tag|>"), start.removeprefix("<|python_tag|>").strip()
    is_call = is_marked or bool(re.search(rf'"name"\s*:\s*"(?:{names_of(tools)})"', text))
    cursor, calls = Cursor(start, 0, tools), list[Call]()
    try:
        while not (calls and cursor.is_at_end):
            value = cursor.json()
            each = value if isinstance(value, list) else [value]
            is_call = is_call or any(isinstance(one, dict) and "name" in one and one.keys() & ARGUMENTS for one in each)
            calls += map(cursor.call, each)
            cursor.skip(" \t\r\n,;")
    except UnreadableError as error:
        why = str(error) if start[:1] in ("{", "[") else "a call is the whole answer, and other text comes before it"
        return Read(text, [], [Broken(text, why)] if is_call else [])
    return Read("", calls, []) if is_call else Read(text, [], [])
