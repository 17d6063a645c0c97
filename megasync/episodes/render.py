"""Which renderer a model's folder gets. Leaves out how they do it (family.py, template.py).

That of its family in the `renderers` package, where that is installed and writes what the folder's chat template writes; else the
template itself.

    renderer = renderer_of(Tokens(tokenizer, stop_token_ids), "qwen3", {"enable_thinking": False})
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from megasync.episodes.chat import Renderer
from megasync.episodes.family import NAMES, FamilyRenderer
from megasync.episodes.messages import Message, MessageError, Tool
from megasync.episodes.template import TemplateRenderer, of_template
from megasync.episodes.tokens import Tokens

TOOL: Tool = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    },
}
SYSTEM: Message = {"role": "system", "content": "Be brief."}
USER: Message = {"role": "user", "content": "1 + 1?"}
CALLED: Message = {"id": "abcdefghi", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
CALLING: Message = {"role": "assistant", "content": "", "tool_calls": [CALLED]}
RESULT: Message = {"role": "tool", "tool_call_id": "abcdefghi", "name": "add", "content": "2"}
ANSWER: Message = {"role": "assistant", "content": "It is 2."}
THOUGHT: Message = {"reasoning": "Hm."}
CONVERSATIONS: tuple[tuple[list[Message], list[Tool]], ...] = (
    ([USER], []),
    ([SYSTEM, USER, ANSWER, USER], []),
    ([SYSTEM, USER, CALLING, RESULT], [TOOL]),
    ([USER, CALLING, RESULT, ANSWER, USER], [TOOL]),
    ([USER, {**CALLING, **THOUGHT}, RESULT, {**ANSWER, **THOUGHT}, USER, {**CALLING, **THOUGHT}, RESULT], [TOOL]),
)


def renderer_of(tokens: Tokens, model_type: str, arguments: Mapping[str, Any] | None = None) -> Renderer:
    """`model_type` of the folder's config.json; `arguments`: variables of the chat template.

    Raises:
        ValueError: there is no chat template that can be used.
    """
    template = TemplateRenderer(tokens, arguments)
    for name in NAMES.get(model_type, ()) if find_spec("renderers") else ():
        try:
            family = FamilyRenderer(tokens, name, arguments)
        except ValueError:  # of another model of that type
            continue
        if _writes_the_same(family, template):
            return family
    return template


def _writes_the_same(family: FamilyRenderer, template: TemplateRenderer) -> bool:
    """Of conversations that the template takes; one that it does not take tells nothing."""
    for messages, tools in CONVERSATIONS:
        try:
            wanted = template.prompt(messages, tools, {}).ids
        except MessageError:
            continue
        if family.render([of_template(message) for message in messages], tools, {}) != wanted:
            return False
    return True
