# ruff: noqa: RUF001 - tags of DeepSeek
"""Awkward tool calls in the formats of 16 families: what a model wrote, and the calls that are right.

`None` for the calls: nothing can be read without a guess, and that has to be reported. tool_table.py prints how readers do.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

Calls = list[tuple[str, dict[str, Any]]]
PROPERTIES = {
    "text": {"type": "string"},
    "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "kind": {"enum": ["1", "2"]},
    "fixed": {"const": "7"},
    "ref": {"$ref": "#/$defs/Ref"},
    "both": {"allOf": [{"$ref": "#/$defs/Ref"}, {"minLength": 1}]},
    "listed": {"type": ["string", "integer"]},
    "count": {"type": "integer"},
    "ratio": {"type": "number"},
    "flag": {"type": "boolean"},
    "maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    "items": {"type": "array", "items": {}},
    "data": {"type": "object"},
}
PARAMETERS = {"type": "object", "properties": PROPERTIES, "$defs": {"Ref": {"type": "string"}}}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "record", "description": "Records.", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "now", "description": "", "parameters": {"type": "object", "properties": {}}}},
]


class Family(NamedTuple):
    """`call`: one call of a name and its arguments, each as the family writes a value; `vllm`, `renderers`: names there."""

    form: str  # ours
    vllm: str
    renderers: str
    begin: str  # of a block of calls
    between: str
    end: str
    call: Callable[[str, Sequence[tuple[str, str]]], str]
    value: Callable[[Any], str]
    close: str = ""  # of one argument
    is_json: bool = False

    def block(self, *calls: tuple[str, Mapping[str, Any]]) -> str:
        return self.raw(*((name, [(key, self.value(value)) for key, value in given.items()]) for name, given in calls))

    def raw(self, *calls: tuple[str, Sequence[tuple[str, str]]]) -> str:
        return self.begin + self.between.join(self.call(*call) for call in calls) + self.end


def _object(given: Sequence[tuple[str, str]]) -> str:
    return "{" + ", ".join(f"{json.dumps(key)}: {value}" for key, value in given) + "}"


def _json_text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else _json_text(value)


def _named(before: str, between: str, after: str) -> Callable[[str, Sequence[tuple[str, str]]], str]:
    return lambda name, given: before + name + between + _object(given) + after


def _keyed(key: str) -> Callable[[str, Sequence[tuple[str, str]]], str]:
    return lambda name, given: f'{{"name": "{name}", "{key}": {_object(given)}}}'


def _tagged(function: str, argument: str, after: str) -> Callable[[str, Sequence[tuple[str, str]]], str]:
    return lambda name, given: function % name + "".join(argument % pair for pair in given) + after


def _python(name: str, given: Sequence[tuple[str, str]]) -> str:
    return f"{name}({', '.join(f'{key}={value}' for key, value in given)})"


KEYED: dict[str, Any] = {"value": _json_text, "is_json": True}
QWEN = _tagged("<function=%s>\n", "<parameter=%s>\n%s\n</parameter>\n", "</function>")
DEEPSEEK, DEEPSEEK_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
KIMI = ("<|tool_calls_section_begin|>", "", "<|tool_calls_section_end|>")
FAMILIES = {
    "qwen3, hermes": Family("hermes", "hermes", "qwen3", "<tool_call>\n", "\n", "\n</tool_call>", _keyed("arguments"), **KEYED),
    "qwen3.5, qwen3-coder": Family(
        "xml", "qwen3_coder", "qwen3.5", "<tool_call>\n", "\n", "\n</tool_call>", QWEN, _text, "\n</parameter>"
    ),
    "seed-oss": Family(
        "seed", "seed_oss", "", "<seed:tool_call>\n", "\n", "\n</seed:tool_call>",
        _tagged("<function=%s>\n", "<parameter=%s>%s</parameter>\n", "</function>"), _text, "</parameter>",
    ),
    "minimax-m2": Family(
        "minimax", "minimax_m2", "minimax-m2", "<minimax:tool_call>\n", "\n", "\n</minimax:tool_call>",
        _tagged('<invoke name="%s">\n', '<parameter name="%s">%s</parameter>\n', "</invoke>"), _text, "</parameter>",
    ),
    "glm-4.5": Family(
        "glm", "glm45", "glm-4.5", "<tool_call>", "</tool_call>\n<tool_call>", "</tool_call>",
        _tagged("%s\n", "<arg_key>%s</arg_key>\n<arg_value>%s</arg_value>\n", ""), _text, "</arg_value>",
    ),
    "glm-4.7": Family(
        "glm", "glm47", "glm-5", "<tool_call>", "</tool_call><tool_call>", "</tool_call>",
        _tagged("%s", "<arg_key>%s</arg_key><arg_value>%s</arg_value>", ""), _text, "</arg_value>",
    ),
    "mistral, to 2024": Family("mistral", "mistral", "", "[TOOL_CALLS] [", ", ", "]", _keyed("arguments"), **KEYED),
    "mistral, since 2025": Family("mistral", "mistral", "", "", "", "", _named("[TOOL_CALLS]", "[ARGS]", ""), **KEYED),
    "llama 3": Family("llama", "llama3_json", "llama-3", "", "; ", "", _keyed("parameters"), **KEYED),
    "llama 4": Family("python", "llama4_pythonic", "", "<|python_start|>[", ", ", "]<|python_end|>", _python, repr),
    "olmo 3": Family("olmo", "olmo3", "", "<function_calls>\n", "\n", "\n</function_calls>", _python, repr),
    "deepseek-v3": Family(
        "deepseek", "deepseek_v3", "deepseek-v3", DEEPSEEK, "\n", DEEPSEEK_END,
        _named("<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "\n```json\n", "\n```<｜tool▁call▁end｜>"), **KEYED,
    ),
    "deepseek-v3.1": Family(
        "deepseek", "deepseek_v31", "", DEEPSEEK, "", DEEPSEEK_END,
        _named("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"), **KEYED,
    ),
    "kimi-k2": Family(
        "kimi", "kimi_k2", "kimi-k2", *KIMI,
        _named("<|tool_call_begin|>functions.", ":0<|tool_call_argument_begin|>", "<|tool_call_end|>"), **KEYED,
    ),
    "granite 3": Family("array", "granite", "", "<|tool_call|>[", ", ", "]", _keyed("arguments"), **KEYED),
    "phi-4-mini": Family(
        "array", "phi4_mini_json", "", "functools[", ", ", "]", _keyed("arguments"), **KEYED
    ),
}  # fmt: skip
AWKWARD_TEXT = 'é🙂 "q" \\ \\n \t\'s </p> &lt; {x} [1]'
STRINGS = {"note": "123", "kind": "1", "fixed": "7", "ref": "5", "both": "6.0", "listed": "8"}
NESTED = {"data": {"a": [1, {"b": "x"}], "c": {"d": 2.5}}, "items": [1, "two", [3.5]]}
VALUES = {"count": 1, "ratio": 2.5, "text": "true"}


class Case(NamedTuple):
    text: str
    calls: Calls | None


def _plain(family: Family) -> Case:
    return Case(family.block(("record", {"text": "x", "count": 1})), [("record", {"text": "x", "count": 1})])


def _other_key(family: Family) -> Case:
    """`parameters` for `arguments`, and the other way round; keys with spaces; arguments without their names."""
    text, calls = _plain(family)
    for one, other in (("arguments", "parameters"), ("parameters", "arguments")):
        if f'"{one}"' in text:
            return Case(text.replace(f'"{one}"', f'"{other}"'), calls)
    if family.call is _python:
        return Case(text.replace("text=", ""), None)
    if family.is_json:  # arguments as text
        return Case(text.replace('{"text": "x", "count": 1}', json.dumps('{"text": "x", "count": 1}')), calls)
    return Case(
        text.replace("=text>", "= text >").replace('"text"', '" text "').replace("<arg_key>text<", "<arg_key> text <"), calls
    )


def _two_calls(family: Family) -> Case:
    calls: Calls = [("record", {"text": "x"}), ("record", {"text": "y", "count": 2})]
    return Case(family.block(*calls), calls)


def _closing_tag(family: Family) -> Case:
    """Inside a text."""
    tag = (family.end or family.begin or "[TOOL_CALLS]").strip() if family.form != "llama" else "}; {"
    calls: Calls = [("record", {"text": f"a {tag} b", "count": 1})]
    return Case(family.block(*calls), calls)


def _not_closed(family: Family) -> Case:
    """A missing </parameter>, brace or quote."""
    text = family.block(("record", {"text": "x", "count": 1}))
    if family.close:
        return Case(text.replace(family.close, "", 1), None)
    return Case(text.replace("'x'", "'x") if family.call is _python else text.replace("1}", "1", 1), None)


def _strings(family: Family) -> Case:
    """Values like numbers where the schema allows a string: by anyOf, enum, const, $ref, allOf, a list of types."""
    return Case(family.block(("record", STRINGS)), [("record", STRINGS)])


def _nested(family: Family) -> Case:
    return Case(family.block(("record", NESTED)), [("record", NESTED)])


def _unicode(family: Family) -> Case:
    return Case(family.block(("record", {"text": AWKWARD_TEXT})), [("record", {"text": AWKWARD_TEXT})])


def _newlines(family: Family) -> Case:
    """As escapes, where the family writes JSON."""
    calls: Calls = [("record", {"text": "def f():\n\n    return 1", "count": 1})]
    return Case(family.block(*calls), calls)


def _raw_newline(family: Family) -> Case:
    """In a JSON string as it is; at both ends of a value."""
    if family.is_json:
        return Case(family.block(("record", {"text": "a|b"})).replace("|b", "\nb"), [("record", {"text": "a\nb"})])
    calls: Calls = [("record", {"text": "\n a\n"})]
    return Case(family.block(*calls), calls)


def _no_arguments(family: Family) -> Case:
    return Case(family.block(("now", {})), [("now", {})])


def _types(family: Family) -> Case:
    """Numbers, true and null beside strings that look like them."""
    written = family.block(("record", {**VALUES, "flag": True, "maybe": None}))
    return Case(written, [("record", {**VALUES, "flag": True, "maybe": None})])


def _call_id(family: Family) -> Case:
    """Beside the name, or in it."""
    text, calls = _plain(family)
    if "[ARGS]" in text:
        return Case(text.replace("[ARGS]", "[CALL_ID]abcdefghi[ARGS]"), calls)
    if family.form == "kimi":
        return Case(text.replace(":0", ":17"), calls)
    if '"name"' in text:
        return Case(text.replace('{"name"', '{"id": "abcdefghi", "name"'), calls)
    return Case(text.replace("record", "functions.record:0", 1), None)


def _truncated(family: Family) -> Case:
    text, _ = _newlines(family)
    return Case(text[: text.index("return")], None)


def _duplicate(family: Family) -> Case:
    written = [("text", family.value("x")), ("text", family.value("y"))]
    return Case(family.raw(("record", written)), None)


def _wrong_json(family: Family) -> Case:
    """A value of another type where an object is expected."""
    return Case(family.raw(("record", [("text", family.value("x")), ("data", "{'a': 1, b}")])), None)


def _text_around(family: Family) -> Case:
    text, calls = _plain(family)
    return Case(f"Let me see.\n{text}", None if family.form == "llama" else calls)


AWKWARD: dict[str, Callable[[Family], Case]] = {
    "plain": _plain,
    "other key": _other_key,
    "two calls": _two_calls,
    "closing tag inside": _closing_tag,
    "argument not closed": _not_closed,
    "strings like numbers": _strings,
    "nested": _nested,
    "unicode, escapes": _unicode,
    "newlines": _newlines,
    "raw newlines": _raw_newline,
    "no arguments": _no_arguments,
    "types": _types,
    "call id": _call_id,
    "truncated": _truncated,
    "duplicate key": _duplicate,
    "wrong JSON": _wrong_json,
    "text around": _text_around,
}


def same_calls(calls: Calls, others: Calls) -> bool:
    """Also by their types: 1 is not 1.0, nor True."""
    return json.dumps(calls, sort_keys=True) == json.dumps(others, sort_keys=True)
