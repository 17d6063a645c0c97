"""Sampled text read as a message; what no reader understands stays content."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megasync.episodes.messages import MessageError, key, plain, plain_tools
from megasync.episodes.calls.formats import FORMATS
from megasync.episodes.parse import Parsed, parse

PIECES = [
    *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<arg_key>", "</arg_key>", "<arg_value>", "<think>", "</think>"),
    *("<function=add>", "</function>", "<parameter=a>", "</parameter>", "{", "}", "[", '"name"', ":", '"add"', "1", "\n"),
]
TOOLS = plain_tools([{"name": "add", "input_schema": {"type": "object", "properties": {"a": {"type": "string"}}}}])


@pytest.mark.parametrize(
    ("form", "text", "calls"),
    [
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>', [("add", {"a": 1})]),
        ("hermes", '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}', [("add", {"a": 1})]),  # cut off, and a text
        ("hermes", "<tool_call>add(1)</tool_call>", []),
        ("hermes", '<tool_call>{"name": "", "arguments": {}}</tool_call>', []),
        ("hermes", '<tool_call>{"name": "add", "arguments": [1]}</tool_call>', []),
        ("xml", "<tool_call><function=add>\n<parameter=a>\n1\n</parameter><parameter=b>2</parameter>\n</function>\n</tool_call>",
         [("add", {"a": "1", "b": 2})]),
        ("xml", "<tool_call>{}</tool_call>", []),
        ("glm",
         "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value><arg_key>b</arg_key><arg_value>[2]</arg_value>\n</tool_call>",
         [("add", {"a": "1", "b": [2]})]),
        ("glm", "<tool_call></tool_call>", []),
        ("mistral", '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}, {"name": "b", "arguments": {}}]',
         [("add", {"a": 1}), ("b", {})]),
        ("mistral", '[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]b[ARGS]{}', [("add", {"a": 1}), ("b", {})]),
        ("mistral", "[TOOL_CALLS] [{]", []),
        ("llama", '{"name": "add", "parameters": {"a": 1}}', [("add", {"a": 1})]),
        ("llama", 'I call {"name": "add", "parameters": {"a": 1}}', []),
    ],
)  # fmt: skip
def test_tool_calls(form: str, text: str, calls: list[object]) -> None:
    parsed = parse(text, form, TOOLS)
    assert list(parsed.calls) == calls and bool(parsed.broken) == (not calls)
    assert parsed.content == ("" if calls else text)
    assert parse(text, form).content == text  # nobody offered a tool


@pytest.mark.parametrize("schema", [{"properties": {"a": True}}, {"properties": {"a": None}}, {"properties": None}, True])
def test_a_schema_may_say_nothing_of_an_argument(schema: object) -> None:
    """As `true` does, which takes any value; what the model has written is a call all the same."""
    tools = plain_tools([{"name": "add", "parameters": schema}])
    xml = "<tool_call><function=add><parameter=a>1</parameter></function></tool_call>"
    glm = "<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>"
    assert parse(xml, "xml", tools).calls == parse(glm, "glm", tools).calls == (("add", {"a": 1}),)


def test_parameters_of_a_tool_are_a_schema() -> None:
    for schema in (["a"], "two numbers", 7):
        with pytest.raises(MessageError, match="parameters"):
            plain_tools([{"name": "add", "parameters": schema}])


def test_calls_beside_broken_ones_and_text() -> None:
    text = 'So:\n<tool_call>{"name": "add", "arguments": {}}</tool_call>\n<tool_call>{</tool_call>'
    parsed = parse(text, "hermes", TOOLS)
    assert (parsed.content, parsed.calls) == ("So:\n\n<tool_call>{</tool_call>", (("add", {}),))
    (broken,) = parsed.broken
    assert broken.text == "<tool_call>{</tool_call>" and "not JSON" in broken.why


@pytest.mark.parametrize(
    ("text", "thinking", "content", "reasoning"),
    [
        ("<think>\nHm.\n</think>\n\nYes.", False, "Yes.", "Hm."),
        ("\n<think></think>Yes.", False, "Yes.", ""),
        ("Hm.</think>Yes.", True, "Yes.", "Hm."),
        ("Hm.", True, "", "Hm."),  # cut off
        ("<think>Hm.", False, "", "Hm."),
        ("Yes. <think>no</think>", False, "Yes. <think>no</think>", ""),
    ],
)
def test_reasoning(text: str, thinking: bool, content: str, reasoning: str) -> None:
    assert parse(text, "hermes", thinking=thinking) == Parsed(content, reasoning)


def test_a_call_in_thinking_is_none_and_one_in_thinking_without_an_end_is_reported() -> None:
    call = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    assert parse(f"<think>I could {call}</think>Yes.", "hermes", TOOLS) == Parsed("Yes.", f"I could {call}")
    parsed = parse(f"I could {call}", "hermes", TOOLS, thinking=True)
    assert (parsed.calls, parsed.content, parsed.reasoning) == ((), "", f"I could {call}")
    assert "</think>" in parsed.broken[0].why
    assert not parse("I could add.", "hermes", TOOLS, thinking=True).broken


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(FORMATS),
    st.lists(st.sampled_from(PIECES)).map("".join),
)
def test_no_text_breaks_a_reader(form: str, text: str) -> None:
    parsed = parse(text, form, TOOLS)
    assert all(isinstance(name, str) and isinstance(arguments, dict) for name, arguments in parsed.calls)


def test_a_message_is_known_in_each_form_in_which_a_client_sends_it_back() -> None:
    arguments = '{"b": 2, "a": "é"}'
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": arguments}}
    one = {"role": "assistant", "content": None, "tool_calls": [call], "reasoning": "Hm."}
    other_call = {"id": "2", "function": {"name": "add", "arguments": {"a": "é", "b": 2}}}
    other = {"role": "assistant", "content": [{"type": "text", "text": " "}], "tool_calls": [other_call]}
    assert key(plain(one)) == key(plain(other))
    assert key(plain({**other, "content": "x"})) != key(plain(one))
    assert key(plain({**one, "role": "user"})) != key(plain(one))


def test_half_a_surrogate_pair_becomes_a_character() -> None:
    assert plain({"role": "tool", "content": "a\ud800b"})["content"] == "a?b"
    assert plain({"role": "user", "content": [{"type": "text", "text": "\udfff"}, "é"]})["content"] == "?é"


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ({"content": "x"}, "a message has no role"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "'image_url': only text is taken"),
        ({"role": "user", "content": 5}, "content is int"),
        ({"role": "assistant", "tool_calls": [{"id": "1"}]}, "no function with a name"),
    ],
)
def test_messages_that_are_refused(message: dict[str, object], said: str) -> None:
    with pytest.raises(MessageError, match=said):
        plain(message)
    with pytest.raises(MessageError, match="a tool has no name"):
        plain_tools([{"type": "function"}])
