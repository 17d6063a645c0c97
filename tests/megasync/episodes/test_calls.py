"""Tool calls that are awkward to read: read right or reported, in 16 families; values by the tool's schema."""

from __future__ import annotations

import asyncio
import copy
import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megasync.episodes.calls.arguments import UnreadableError, typed
from megasync.episodes.calls.formats import FORMATS
from megasync.episodes.calls.reading import read_calls
from megasync.episodes.messages import MessageError, plain_tools
from megasync.episodes.parse import format_of
from tests.megasync.episodes.tool_cases import AWKWARD, FAMILIES, PARAMETERS, TOOLS, same_calls
from tests.support.samplers import Lines, model_of


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", AWKWARD)
def test_a_call_is_read_right_or_reported(family: str, kind: str) -> None:
    case = AWKWARD[kind](FAMILIES[family])
    content, calls, broken = read_calls(case.text, FAMILIES[family].form, TOOLS)
    if case.calls is None:
        assert not calls and broken and content == case.text
    elif broken:
        assert not calls and family.startswith("llama") and kind in ("other key", "text around")
    else:
        assert same_calls(calls, case.calls)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
TAGS = ("</tool_call>", "</parameter>", "</function>", "<arg_key>", "[TOOL_CALLS]", "<|tool_call_end|>", "\n", '"', "]", "}", "x")
TEXTS = st.text(max_size=20) | st.lists(st.sampled_from(TAGS), max_size=5).map("".join)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(FAMILIES)), TEXTS, st.dictionaries(st.text(max_size=4), VALUES, max_size=3), st.integers())
def test_what_a_family_writes_is_read_again_or_reported(family: str, text: str, data: dict[str, Any], count: int) -> None:
    arguments = {"text": text.encode(errors="replace").decode(), "data": data, "count": count}
    _, calls, broken = read_calls(FAMILIES[family].block(("record", arguments)), FAMILIES[family].form, TOOLS)
    assert broken if not calls else same_calls(calls, [("record", arguments)])


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(sorted(FAMILIES)), st.integers(0, 400))
def test_a_call_that_is_cut_off_is_not_made(family: str, length: int) -> None:
    """Of two calls the first may be there, whole."""
    calls = [("record", {"text": "a\nb", "count": 12}), ("record", {"note": "123", "data": {"a": [1]}})]
    _, found, _ = read_calls(FAMILIES[family].block(*calls)[:length], FAMILIES[family].form, TOOLS)
    assert same_calls(found, calls[: len(found)])


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "null", "null"),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "12", "12"),
        ({"oneOf": [{"type": "integer"}, {"$ref": "#/$defs/Ref"}]}, "12", "12"),
        ({"allOf": [{"type": ["integer", "string"]}, {"type": "integer"}]}, "12", 12),
        ({"enum": [1, 2]}, "2", 2),
        ({"enum": ["1", 2]}, "2", "2"),
        ({"const": True}, "true", True),
        ({"type": "integer", "nullable": True}, "null", None),
        ({"type": "integer"}, " 12\n", 12),
        ({"type": "integer"}, "12.0", 12),
        ({"type": "number"}, "1e3", 1000.0),
        ({"type": "boolean"}, "True", True),
        ({"type": "str"}, "123", "123"),  # names that JSON schema does not have
        ({"type": "STRING", "nullable": True}, "123", "123"),
        ({"type": ["str", "none"]}, "null", None),
        ({"type": "int"}, "123", 123),
        ({"type": "float"}, "3", 3),
        ({"type": "bool"}, "true", True),
        ({"type": "tuple"}, "[1, 2]", [1, 2]),
        ({"type": "dict"}, '{"a": 1}', {"a": 1}),
        ({"type": "any"}, "12", 12),
        ({"type": None}, "12", 12),
        ({"type": ["string", "any"]}, "a b", "a b"),
        ({"type": "Date"}, "2024-01-01", "2024-01-01"),
        ({"$ref": "#/$defs/Self"}, "[1]", [1]),  # refers to itself: says nothing
        ({}, "12", 12),
        (True, '{"a": 1}', {"a": 1}),
        ({}, "{'a': 1}", "{'a': 1}"),
    ],
)
def test_a_text_is_what_the_schema_takes(schema: Any, text: str, value: Any) -> None:
    definitions = {"Ref": {"type": "string"}, "Self": {"$ref": "#/$defs/Self"}}
    found = typed([("a", text)], {"properties": {"a": schema}, "$defs": definitions})["a"]
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "integer"}, "many"),
        ({"type": "integer"}, "1.5"),
        ({"type": "integer"}, "None"),
        ({"type": "boolean"}, "1"),
        ({"type": "object"}, "[1]"),
        ({"type": "array"}, "['a']"),
        ({"type": "object"}, '{"a": 1, "a": 2}'),
        ({"type": "number"}, "NaN"),
        ({"type": "number"}, "1e999"),
        ({"type": "int"}, "many"),
        ({"type": "dict"}, "[1]"),
    ],
)
def test_a_text_that_is_nothing_of_the_schema_is_reported(schema: Any, text: str) -> None:
    with pytest.raises(UnreadableError):
        typed([("a", text)], {"properties": {"a": schema}})


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("hermes", '<tool_call>{"name": "record", "args": {"text": "x"}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "record", "arguments": {}, "parameters": {"text": "x"}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "record", "arguments": {"ratio": NaN}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "record", "arguments": {}}}</tool_call>'),
        ("hermes", '{"name": "record", "arguments": {}}\n</tool_call>'),
        ("xml", "<tool_call><function=record><parameter=count>1</parameter></tool_call>"),
        ("xml", "<tool_call><function=record><parameter=text>a</parameter></function></tool_call>b</parameter></function>"),
        ("xml", "record<parameter=count>1</parameter></function></tool_call>"),
        ("glm", "<tool_call>record<arg_value>1</arg_value></tool_call>"),
        ("mistral", '[TOOL_CALLS]record[ARGS]{"count": 1} and so on'),
        ("llama", '<|python_tag|>print("x")'),
        ("llama", '{"name": "record", "parameters": {"text": "x"'),
        ("llama", '{"type": "function", "function": "record", "parameters": {"name": "record"}}'),
        ("python", "I call [record(count=1)]"),
        ("python", "[record(**{'count': 1})]"),
        ("python", "[record(text=open('x'))]"),
        ("kimi", "<|tool_call_begin|>functions.record:0<|tool_call_argument_begin|>{}<|tool_call_end|>"),
    ],
)  # fmt: skip
def test_other_calls_that_are_reported(form: Any, text: str) -> None:
    content, calls, broken = read_calls(text, form, TOOLS)
    assert (content, calls) == (text, []) and broken


