"""A model's chat template: renders conversations as text, and finds out how it ends an assistant's turn. No torch in here.

Some templates accept a message's content only as a list of parts, and get it as one. Leaves out rendering conversations with
sampled answers (episodes/template.py).

    template = ChatTemplate(tokenizer, {"enable_thinking": False})
    template.render([{"role": "user", "content": "1+2="}], generate=True)
    template.turn.end            # "<|im_end|>"
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from megasync.config.errors import ConfigError, nearest_name, refuse_if
from megasync.data.conversations import ARGUMENTS, RENDERED, TOOLS

TEMPLATE_FUNCTIONS = ("namespace", "range", "dict", "raise_exception", "strftime_now", "lipsum", "cycler", "joiner")
TEMPLATE_REMEDY = "download the tokenizer again, or write data.chat_template=false"
PROBE = "probe0c4f"
PROMPT_END = 40  # characters that a note shows
ASKED = {"role": "user", "content": "?"}


def check_template(tokenizer: Any, arguments: Mapping[str, Any], tools: Sequence[Any] | None = None) -> list[str]:
    """The variables that the template reads, sorted; with `tools` if it reads them. Some models have another template, tool_use,
    for conversations with `tools`.

    Raises:
        ConfigError: the template is broken, or would ignore one of the arguments.
    """
    from jinja2 import meta
    from transformers.utils.chat_template_utils import _compile_jinja_template

    try:
        template = tokenizer.get_chat_template(tools=tools)
        variables = meta.find_undeclared_variables(_compile_jinja_template(template).environment.parse(template))
    except Exception as error:  # a template that is not a text, several without a default, or a syntax error
        problem = str(error).splitlines()[0] if str(error) else type(error).__name__
        message = f"data.chat_template = true: the model's template is broken: {problem}"
        raise ConfigError(message, remedy=TEMPLATE_REMEDY) from error
    usable = sorted(variables - {"messages", "add_generation_prompt", *tokenizer.special_tokens_map, *TEMPLATE_FUNCTIONS})
    for name in arguments:
        if name not in usable:
            near, key = nearest_name(name, usable), f"data.chat_template_arguments.{name}"
            problem = f"{key} = {arguments[name]!r}: the model's chat template reads no such variable"
            remedy = f"write data.chat_template_arguments.{near}" if near else f"remove {key}"
            raise ConfigError(problem, choices=", ".join(usable) or "none", nearest=near, remedy=remedy)
    return usable


@dataclass(frozen=True, slots=True)
class TurnForm:
    """The text that a template writes around an assistant's content at the end of a conversation.

    `lead`: text between the generation prompt and the content. `close`: text behind the content. `end`: the token of `close` that
    ends the turn; empty if there is none. `is_begun`: the turn begins with the generation prompt.
    """

    lead: str = ""
    close: str = ""
    end: str = ""
    is_begun: bool = True

    @property
    def trained_close(self) -> str:
        """`close` up to the end token; text behind that belongs to the next turn."""
        return self.close[: self.close.index(self.end) + len(self.end)] if self.end else ""


class ChatTemplate:
    """Renders messages. `arguments`: values of the template's variables (data.chat_template_arguments)."""

    def __init__(self, tokenizer: Any, arguments: Mapping[str, Any]) -> None:
        self._tokenizer, self._arguments = tokenizer, dict(arguments)
        self._in_parts = frozenset[str]()
        for role, before, behind in (("user", [], []), ("system", [], [ASKED]), ("assistant", [ASKED], [])):
            if not self._writes(before, role, PROBE, behind) and self._writes(before, role, _parts(PROBE), behind):
                self._in_parts |= {role}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        generate: bool,
        tools: Sequence[Any] = (),
        arguments: Mapping[str, Any] | None = None,
    ) -> str:
        """The messages as text. `arguments` take precedence over the run's. Exceptions of the template's code propagate."""
        given = [self._given(message) for message in messages]
        options = {"tokenize": False, "add_generation_prompt": generate, **self._arguments, **(arguments or {})}
        text: str = self._tokenizer.apply_chat_template(given, tools=list(tools) or None, **options)
        return text

    def check_row(self, place: str, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any], own: Mapping[str, Any]) -> None:
        """ConfigError if the template would silently ignore tools, variables or fields of messages of a row of the data."""
        remedy = "use a model whose template reads it, or remove it from the data"
        variables, text = self._with_tools if tools else self._without_tools
        message = f"{place}: holds {TOOLS}, and the model's chat template reads none"
        refuse_if(tools and "tools" not in variables, message, remedy=remedy)
        for name in own:
            near, choices = nearest_name(name, variables), ", ".join(variables) or "none"
            message = f"{place}: {ARGUMENTS} has {name!r}, and the model's chat template reads no such variable"
            refuse_if(name not in variables or name == "tools", message, choices=choices, nearest=near, remedy=remedy)
        for name in {name for each in messages for name in each if name in RENDERED and each[name]}:
            message = f"{place}: a message has {name!r}, which the model's chat template does not write"
            refuse_if(not re.search(rf"\b{name}\b", text), message, remedy=remedy)

    @cached_property
    def _without_tools(self) -> tuple[list[str], str]:
        """The template's variables, and its text."""
        return check_template(self._tokenizer, {}), str(self._tokenizer.get_chat_template())

    @cached_property
    def _with_tools(self) -> tuple[list[str], str]:
        return check_template(self._tokenizer, {}, [{}]), str(self._tokenizer.get_chat_template(tools=[{}]))

    @cached_property
    def turn(self) -> TurnForm:
        """The form of a probe's turn; all fields empty if the template refuses the probe."""
        try:
            prompt = self.render([ASKED], generate=True)
            before, found, close = self.render([ASKED, {"role": "assistant", "content": PROBE}], generate=False).partition(PROBE)
        except Exception:  # noqa: BLE001 - of the template's code
            return TurnForm()
        if not found:
            return TurnForm()
        is_begun = before.startswith(prompt)
        return TurnForm(before.removeprefix(prompt) if is_begun else "", close, self._end(close), is_begun)

    def notes(self) -> list[str]:
        """Notes about properties of the template that a user may not expect."""
        turn, close, notes = self.turn, self.turn.close.strip(), list[str]()
        if close and not turn.end:
            problem = f"the chat template ends an answer with {close!r}, which is not a single token"
            notes.append(f"{problem}: a response only stops at the end token; rollout.stop=[{close!r}] would stop it there")
        if turn.lead.strip():
            notes.append(f"the chat template writes {turn.lead!r} between the generation prompt and an answer")
        if self._in_parts:
            notes.append("the chat template takes contents only as lists of parts, and gets each text as such a list")
        return notes

    def supervised_notes(self) -> list[str]:
        """Notes about text that supervised training on answers may train unintentionally."""
        if self.turn.is_begun:
            return []
        begun = self.render([ASKED], generate=True)[-PROMPT_END:]
        message = f"the chat template ends prompts with {begun!r}, but renders turns without it: answers are trained behind it"
        return [f"{message}; write messages with reasoning_content into the data, or close it in the answers"]

    def _end(self, close: str) -> str:
        """The token in `close` that ends a turn: the first added token, or all of `close` if it is a single token."""
        backend = self._tokenizer.backend_tokenizer
        added: set[str] = {token.content for token in backend.get_added_tokens_decoder().values() if token.content.strip()}
        found = [(close.find(content), -len(content), content) for content in added if content in close]
        if found:
            return min(found)[2]
        word = close.strip()
        ids = backend.encode(word, add_special_tokens=False).ids if len(word) > 1 else []
        return word if len(ids) == 1 and backend.id_to_token(ids[0]) == word else ""

    def _given(self, message: Mapping[str, Any]) -> dict[str, Any]:
        content, role = message.get("content", ""), "user" if message["role"] == "tool" else message["role"]
        is_text = role in self._in_parts and isinstance(content, str)
        return {**message, "content": _parts(content)} if is_text else dict(message)

    def _writes(self, before: Sequence[Any], role: str, content: Any, behind: Sequence[Any]) -> bool:
        try:
            return PROBE in self.render([*before, {"role": role, "content": content}, *behind], generate=True)
        except Exception:  # noqa: BLE001 - of the template's code
            return False


def _parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]
