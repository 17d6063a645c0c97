"""Messages that come back from a client are known again: compared by their values, in whatever way it writes them."""

from __future__ import annotations

import asyncio
import json
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megasync.episodes.chat import Model
from megasync.episodes.messages import WAYS, Message, canonical, key, plain
from tests.support.samplers import Lines, model_of

TOOL: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
FLOATS = st.floats(allow_nan=False, allow_infinity=False) | st.sampled_from([-0.0, 1e3, 1e21, 5e-324])
NUMBERS = st.integers(-(2**80), 2**80) | FLOATS
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=8,
)
ARGUMENTS = st.dictionaries(st.text(max_size=4), VALUES, max_size=4)


def changed(value: Any, number: Callable[[float], Any], order: random.Random) -> Any:
    """The value with other numbers, and its keys in another order."""
    if isinstance(value, dict):
        names = list(value)
        order.shuffle(names)
        return {name: changed(value[name], number, order) for name in names}
    if isinstance(value, list):
        return [changed(each, number, order) for each in value]
    return number(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


def of_javascript(value: float) -> float:
    """What JSON.stringify(JSON.parse(...)) makes of a number: a double, without a point where it is whole and below 1e21."""
    double = float(value)
    return int(double) if double.is_integer() and abs(double) < 1e21 else double


def of_go(value: float) -> float:
    """All numbers as doubles."""
    return float(value)


def of_php(value: Any) -> Any:
    """json_decode to arrays: an empty one is a list."""
    if isinstance(value, dict):
        return {name: of_php(each) for name, each in value.items()} or []
    return [of_php(each) for each in value] if isinstance(value, list) else value


def without_nulls(value: Any) -> Any:
    """As Gson, Swift and Go's omitempty write objects."""
    if isinstance(value, dict):
        return {name: without_nulls(each) for name, each in value.items() if each is not None}
    return [without_nulls(each) for each in value] if isinstance(value, list) else value


def with_arguments(message: Message, given: Any) -> Message:
    call = {"id": "other", "type": "function", "index": 0, "function": {"name": "add", "arguments": given}}
    return {"role": "assistant", "content": message["content"], "tool_calls": [call]}


NUMBERS_BY: dict[str, Callable[[float], Any]] = {"python": lambda value: value, "javascript": of_javascript, "go": of_go}
FORMS: dict[str, Callable[[Message, Any], Message]] = {
    "arguments as an object": with_arguments,
    "as text": lambda message, given: with_arguments(message, json.dumps(given)),
    "without escapes": lambda message, given: with_arguments(message, json.dumps(given, ensure_ascii=False)),
    "indented": lambda message, given: with_arguments(message, json.dumps(given, indent=3, separators=(" ,", " : "))),
    "with empty fields": lambda message, given: with_arguments(message, given) | {
        "refusal": None, "annotations": [], "audio": None, "function_call": None, "reasoning_content": None, "name": None,
    },
    "by PHP": lambda message, given: with_arguments(message, json.dumps(of_php(given))),
    "without null fields": lambda message, given: with_arguments(message, json.dumps(without_nulls(given))),
    "content in parts": lambda message, given: with_arguments(message, given) | {
        "content": [{"type": "text", "text": message["content"] or "", "annotations": []}]
    },
}  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(ARGUMENTS, st.text(max_size=9), st.sampled_from(sorted(NUMBERS_BY)), st.sampled_from(sorted(FORMS)), st.randoms())
def test_a_call_is_known_again(arguments: dict[str, Any], content: str, client: str, form: str, order: random.Random) -> None:
    sampled = with_arguments({"content": content or None}, json.dumps(arguments, ensure_ascii=False))
    back = FORMS[form](sampled, changed(arguments, NUMBERS_BY[client], order))
    assert key(plain(back)) in {key(plain(sampled), way) for way in WAYS}


def test_other_values_are_other_calls() -> None:
    values = [1, True, "1", None, [1], {"a": 1}, 1.5, 0, False, "", [], "1.0", 2**53 + 2, 2**53 + 4, math.inf, -math.inf, 10**400]
    values += [{}, {"a": None}, {"a": {"b": None}}, {"a": {}}, {"a": []}]
    assert len({canonical(value) for value in values}) == len(values)


@pytest.mark.parametrize(
    ("sampled", "back"),
    [({}, {"a": None}), ({"a": []}, {"a": {}}), ({"a": {"b": None}}, {"a": []}), ({"a": [None]}, {"a": []}), ({"a": 1}, {})],
)
def test_a_client_that_changes_a_call_gets_another_one(sampled: dict[str, Any], back: dict[str, Any]) -> None:
    first, second = (plain(with_arguments({"content": ""}, each)) for each in (sampled, back))
    assert key(second) not in {key(first, way) for way in WAYS}


WRITTEN = '{"a": 1.0, "b": 1e3, "c": -0.0, "d": 12345678901234567890, "e": "\\u00e9\\ud83d", "f": {}, "g": null}'
BACK = [
    '{"a":1,"b":1000,"c":0,"d":12345678901234567000,"e":"é\\ud83d","f":{},"g":null}',  # JSON.stringify(JSON.parse(...))
    '{"e": "é\ufffd", "d": 1.2345678901234567e19, "c": -0, "b": 1e+03, "a": 1, "g": null, "f": []}',
    '{\n  "a": 1.0,\n  "b": 1000.0,\n  "c": -0.0,\n  "d": 12345678901234567890,\n  "e": "\\u00e9\\ud83d",\n  "f": {}\n}',
]


@pytest.mark.parametrize("arguments", BACK)
@pytest.mark.parametrize("content", [None, "", "So: "])
def test_no_branch_begins_where_a_client_writes_a_call_in_another_way(arguments: str, content: str | None) -> None:
    call = f'{content or ""}<tool_call>\n{{"name": "add", "arguments": {WRITTEN}}}\n</tool_call>'

    async def talk() -> Model:
        model = model_of(Lines(call, "It is 2."))
        messages: list[Message] = [{"role": "user", "content": "1 + 1?"}]
        message = await model.chat(messages, [TOOL])
        call_id = message.tool_calls[0].id
        sent: Message = {"id": call_id, "type": "function", "function": {"name": "add", "arguments": arguments}}
        messages += [{"role": "assistant", "content": content, "tool_calls": [sent], "refusal": None, "annotations": []}]
        messages += [{"role": "tool", "tool_call_id": call_id, "content": "2"}]
        assert (await model.reply(messages, [TOOL])).continues
        return model

    assert len(asyncio.run(talk()).recorder.branches()) == 1