@pytest.mark.parametrize(
    ("form", "text", "calls"),
    [
        ("hermes", '<tool_call>{"name": "now"}{"name": "now", "arguments": null}</tool_call>', [("now", {}), ("now", {})]),
        ("hermes", '<tool_call>[{"name": "now", "type": "function", "arguments": ""}]', [("now", {})]),
        ("xml", "So <function=now>\n</function>\n</tool_call>", [("now", {})]),  # without the tag that begins a block
        ("xml", "<tool_call><function=record><parameter=text>\na </parameter> b\n</parameter></function></tool_call>",
         [("record", {"text": "a </parameter> b"})]),
        ("mistral", '[TOOL_CALLS]now{}[TOOL_CALLS]record[ARGS]{"count": 1}', [("now", {}), ("record", {"count": 1})]),
        ("llama", '[{"name": "now", "parameters": {}}, {"name": "now"}]', [("now", {}), ("now", {})]),
        ("llama", '<|python_tag|>{"parameters": {"count": 1}, "name": "record"}', [("record", {"count": 1})]),
        ("llama", '{"name": "other", "parameters": {}}', [("other", {})]),
        ("python", "[now(), record(maybe=-1, flag=true, data={'a': (1, 2)})]",
         [("now", {}), ("record", {"maybe": -1, "flag": True, "data": {"a": [1, 2]}})]),
        ("lfm", 'It is <|tool_call_start|>[record(text="\\ud83d\\ude42")]<|tool_call_end|> then.', [("record", {"text": "🙂"})]),
        ("nemotron", '<TOOLCALL>[{"name": "now", "arguments": {}}]</TOOLCALL>', [("now", {})]),
        ("deepseek", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜>", [("now", {})]),  # noqa: RUF001
    ],
)  # fmt: skip
def test_other_calls_that_are_read(form: Any, text: str, calls: Any) -> None:
    read = read_calls(text, form, TOOLS)
    assert same_calls(read.calls, calls) and not read.broken


@pytest.mark.parametrize("text", ['{"name": "Bob", "id": 3}', '{"sum": 2}', "[1, 2]", "42", "", "See [2] (a)."])
@pytest.mark.parametrize("form", FORMATS)
def test_an_answer_that_is_no_call(form: Any, text: str) -> None:
    assert read_calls(text, form, TOOLS) == (text, [], [])


PIECES = ("<tool_call>", "</tool_call>", "<function=a><parameter=b>", "[", '{"a":', "</parameter> ", "[now(")


@pytest.mark.parametrize("piece", PIECES)
def test_a_long_answer_of_one_piece_takes_no_long_time(piece: str) -> None:
    begun = time.perf_counter()
    for form in FORMATS:
        read_calls(piece * 8000, form, TOOLS)
    assert time.perf_counter() - begun < 20


def test_a_tool_of_an_odd_name_is_called_by_it() -> None:
    tools = plain_tools([{"name": "files.read:v2"}])
    assert read_calls('<tool_call>{"name": "files.read:v2"}</tool_call>', "hermes", tools).calls == [("files.read:v2", {})]
    assert read_calls('<tool_call>{"name": "files.read:v3"}</tool_call>', "hermes", tools).broken


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("<tool_call>\n<function=example>\n<parameter=key>", "xml"),
        ("<tool_call>{name}\n<arg_key>", "glm"),
        ('<tool_call>\n{"name"', "hermes"),
        ("<|start_header_id|> parameters", "llama"),
        ("<|header_start|><|python_start|> parameters", "llama"),
        ("<|header_start|> [func_name1(params_name1=...)]", "python"),
        ("<|tool|><|/tool|>", "array"),
        ("[TOOL_CALLS]", "mistral"),
        ("ChatML alone", None),
    ],
)
def test_the_format_of_a_template(template: str, form: str | None) -> None:
    assert format_of(template) == form


