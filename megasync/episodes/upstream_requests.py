"""A program's HTTP request, in either protocol. Leaves out the protocols (openai_form.py, anthropic_form.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from megasync.episodes.chat import Reply
from megasync.episodes.messages import MessageError, digest

MAX_SAMPLES = 128
ERROR_KINDS = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error"}  # by status, in both protocols
DRAWN = frozenset({"temperature", "top_p", "top_k", "min_p", "seed"})  # how tokens are drawn


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One request. How tokens are drawn (temperature, top_p, seed ...) is the run's and not the program's.

    Nor can a program make the policy call a tool: where it wants to, the policy still may answer without. The answer's headers
    name the fields that have no effect for these reasons.
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
    continues: bool = False  # the last message, which is the assistant's
    template: Mapping[str, Any] = field(default_factory=dict)  # variables of the chat template
    without_effect: tuple[str, ...] = ()  # fields that are the run's and not the program's, with other values than none
    body: Mapping[str, Any] = field(default_factory=dict)

    def key(self) -> bytes:
        """The key of the whole request: a retry has the same."""
        return digest(b"", self.body)

    def histories(self) -> list[bytes]:
        """Keys of its first message, its first two, and so on: a follow-up request has the last key of the former one."""
        keys = [b""]
        for message in objects(self.body, "messages"):
            keys.append(digest(keys[-1], message))
        return keys[1:]


class Form(Protocol):
    """A module of one protocol: how its requests are read, and how replies and errors are written."""

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


class KnownFields(NamedTuple):
    """Fields of a request that a protocol knows. None and empty values are ignored; any other field is refused."""

    taken: frozenset[str]
    harmless: frozenset[str]  # they do not change the answer
    of_run: frozenset[str]
    neutral: Mapping[str, tuple[Any, ...]]  # values that say what holds anyway

    def check(self, body: Mapping[str, Any]) -> tuple[str, ...]:
        """The fields that are the run's.

        Raises:
            MessageError: a field that would change the answer, which the policy's server cannot give.
        """
        said = {name: value for name, value in body.items() if value is not None and value not in ([], {}, "")}
        known = self.taken | self.harmless | self.of_run
        for name, value in said.items():
            if name not in known and value not in self.neutral.get(name, ()):
                raise MessageError(f"{name}: the policy's server has no such thing; leave it out")
        return tuple(sorted(said.keys() & self.of_run))


def mapping(body: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A JSON object; empty where it is not given."""
    value = body.get(name) or {}
    if not isinstance(value, Mapping):
        raise MessageError(f"{name} = {value!r:.100}: write an object")
    return value


def only(tools: Sequence[Mapping[str, Any]], name: Any) -> list[Mapping[str, Any]]:
    """The tool of that name.

    Raises:
        MessageError: there is none.
    """
    found = [tool for tool in tools if (mapping(tool, "function") or tool).get("name") == name]
    if not found:
        raise MessageError(f"tool_choice: tools has none of the name {name!r:.100}")
    return found


def flag(body: Mapping[str, Any], name: str) -> bool | None:
    """The value of a boolean field; None where it is not given."""
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise MessageError(f"{name} = {value!r:.100}: write true or false")
    return value
