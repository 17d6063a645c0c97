# ruff: noqa: RUF001 - tags of DeepSeek
r"""Sampled text read as a message: content, reasoning, tool calls. Leaves out rendering (template.py).

A call that cannot be read in one way stays in the content, as the model wrote it, and is reported as broken (calls/).

    parse("<think>Sum.</think>\n\nIt is 12.", "hermes")      # Parsed(content="It is 12.", reasoning="Sum.", calls=())
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megasync.episodes.calls.cursor import Call
from megasync.episodes.calls.formats import Format
from megasync.episodes.calls.reading import Broken, read_calls
from megasync.episodes.messages import Tool

THINK, END_THINK = "<think>", "</think>"
# What a chat template says of tool calls by its text; the first that it has counts.
SIGNS: tuple[tuple[str, Format], ...] = (
    ("<｜tool▁call", "deepseek"),
    ("<|tool_calls_section_begin|>", "kimi"),
    ("<minimax:tool_call>", "minimax"),
    ("<seed:tool_call>", "seed"),
    ("<function_calls>", "olmo"),
    ("<|tool_call_start|>", "lfm"),
    ("<|tool_list_start|>", "lfm"),
    ("func_name1(", "python"),  # of vLLM's templates for llama
    ("<TOOLCALL>", "nemotron"),
    ("<|tool_call|>", "array"),
    ("<|/tool|>", "array"),
    ("<arg_key>", "glm"),
    ("<parameter=", "xml"),
    ("<tool_call>", "hermes"),
    ("[TOOL_CALLS]", "mistral"),
)
LLAMA_HEADERS = ("<|start_header_id|>", "<|header_start|>")


@dataclass(frozen=True, slots=True)
class Parsed:
    content: str
    reasoning: str = ""
    calls: tuple[Call, ...] = ()
    broken: tuple[Broken, ...] = ()


def parse(text: str, form: Format, tools: Sequence[Tool] = (), *, thinking: bool = False) -> Parsed:
    """`text` without its stop token; `thinking`: the prompt begins the reasoning. Without tools no call is looked for."""
    reasoning, content = split_reasoning(text, thinking=thinking)
    if not tools:
        return Parsed(content.strip("\n") if reasoning else content, reasoning.strip())
    rest, calls, broken = read_calls(content, form, tools)
    if reasoning and END_THINK not in text:
        _, thought, unread = read_calls(reasoning, form, tools)
        broken += [Broken(reasoning.strip(), f"it stands in thinking that {END_THINK} does not end")] * bool(thought or unread)
    content = rest.strip() if calls else content.strip("\n") if reasoning else content
    return Parsed(content, reasoning.strip(), tuple(calls), tuple(broken))


def split_reasoning(text: str, *, thinking: bool) -> tuple[str, str]:
    """Reasoning, and what comes after it. Reasoning that does not end is all there is."""
    if not thinking:
        if not text.lstrip().startswith(THINK):
            return "", text
        text = text.partition(THINK)[2]
    reasoning, _, content = text.partition(END_THINK)
    return reasoning, content


def format_of(template: str) -> Format | None:
    """By what a chat template says of tool calls; None where it says nothing that is known."""
    is_llama = "parameters" in template and any(header in template for header in LLAMA_HEADERS)
    return next((form for sign, form in SIGNS if sign in template), "llama" if is_llama else None)
