"""Messages as data sets hold them, in OpenAI's form, and what else of a row a chat template reads. No torch in here.

Leaves out rendering them (prompts.py).

    as_messages("train.jsonl:3: 'messages'", [{"role": "user", "content": "1+2="}])
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence
from typing import Any

from megasync.config.errors import ConfigError, refuse_if

Message = dict[str, Any]
Turn = tuple[str, str]  # role and content
ROLES = ("system", "user", "assistant", "tool")
RENDERED = ("tool_calls", "reasoning_content", "reasoning", "thinking")  # what templates write of a message, beside its content
FIELDS = ("role", "content", "name", "tool_call_id", *RENDERED)
TOOLS, ARGUMENTS = "tools", "chat_template_kwargs"  # TRL's columns
TURNS_REMEDY = 'write it as [{"role": "user", "content": "1+2="}]'


def as_messages(
    place: str, messages: Sequence[Any], *, may_answer: bool = False, is_completion: bool = False
) -> tuple[Message, ...]:
    """A system prompt at most, then turns, the last one the user's or a tool's; the assistant's where it `may_answer`.

    A completion begins with the assistant's and ends with it.

    Raises:
        ConfigError: names the message.
    """
    for number, message in enumerate(messages, start=1):
        if problem := _wrong_message(message, number):
            raise ConfigError(f"{place}: message {number} {problem}", remedy=TURNS_REMEDY)
    refuse_if(
        not messages, f"{place} is a list without messages", remedy="end it with a user's turn, which the model is to answer"
    )
    first, last = messages[0]["role"], messages[-1]["role"]
    message = f"{place} begins with the {first}'s turn and ends with the {last}'s"
    is_wrong = is_completion and (first, last) != ("assistant", "assistant")
    refuse_if(is_wrong, message, remedy="a completion begins and ends with the assistant's")
    message, remedy = f"{place} ends with the {last}'s turn", "end it with a user's turn, which the model is to answer"
    refuse_if(last == "system" or (last == "assistant" and not may_answer), message, remedy=remedy)
    return tuple(_plain(message) for message in messages)


def answered(place: str, messages: Sequence[Message]) -> tuple[tuple[Message, ...], tuple[Message, ...]]:
    """A conversation's prompt, and the rest from the first of the assistant's turns on."""
    first = next(number for number, message in enumerate(messages) if message["role"] == "assistant")
    refuse_if(first == 0, f"{place} begins with the assistant's turn", remedy="begin it with the user's")
    return tuple(messages[:first]), tuple(messages[first:])


def text_of(message: Message) -> str:
    """An answer as text: its content, or its tool calls as JSON."""
    return message.get("content") or json.dumps(message.get("tool_calls", []), ensure_ascii=False)


def unwritten(text: str) -> list[Any] | None:
    """The messages that `text` is as JSON, or as Python writes a list; None where it is none."""
    if text.lstrip()[:1] == "[" and "role" in text:
        for parse in (json.loads, ast.literal_eval):
            try:
                found = parse(text)
            except (ValueError, SyntaxError, RecursionError, MemoryError):
                continue
            are_messages = isinstance(found, list) and all(isinstance(each, dict) and "role" in each for each in found)
            return found if are_messages and found else None
    return None


def tools_of(column: str, value: Any) -> Any:
    """What a template is given of one of TRL's columns, which may be written as JSON: a list of tools, or variables by name. None
    where it is neither.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value or "null")
        except (ValueError, RecursionError):
            return None
    if not value:
        return {} if column == ARGUMENTS else []
    if column == ARGUMENTS:
        return value if isinstance(value, Mapping) else None
    return value if isinstance(value, list) and all(_is_tool(each) for each in value) else None


def _is_tool(value: Any) -> bool:
    inner = value.get("function", value) if isinstance(value, Mapping) else None
    return isinstance(inner, Mapping) and isinstance(inner.get("name"), str)


def _plain(message: Mapping[str, Any]) -> Message:
    """Without empty fields, and with a call's arguments as an object, which templates write as JSON themselves."""
    made = {name: value for name, value in message.items() if value is not None or name == "content"}
    if calls := made.get("tool_calls"):
        made["tool_calls"] = [_call(call) for call in calls]
    elif "tool_calls" in made:
        del made["tool_calls"]
    return {**made, "content": made.get("content") or ""}


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    inner = call.get("function", call)
    if isinstance(text := inner.get("arguments"), str):
        try:
            inner = {**inner, "arguments": json.loads(text)}
        except (ValueError, RecursionError):
            return dict(call)
    return {**call, "function": inner} if "function" in call else dict(inner)


def _wrong_message(message: Any, number: int) -> str:
    if not isinstance(message, Mapping):
        return f"is a {type(message).__name__}, not an object with role and content"
    calls = message.get("tool_calls") if message.get("role") == "assistant" else None
    for name in ("role", "content"):
        if not isinstance(message.get(name), str) and not (name == "content" and calls and message.get(name) is None):
            return f"has a {name} that is a {type(message[name]).__name__}, not a text" if name in message else f"has no {name}"
    if message["role"] not in ROLES:
        return f"has the role {message['role']!r}, not one of {', '.join(ROLES)}"
    if message["role"] == "system" and number > 1:
        return "is a system prompt that is not the first message"
    if calls and not (isinstance(calls, list) and all(_is_tool(call) for call in calls)):
        return "has tool_calls that are not a list of objects with function, name and arguments"
    more = [name for name, value in message.items() if name not in FIELDS and value is not None]
    return f"has {more[0]!r}, and {', '.join(FIELDS)} are expected" if more else ""
