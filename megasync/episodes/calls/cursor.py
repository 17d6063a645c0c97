"""A place in what a model wrote, and what of a call can stand there: tags, names, JSON. Leaves out formats (formats.py).

cursor = Cursor('<tool_call>{"name": "now"}', 0, tools)
cursor.take("<tool_call>"), cursor.call(cursor.json())
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from megasync.episodes.calls.arguments import UnreadableError, arguments_of, read_json
from megasync.episodes.messages import Tool

NAME = re.compile(r"[\w-]+")
ARGUMENTS = {"arguments", "parameters"}
KEYS = {"name", "id", "type", *ARGUMENTS}  # of a call as a JSON object; its id and type are passed over
SHOWN_CHARACTERS = 40
Call = tuple[str, dict[str, Any]]


class Cursor:
    """A position in a text; reading moves it on."""

    def __init__(self, text: str, place: int, tools: Sequence[Tool]) -> None:
        self.text, self.place = text, place
        self.functions = {tool["function"]["name"]: tool["function"] for tool in tools}

    @property
    def is_at_end(self) -> bool:
        return self.place == len(self.text)

    @property
    def here(self) -> str:
        """The next character, or nothing."""
        return self.text[self.place : self.place + 1]

    @property
    def shown(self) -> str:
        """The text that comes next, for an error message."""
        return self.text[self.place : self.place + SHOWN_CHARACTERS]

    def take(self, *texts: str) -> str:
        """The first of these that stands here, or nothing."""
        found = next((each for each in texts if each and self.text.startswith(each, self.place)), "")
        self.place += len(found)
        return found

    def skip(self, characters: str = " \t\r\n") -> None:
        while self.here and self.here in characters:
            self.place += 1

    def match(self, pattern: re.Pattern[str], what: str) -> re.Match[str]:
        found = pattern.match(self.text, self.place)
        if not found:
            raise UnreadableError(f"{self.shown!r} stands where {what} is expected")
        self.place = found.end()
        return found

    def until(self, end: str) -> str:
        """The text before `end`, which is passed."""
        place = self.text.find(end, self.place)
        if place < 0:
            raise UnreadableError(f"{end} is missing")
        begin, self.place = self.place, place + len(end)
        return self.text[begin:place]

    def close(self, end: str) -> None:
        """A tag that ends a call; the text may end before it."""
        self.skip()
        if not self.is_at_end and not self.take(end):
            raise UnreadableError(f"{self.shown!r} stands where {end} is expected")

    def json(self) -> Any:
        self.skip()
        value, self.place = read_json(self.text, self.place)
        return value

    def name(self, text: str) -> str:
        """`text`, stripped. UnreadableError: it is neither the name of an offered tool nor of a name's form."""
        text = text.strip()
        if text not in self.functions and not NAME.fullmatch(text):
            raise UnreadableError(f"{text!r:.80} is no tool's name")
        return text

    def call(self, value: Any) -> Call:
        """The call that a JSON object with name and arguments describes."""
        if not isinstance(value, dict) or not isinstance(value.get("name"), str):
            raise UnreadableError("a call has no name: write an object with name and arguments")
        if others := sorted(value.keys() - KEYS):
            raise UnreadableError(f"a call has the key {others[0]!r:.80}: write name and arguments")
        if value.keys() >= ARGUMENTS:
            raise UnreadableError("a call has both arguments and parameters: write arguments")
        return self.name(value["name"]), arguments_of(value.get("arguments", value.get("parameters")))
