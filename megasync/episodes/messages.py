"""Messages in OpenAI's form, made plain: the input of a chat template, and the key by which a message is recognised.

Leaves out tokens. A message that a client sends back may differ in form from the one it got: content as a list of parts, tool
calls written as JSON with other spaces, reasoning left out. `key` is the same for all of these.

    plain({"role": "user", "content": [{"type": "text", "text": "Hi"}]})     # {"role": "user", "content": "Hi"}
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

ROLES = ("system", "developer", "user", "assistant", "tool")
Message = dict[str, Any]
Tool = dict[str, Any]


class MessageError(ValueError):
    """A message or a tool is not what a chat template can be given; the text says what to write."""


class Fields(dict[str, Any]):
    """A dict whose keys are attributes too, as those of the official clients' messages are; one that is not there is None."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.get(name)


def plain(message: Mapping[str, Any]) -> Message:
    """A message with `role`, `content` as text and, where it has them, `reasoning`, `tool_calls`, `tool_call_id`, `name`.

    Raises:
        MessageError: it has no role, or content that is not text.
    """
    if not isinstance(message, Mapping):
        raise MessageError(f"a message is of type {type(message).__name__}: write role and content")
    if message.get("function_call"):
        raise MessageError("a message has a function_call: write tool_calls")
    role = message.get("role")
    if role is None:
        raise MessageError(f"a message has no role: {dict(message)!r:.200}; write role: system, user, assistant or tool")
    if role not in ROLES:
        raise MessageError(f"a message's role is {role!r:.100}: write system, user, assistant or tool")
    made: Message = {"role": "system" if role == "developer" else role, "content": text_of(message.get("content"))}
    if reasoning := message.get("reasoning") or message.get("reasoning_content"):
        made["reasoning"] = reasoning
    if calls := message.get("tool_calls"):
        if not isinstance(calls, Sequence):
            raise MessageError(f"tool_calls are of type {type(calls).__name__}: write a list of calls")
        made["tool_calls"] = [_call(call) for call in calls]
    made.update({name: message[name] for name in ("tool_call_id", "name") if message.get(name)})
    return made


def text_of(content: Any) -> str:
    """The text of a text, a list of text parts, or None.

    Raises:
        MessageError: there is something else, such as an image.
    """
    if content is None or isinstance(content, str):
        return (content or "").encode(errors="replace").decode()  # half a surrogate pair is no text for a tokenizer
    if not isinstance(content, Sequence):
        raise MessageError(f"content is {type(content).__name__}: write a text, or a list of parts")
    texts = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, Mapping) and isinstance(part.get("text"), str):
            texts.append(part["text"])
        else:
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise MessageError(f"content has a part of type {kind!r}: only text is taken")
    return text_of("".join(texts))


def _double(text: str) -> int | float | str:
    number = float(text) + 0.0  # -0.0 is 0.0
    if not math.isfinite(number):
        return text
    return int(number) if number.is_integer() else number


def _decoder(object_hook: Callable[[dict[str, Any]], Any] | None = None) -> json.JSONDecoder:
    return json.JSONDecoder(object_hook=object_hook, parse_int=_double, parse_float=_double, parse_constant=str)


AS_IT_IS = _decoder()
# in which a client may write what was sampled; the other way round it is another value
WAYS = (
    AS_IT_IS,
    _decoder(lambda fields: {name: value for name, value in fields.items() if value is not None}),  # Gson, Swift, Go's omitempty
    _decoder(lambda fields: fields or []),  # PHP
)
SORTED = json.JSONEncoder(sort_keys=True, ensure_ascii=False)


def canonical(value: Any, way: json.JSONDecoder = AS_IT_IS) -> bytes:
    """A canonical form of a JSON value: the same after a client has parsed and written it.

    A client may write 1 for 1.0 and 1e3 for 1000, keep numbers as doubles, and has other ways with -0.0, the order of keys,
    escapes and halves of surrogate pairs. `way`, of WAYS: without null fields of objects, or with [] for empty ones.
    """
    text = SORTED.encode(way.decode(json.dumps(value)))
    return text.replace("\ufffd", "?").encode(errors="replace")


def key(message: Message, way: json.JSONDecoder = AS_IT_IS) -> bytes:
    """The key of a plain message: the same after a client has parsed and written it. Leaves out reasoning and ids of calls."""
    calls = [[call["function"]["name"], call["function"]["arguments"]] for call in message.get("tool_calls", ())]
    text = json.dumps([message["role"], message["content"].strip()])
    return hashlib.blake2b(text.encode() + (canonical(calls, way) if calls else b""), digest_size=16).digest()


def digest(before: bytes, value: Any) -> bytes:
    """The key of a JSON value, chained to the key before it."""
    return hashlib.blake2b(before + canonical(value), digest_size=16).digest()


def keys_of_histories(messages: Sequence[Message], tools: Sequence[Tool]) -> list[bytes]:
    """The i-th stands for the first i messages with these tools."""
    made = [digest(b"", list(tools))]
    for message in messages:
        made.append(following(made[-1], message))
    return made


def following(history: bytes, message: Message, way: json.JSONDecoder = AS_IT_IS) -> bytes:
    """The key of that history and one more message."""
    return hashlib.blake2b(history + key(message, way), digest_size=16).digest()


def plain_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[Tool]:
    """In OpenAI's form, `{"type": "function", "function": {"name", "description", "parameters"}}`; Anthropic's is taken too.

    Raises:
        MessageError: one has no name, or parameters that are no schema.
    """
    made = []
    for tool in tools or ():
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise MessageError(f"a tool has no name: {_shown(tool)}; write type: function, function: {{name, parameters}}")
        parameters = function.get("parameters") or function.get("input_schema") or {"type": "object", "properties": {}}
        if parameters is True:  # the JSON schema of any value
            parameters = {"type": "object", "properties": {}}
        if not isinstance(parameters, Mapping):
            raise MessageError(f"a tool's parameters are {_shown(parameters)}: write a JSON schema, such as {{type: object}}")
        description = function.get("description") or ""
        made.append(
            {"type": "function", "function": {"name": function["name"], "description": description, "parameters": parameters}}
        )
    return made


def _call(call: Mapping[str, Any]) -> Message:
    """Arguments as an object where they are one: templates walk through it."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise MessageError(f"a tool call has no function with a name: {_shown(call)}")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):  # else as the model wrote it
            arguments = json.loads(arguments, strict=False) or {}
    made = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    return {"id": call["id"], **made} if call.get("id") else made


def _shown(value: Any) -> str:
    return repr(dict(value) if isinstance(value, Mapping) else value)[:200]
