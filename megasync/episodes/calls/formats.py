# ruff: noqa: RUF001, RUF002 - tags of DeepSeek
r"""Formats of tool calls, a reader each.

keyed     hermes    <tool_call>{"name": ..., "arguments": {...}}</tool_call>                              qwen 2.5 and 3, SmolLM
          array     <|tool_call|>[{"name": ..., "arguments": {...}}]   or   functools[...]                granite 3, phi 4 mini
          nemotron  <TOOLCALL>[{"name": ..., "arguments": {...}}]</TOOLCALL>                              nemotron nano 2
          llama     the whole answer is {"name": ..., "parameters": {...}}; several with ; or in a list   llama 3
named     mistral   [TOOL_CALLS] [{"name": ...}]   or   [TOOL_CALLS]NAME[CALL_ID]ID[ARGS]{...}
          deepseek  <｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}, or function<｜tool▁sep｜>NAME ```json {...} ```
          kimi      <|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...}<|tool_call_end|>
tagged    xml       <tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>     qwen 3 coder and 3.5
          seed, minimax                                                   the same with other tags
          glm       <tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>         glm 4.5 to 5
python    python    [NAME(KEY=VALUE), ...]                                                                llama 4
          olmo      <function_calls> NAME(KEY=VALUE) ... </function_calls>                                olmo 3
          lfm       <|tool_call_start|>[NAME(KEY=VALUE)]<|tool_call_end|>                                 lfm 2
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, get_args

from megasync.episodes.calls.arguments import UnreadableError, arguments_of, typed
from megasync.episodes.calls.cursor import NAME, Call, Cursor
from megasync.episodes.calls.python_form import python_calls
from megasync.episodes.messages import Tool

Format = Literal[
    "hermes", "array", "nemotron", "llama",
    "mistral", "deepseek", "kimi",
    "xml", "seed", "minimax", "glm",
    "python", "olmo", "lfm",
]  # fmt: skip
FORMATS: tuple[Format, ...] = get_args(Format)
MISTRAL_NAME = re.compile(r"[^\[{]*")
KIMI_ID = re.compile(r"(?:functions\.)?(.+?)(?::\d+)?")
Reader = Callable[[Cursor], list[Call]]


class Block(NamedTuple):
    """A format whose calls stand in blocks. A regular expression finds its tags; what `begins` a block comes first in it."""

    begins: tuple[str, ...]  # the first is a whole block's
    others: tuple[str, ...]
    read: Reader
    end_value: str = ""  # the tag that ends an argument
    is_list: bool = False  # a block may be without its tag: a list of calls of the tools that are offered

    def tags(self, tools: Sequence[Tool]) -> re.Pattern[str]:
        found = "|".join(map(re.escape, [*self.begins, *self.others]))
        return re.compile(rf"{found}|\[(?=\s*(?:{names_of(tools)})\()" if self.is_list else found)


def names_of(tools: Sequence[Tool]) -> str:
    """A regular expression of the offered tools' names."""
    return "|".join(re.escape(tool["function"]["name"]) for tool in tools)


def _keyed(*ends: str, is_closed: bool = True) -> Reader:
    """Objects or lists of them, one after the other; `is_closed`: nothing but a tag, or the end of the text, ends them."""

    def read(cursor: Cursor) -> list[Call]:
        calls: list[Call] = []
        while True:
            value = cursor.json()
            calls += map(cursor.call, value if isinstance(value, list) else [value])
            cursor.skip(" \t\r\n,;")
            if calls and (cursor.is_at_end or cursor.take(*ends) or (not is_closed and cursor.here not in ("{", "["))):
                return calls

    return read


def _after(begin: str, read: Reader) -> Reader:
    return lambda cursor: read(cursor) if cursor.take(begin) else []


def _array(cursor: Cursor) -> list[Call]:
    cursor.take("<|tool_call|>", "functools")
    return _keyed("<|/tool_call|>", is_closed=False)(cursor)


def _mistral(cursor: Cursor) -> list[Call]:
    cursor.take("[TOOL_CALLS]")
    cursor.skip()
    if cursor.here in ("[", "{"):
        calls = _keyed(is_closed=False)(cursor)
    else:
        name = cursor.name(cursor.match(MISTRAL_NAME, "a name")[0])
        if cursor.take("[CALL_ID]"):
            cursor.match(NAME, "the call's id")
        cursor.take("[ARGS]")
        calls = [(name, arguments_of(cursor.json()))]
    cursor.skip()
    if not cursor.is_at_end and not cursor.text.startswith("[TOOL_CALLS]", cursor.place):
        raise UnreadableError(f"{cursor.shown!r} comes after the arguments")
    return calls


DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>")
KIMI = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
KIMI_CALL = ("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>")


def _section(begin: str, end: str, begin_call: str, read: Callable[[Cursor], Call]) -> Reader:
    """Calls between two tags."""

    def read_all(cursor: Cursor) -> list[Call]:
        cursor.take(begin)
        calls: list[Call] = []
        while True:
            cursor.skip()
            if calls and (cursor.is_at_end or cursor.take(end)):
                return calls
            if not cursor.take(begin_call):
                raise UnreadableError(f"{begin_call} is missing")
            calls.append(read(cursor))

    return read_all


def _deepseek(cursor: Cursor) -> Call:
    name = cursor.until("<｜tool▁sep｜>")
    cursor.skip()
    if is_fenced := cursor.here not in ("{", '"'):  # the type, then the name
        name = cursor.until("```json")
    call = cursor.name(name), arguments_of(cursor.json())
    if is_fenced:
        cursor.close("```")
    cursor.close("<｜tool▁call▁end｜>")
    return call


