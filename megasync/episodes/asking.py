"""What a program asks for over HTTP, in whatever protocol. Leaves out the protocols (openai_form.py, anthropic_form.py)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from megasync.episodes.chat import Reply
from megasync.episodes.messages import MessageError

MOST_SAMPLES = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One request. How tokens are drawn (temperature, top_p, seed ...) is the run's and not the program's.

    Nor can a program make the policy call a tool: with any `tool_choice` but none it may.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    num_samples: int = 1
    stream: bool = False
    model: str = "policy"
    with_usage: bool = True  # in a stream
    with_reasoning: bool = True
    body: Mapping[str, Any] = field(default_factory=dict)

    def key(self) -> bytes:
        """Of the whole request: a retry has the same."""
        return _digest(b"", self.body)

    def histories(self) -> list[bytes]:
        """Keys of its first messages, of its first two, and so on: a request follows up those of which the last is among its."""
        keys = [b""]
        for message in objects(self.body, "messages"):
            keys.append(_digest(keys[-1], message))
        return keys[1:]


class Form(Protocol):
    """A protocol: how its requests are read, and how replies and errors are written."""

    def read(self, body: Mapping[str, Any]) -> Asked: ...

    def whole(self, asked: Asked, replies: Sequence[Reply]) -> dict[str, Any]: ...

    def events(self, asked: Asked, replies: Sequence[Reply]) -> list[str]: ...

    def error(self, status: int, message: str) -> dict[str, Any]: ...


def number(body: Mapping[str, Any], name: str, *, most: int | None = None) -> int | None:
    """A whole number of at least one, or None where it is not given.

    Raises:
        MessageError: it is something else.
    """
    value = body.get(name)
    if value is None:
        return None
    if type(value) is not int or value < 1 or (most is not None and value > most):
        raise MessageError(f"{name} = {value!r:.100}: write a whole number from 1" + (f" to {most}" if most else " on"))
    return value


def texts(body: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """A text or a list of texts."""
    value = body.get(name)
    listed = [value] if isinstance(value, str) else value or []
    if not isinstance(listed, list) or not all(isinstance(one, str) and one for one in listed):
        raise MessageError(f"{name} = {value!r:.100}: write a text, or a list of texts")
    return tuple(listed)


def objects(body: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    """A list of JSON objects; empty where it is not given."""
    value = body.get(name) or []
    if not isinstance(value, list) or not all(isinstance(one, Mapping) for one in value):
        raise MessageError(f"{name}: write a list of objects")
    return value


def refuse(body: Mapping[str, Any], names: Sequence[str]) -> None:
    """What would change the answer and is not there to be had."""
    for name in names:
        if body.get(name):
            raise MessageError(f"{name}: the policy's server has no such thing; leave it out")


def _digest(before: bytes, value: Any) -> bytes:
    return hashlib.blake2b(before + json.dumps(value, sort_keys=True).encode(), digest_size=16).digest()
