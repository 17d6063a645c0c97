"""Messages in OpenAI's form, as data sets hold them, and other columns for the chat template. No torch in here.

Leaves out rendering them (prompts.py).

    as_messages("train.jsonl:3: 'messages'", [{"role": "user", "content": "1+2="}])
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from megasync.config.errors import ConfigError, refuse_if

Message = dict[str, Any]
Turn = tuple[str, str]  # role and content
ROLES = ("system", "user", "assistant", "tool")
RENDERED = (
    "tool_calls",
    "reasoning_content",
    "reasoning",
    "thinking",
)  # rendered beside content
FIELDS = ("role", "content", "name", "tool_call_id", *RENDERED)
TOOLS, ARGUMENTS = "tools", "chat_template_kwargs"  # TRL's columns
LIKE_MESSAGES = re.compile(r"""\s*(?:array\()?\s*[\[{][\s\[{]*["'](?:role|content|messages)["']\s*:""")
TURNS_REMEDY = 'write it as [{"role": "user", "content": "1+2="}]'


def as_messages(
    place: str, messages: Sequence[Any], *, may_answer: bool = False, is_completion: bool = False
) -> tuple[Message, ...]:
    """Checks and normalises messages: an optional system prompt, then turns. The last turn is the user's or a tool's; with
    `may_answer` also the assistant's. With `is_completion` the first and the last turn are the assistant's.

    Raises:
        ConfigError: a message is malformed or out of order; the text begins with `place` and names the message.
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


def answered(place: str, messages: Sequence[Message], *, last: bool = False) -> tuple[tuple[Message, ...], tuple[Message, ...]]:
    """Splits a conversation into (prompt, completion); the completion begins with the first assistant turn, or the `last`."""
    first = [number for number, message in enumerate(messages) if message["role"] == "assistant"][-1 if last else 0]
    refuse_if(first == 0, f"{place} begins with the assistant's turn", remedy="begin it with the user's")
    return tuple(messages[:first]), tuple(messages[first:])


def text_of(message: Message) -> str:
    """An answer as text: its content, or its tool calls as JSON."""
    return message.get("content") or json.dumps(message.get("tool_calls", []), ensure_ascii=False)


def unwritten(text: str) -> list[Any] | None:
    """Messages that are written in `text` as JSON or as a Python literal; None if it holds none."""
    if text.lstrip()[:1] == "[" and "role" in text:
        for parse in (json.loads, ast.literal_eval):
            try:
                parsed = parse(text)
            except (ValueError, SyntaxError, RecursionError, MemoryError):
                continue
            are_messages = isinstance(parsed, list) and all(isinstance(each, dict) and "role" in each for each in parsed)
            return parsed if are_messages and parsed else None
    return None


def is_like_messages(text: str) -> bool:
    """Whether a text may be messages in a form that `unwritten` does not read, such as NumPy's."""
    return LIKE_MESSAGES.match(text) is not None and re.search(r"""["']content["']\s*:""", text) is not None


def tools_of(column: str, value: Any) -> Any:
    """The value of one of TRL's columns for the template, parsed if it is JSON text: a list of tools, or variables by name. None
    if the column holds something else.
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
    """The message without empty fields, and with arguments of calls as objects, since templates render them as JSON."""
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


def _has_arguments(call: Mapping[str, Any]) -> bool:
    given = call.get("function", call).get("arguments")
    if isinstance(given, str) and given:
        try:
            given = json.loads(given)
        except (ValueError, RecursionError):
            return False
    return isinstance(given, Mapping) or not given


def _kind(value: Any) -> str:
    parts = [part for part in value if isinstance(part, Mapping)] if isinstance(value, list) else []
    media = next((part["type"] for part in parts if part.get("type", "text") != "text"), None)
    return f"a {type(value).__name__}" + (f" with a part of type {media!r}" if media else "")


def _wrong_message(message: Any, number: int) -> str:
    if not isinstance(message, Mapping):
        return f"is a {type(message).__name__}, not an object with role and content"
    calls = message.get("tool_calls") if message.get("role") == "assistant" else None
    for name in ("role", "content"):
        if not isinstance(message.get(name), str) and not (name == "content" and calls and message.get(name) is None):
            return f"has a {name} that is {_kind(message[name])}, not a text" if name in message else f"has no {name}"
    if message["role"] not in ROLES:
        return f"has the role {message['role']!r}, not one of {', '.join(ROLES)}"
    if message["role"] == "system" and number > 1:
        return "is a system prompt that is not the first message"
    are_calls = not calls or (isinstance(calls, list) and all(_is_tool(call) for call in calls))
    if not are_calls or not all(_has_arguments(call) for call in calls or ()):
        form = "a list of objects with function, name and arguments" if not are_calls else "with arguments as a JSON object"
        return f"has tool_calls that are not {form}"
    more = [name for name, value in message.items() if name not in FIELDS and value is not None]
    return f"has {more[0]!r}, and {', '.join(FIELDS)} are expected" if more else ""