CHATML = """{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}
{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}{% for call in message.tool_calls or [] %}CALL{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

LLAMA4 = """{#<|header_start|>#}<|python_start|><|python_end|>{"name": "{{ call.function.name }}", "parameters": \
{{ call.function.arguments | tojson }}}"""


@pytest.mark.parametrize(
    ("call", "line"),
    [
        ('{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}', '{"name": "now"}'),
        ("<|call|>{{ call.function | tojson }}", None),
        # a sign of llama's, or of hermes', and calls that are written in another way
        ("{#<|header_start|> parameters#}<function={{ call.function.name }}>{{ call.function.arguments | tojson }}", None),
        ("<tool_calls><tool_call>{{ call.function.name }}\n```json\n{{ call.function.arguments | tojson }}\n```", None),
        ("{#<tool_call>#}[{{ call.function.name }}({{ call.function.arguments | items | first | join('=') }})]", "[now()]"),
        # a sign, and objects with a name that are not read: the sign counts
        ("<tool_call>{{ call | tojson }}</tool_call>", '<tool_call>{"name": "now"}</tool_call>'),
        (
            '<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments }}}</tool_call>',
            '<tool_call>{"name": "now"}</tool_call>',
        ),
        (LLAMA4, '<|python_start|><|python_end|>{"name": "now", "parameters": {}}'),
        ("", '<tool_call>{"name": "now"}</tool_call>'),
    ],
)  # fmt: skip
def test_the_format_of_a_template_that_says_nothing_known_is_tried(call: str, line: str | None) -> None:
    """Where none reads what it writes, tools are refused: a call would be taken for text."""
    sampler = Lines(*[line or "Hi."] * 2)
    sampler.tokens.tokenizer = copy.copy(sampler.tokens.tokenizer)
    sampler.tokens.tokenizer.chat_template = CHATML.replace("CALL", call)
    model, messages = model_of(sampler), [{"role": "user", "content": "?"}]
    if line is None:
        with pytest.raises(MessageError, match="tool calls in a format that is not known"):
            asyncio.run(model.chat(messages, TOOLS))
        assert asyncio.run(model.chat(messages)).content == "Hi."
    else:
        assert [each.function.name for each in asyncio.run(model.chat(messages, TOOLS)).tool_calls] == ["now"]


def test_the_format_is_that_of_the_template_for_tools() -> None:
    """Of several by name; the other writes no calls."""
    sampler = Lines("[now()]", "[now()]")
    sampler.tokens.tokenizer = copy.copy(sampler.tokens.tokenizer)
    written = CHATML.replace("CALL", "[{{ call.function.name }}({{ call.function.arguments | items | first | join('=') }})]")
    sampler.tokens.tokenizer.chat_template = {"default": CHATML.replace("CALL", ""), "tool_use": written}
    message = asyncio.run(model_of(sampler).chat([{"role": "user", "content": "?"}], TOOLS))
    assert [each.function.name for each in message.tool_calls] == ["now"]


def test_the_schema_of_the_table_takes_its_strings() -> None:
    import jsonschema

    for text in ("123", "1"):
        jsonschema.validate({"note": text, "ref": text}, PARAMETERS)
    assert json.dumps(PARAMETERS)
