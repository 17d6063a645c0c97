r"""What a model sampled, read as a message: content, reasoning, tool calls. Leaves out who renders it (template.py).

Formats of tool calls, of which a chat template says by its text which one its model writes:

hermes     <tool_call>{"name": ..., "arguments": {...}}</tool_call>                                   qwen 2.5 and 3, SmolLM
xml        <tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>          qwen 3 coder, qwen 3.5
glm        <tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>              glm 4.5
mistral    [TOOL_CALLS] [{"name": ..., "arguments": {...}}]  or  [TOOL_CALLS]NAME[ARGS]{...}
llama      the whole answer is {"name": ..., "parameters": {...}}

A call that cannot be read stays in the content, as the model wrote it.

    parse("<think>Sum.</think>\n\nIt is 12.", "hermes")      # Parsed(content="It is 12.", reasoning="Sum.", calls=())
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from megasync.episodes.messages import Tool

Format = Literal["hermes", "xml", "glm", "mistral", "llama"]
FORMATS: tuple[str, ...] = get_args(Format)
THINK, END_THINK = "<think>", "</think>"
BLOCK = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
XML_CALL = re.compile(r"\s*<function=([^>\n]+)>(.*?)(?:</function>\s*|\Z)", re.DOTALL)
XML_ARGUMENT = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
GLM_ARGUMENT = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)
Call = tuple[str, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Parsed:
    content: str
    reasoning: str = ""
    calls: tuple[Call, ...] = ()


def parse(text: str, form: Format, tools: Sequence[Tool] = (), *, thinking: bool = False) -> Parsed:
    """`text` without its stop token; `thinking`: the prompt begins the reasoning. Without tools no call is looked for."""
    reasoning, content = split_reasoning(text, thinking=thinking)
    if tools:
        rest, calls = READERS[form](content, tools)
        if calls:
            return Parsed(rest.strip(), reasoning.strip(), tuple(calls))
    return Parsed(content.strip("\n") if reasoning else content, reasoning.strip())


def split_reasoning(text: str, *, thinking: bool) -> tuple[str, str]:
    """Reasoning, and what comes after it. Reasoning that does not end is all there is."""
    if not thinking:
        if not text.lstrip().startswith(THINK):
            return "", text
        text = text.partition(THINK)[2]
    reasoning, _, content = text.partition(END_THINK)
    return reasoning, content


def format_of(template: str) -> Format:
    """By what a chat template says of tool calls."""
    if "<tool_call>" in template:
        return "glm" if "<arg_key>" in template else "xml" if "<function=" in template else "hermes"
    if "[TOOL_CALLS]" in template:
        return "mistral"
    return "llama" if "<|start_header_id|>" in template and "parameters" in template else "hermes"


def _hermes(text: str, _tools: Sequence[Tool]) -> tuple[str, list[Call]]:
    return _blocks(text, lambda block: _of_json(block, "arguments"))


def _xml(text: str, tools: Sequence[Tool]) -> tuple[str, list[Call]]:
    def read(block: str) -> list[Call]:
        found = XML_CALL.fullmatch(block.rstrip())
        return [(found[1].strip(), _typed(found[1].strip(), XML_ARGUMENT.findall(found[2]), tools))] if found else []

    return _blocks(text, read)


def _glm(text: str, tools: Sequence[Tool]) -> tuple[str, list[Call]]:
    def read(block: str) -> list[Call]:
        name = block.partition("<arg_key>")[0].strip()
        return [(name, _typed(name, GLM_ARGUMENT.findall(block), tools))] if name and "<" not in name else []

    return _blocks(text, read)


def _mistral(text: str, _tools: Sequence[Tool]) -> tuple[str, list[Call]]:
    content, *rest = text.split("[TOOL_CALLS]")
    calls: list[Call] = []
    for part in rest:
        name, marked, arguments = part.partition("[ARGS]")
        found = _of_json(json.dumps({"name": name.strip(), "arguments": _json(arguments)}) if marked else part, "arguments")
        if not found:
            return text, []
        calls += found
    return content, calls


def _llama(text: str, _tools: Sequence[Tool]) -> tuple[str, list[Call]]:
    calls = _of_json(text.removeprefix("<|python_tag|>"), "parameters")
    return ("", calls) if calls else (text, [])


READERS: dict[str, Callable[[str, Sequence[Tool]], tuple[str, list[Call]]]] = {
    "hermes": _hermes, "xml": _xml, "glm": _glm, "mistral": _mistral, "llama": _llama,
}  # fmt: skip


def _blocks(text: str, read: Callable[[str], list[Call]]) -> tuple[str, list[Call]]:
    """All that stands between the tags; a block that cannot be read stays where it is."""
    calls: list[Call] = []

    def take(block: re.Match[str]) -> str:
        found = read(block[1])
        calls.extend(found)
        return "" if found else block[0]

    rest = BLOCK.sub(take, text)
    return rest, calls


def _of_json(text: str, arguments: str) -> list[Call]:
    """One call or a list of calls; empty where one of them is none."""
    given = _json(text)
    calls = []
    for call in given if isinstance(given, list) else [given]:
        if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not call["name"]:
            return []
        values = call.get(arguments, call.get("arguments", {}))
        values = _json(values) if isinstance(values, str) else values
        if not isinstance(values, dict):
            return []
        calls.append((call["name"], values))
    return calls


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _typed(name: str, values: Sequence[tuple[str, str]], tools: Sequence[Tool]) -> dict[str, Any]:
    """Values as they were written where the tool wants a string, else as JSON where they are such."""
    functions = {tool["function"]["name"]: tool["function"] for tool in tools}
    properties = _field(_field(functions.get(name), "parameters"), "properties")
    made = {}
    for argument, value in values:
        wanted = _field(_field(properties, argument.strip()), "type")
        read = None if wanted == "string" else _json(value)
        made[argument.strip()] = value if read is None and value.strip() != "null" else read
    return made


def _field(schema: Any, name: str) -> Any:
    """None where there is none: a JSON schema may be `true`, which takes any value."""
    return schema.get(name) if isinstance(schema, Mapping) else None