def _kimi(cursor: Cursor) -> Call:
    found = KIMI_ID.fullmatch(cursor.until("<|tool_call_argument_begin|>").strip())
    call = cursor.name(found[1] if found else ""), arguments_of(cursor.json())
    cursor.close("<|tool_call_end|>")
    return call


class Tags(NamedTuple):
    begin: str  # of a block of calls; empty where a block is one call
    end: str
    function: re.Pattern[str]
    argument: re.Pattern[str]
    begin_argument: str
    end_value: str
    end_function: str
    is_framed: bool = False  # a value stands between two newlines


def _tagged(tags: Tags) -> Reader:
    def read(cursor: Cursor) -> list[Call]:
        is_block, calls = bool(cursor.take(tags.begin)), list[Call]()
        while True:
            cursor.skip()
            if calls and (cursor.take(tags.end) or cursor.is_at_end or not is_block):
                return calls
            calls.append(_function(cursor, tags))

    return read


def _function(cursor: Cursor, tags: Tags) -> Call:
    name, values = cursor.name(cursor.match(tags.function, "a function's name")[1]), list[tuple[str, str]]()
    while True:
        cursor.skip()
        if cursor.take(tags.end_function):
            return name, typed(values, cursor.functions.get(name, {}).get("parameters"))
        key = cursor.match(tags.argument, f"{tags.begin_argument} or {tags.end_function}")[1].strip()
        values.append((key, _value(cursor, tags)))


def _value(cursor: Cursor, tags: Tags) -> str:
    """Up to the first end of a value that something else of the call follows."""
    begin, more = cursor.place, re.compile(rf"\s*(?:{re.escape(tags.begin_argument)}|{re.escape(tags.end_function)})")
    cursor.until(tags.end_value)
    while not more.match(cursor.text, cursor.place):
        cursor.until(tags.end_value)
    text = cursor.text[begin : cursor.place - len(tags.end_value)]
    if tags.begin_argument in text:
        raise UnreadableError(f"{tags.end_value} is missing before another {tags.begin_argument}")
    return text.removeprefix("\n").removesuffix("\n") if tags.is_framed else text


def _python(begin: str, end: str) -> Reader:
    def read(cursor: Cursor) -> list[Call]:
        is_block, text = bool(cursor.take(begin)), cursor.text
        places = [text.find(end, cursor.place), text.rfind(end, cursor.place)] if is_block else []
        problem = UnreadableError("")
        for place in [place for place in places if place >= 0] or [len(text)]:
            try:
                calls = [(cursor.name(name), given) for name, given in python_calls(text[cursor.place : place].removesuffix(end))]
            except UnreadableError as error:
                problem = error
                continue
            cursor.place = min(place + len(end), len(text))
            return calls
        raise problem

    return read


XML = re.compile(r"<function=([^>\n]+)>"), re.compile(r"<parameter=([^>\n]+)>"), "<parameter=", "</parameter>", "</function>"
INVOKE = re.compile(r"<invoke name=[\"']?([^>\"'\n]+)[\"']?>"), re.compile(r"<parameter name=[\"']?([^>\"'\n]+)[\"']?>")
GLM = re.compile(r"<tool_call>\s*([^<\s]+)"), re.compile(r"<arg_key>([^<]*)</arg_key>\s*<arg_value>")
XML_TAGS = ("</function>", "<parameter=", "</parameter>")
BLOCKS: dict[str, Block] = {
    "hermes": Block(("<tool_call>",), ("</tool_call>",), _after("<tool_call>", _keyed("</tool_call>"))),
    "array": Block(("<|tool_call|>", "functools["), ("<|/tool_call|>",), _array),
    "nemotron": Block(("<TOOLCALL>",), ("</TOOLCALL>",), _after("<TOOLCALL>", _keyed("</TOOLCALL>"))),
    "mistral": Block(("[TOOL_CALLS]",), ("[ARGS]", "[CALL_ID]"), _mistral),
    "deepseek": Block(DEEPSEEK[:1], DEEPSEEK[1:], _section(*DEEPSEEK[:3], _deepseek)),
    "kimi": Block(KIMI[:1], (*KIMI[1:], *KIMI_CALL), _section(*KIMI, KIMI_CALL[0], _kimi)),
    "xml": Block(
        ("<tool_call>", "<function="),
        ("</tool_call>", *XML_TAGS),
        _tagged(Tags("<tool_call>", "</tool_call>", *XML, is_framed=True)),
        "</parameter>",
    ),
    "seed": Block(
        ("<seed:tool_call>", "<function="),
        ("</seed:tool_call>", *XML_TAGS),
        _tagged(Tags("<seed:tool_call>", "</seed:tool_call>", *XML)),
        "</parameter>",
    ),
    "minimax": Block(
        ("<minimax:tool_call>", "<invoke name="),
        ("</minimax:tool_call>", "</invoke>", "<parameter name=", "</parameter>"),
        _tagged(Tags("<minimax:tool_call>", "</minimax:tool_call>", *INVOKE, "<parameter name=", "</parameter>", "</invoke>")),
        "</parameter>",
    ),
    "glm": Block(
        ("<tool_call>",),
        ("</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        _tagged(Tags("", "", *GLM, "<arg_key>", "</arg_value>", "</tool_call>")),
        "</arg_value>",
    ),
    "python": Block(("<|python_start|>",), ("<|python_end|>",), _python("<|python_start|>", "<|python_end|>"), is_list=True),
    "olmo": Block(("<function_calls>",), ("</function_calls>",), _python("<function_calls>", "</function_calls>")),
    "lfm": Block(("<|tool_call_start|>",), ("<|tool_call_end|>",), _python("<|tool_call_start|>", "<|tool_call_end|>")),
}
