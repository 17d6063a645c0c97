"""A conversation as token ids, by the chat template of the model's folder, whatever family it is of.

The next prompt is the tokens so far and the tokens of what came after them. The template renders the whole conversation as text,
with marks (tokens.py) for what the model sampled, and only the text behind the last mark is tokenised. Where the template would
now write the part before it in another way (earlier thinking dropped, tools moved to the last user's message), the prompt is
rendered again, still with the sampled tokens in place of the marks: that begins a branch (segments.py).

Leaves out templates without tools or a system message (folding.py), and families whose renderer is known by name (render.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from megasync.data.template import PROBE, ChatTemplate, check_template
from megasync.episodes.calls.formats import FORMATS, Format
from megasync.episodes.calls.reading import read_calls
from megasync.episodes.folding import fold
from megasync.episodes.messages import Message, MessageError, Tool
from megasync.episodes.parse import END_THINK, THINK, Parsed, format_of
from megasync.episodes.sampled import Answer, Prompt, parts, read_answer
from megasync.episodes.tokens import MARK, Tokens, mark

OWN_VARIABLES = {"tools", "documents"}
PROBE_TOOL: Tool = {
    "type": "function",
    "function": {"name": PROBE, "description": "A probe.", "parameters": {"type": "object", "properties": {}}},
}
PROBE_AS_JSON = re.compile(rf'"name":\s*"{PROBE}"'), re.compile(r"""a\\?["']:\s*1\b""")  # a dict that is written as it is has '
PROBE_CALL = {"id": "probe0c4f", "type": "function", "function": {"name": PROBE, "arguments": {}}}  # nine characters: mistral's


class TemplateRenderer:
    """`arguments`: the template's own variables, such as enable_thinking.

    Raises:
        ValueError: there is no chat template, or it does not render one question and its answer.
    """

    def __init__(self, tokens: Tokens, arguments: Mapping[str, Any] | None = None) -> None:
        self.tokens, template = tokens, tokens.tokenizer.get_chat_template() if tokens.tokenizer.chat_template else ""
        if not template:
            raise ValueError("the tokenizer has no chat template: give the model's folder one, or take a model with one")
        self.arguments, self._written = dict(arguments or {}), ChatTemplate(tokens.tokenizer, arguments or {})
        user, content = {"role": "user", "content": PROBE}, mark(1, "content")
        asked = self._apply([user], [], generate=False)
        self._generation = self._apply([user], [], generate=True).removeprefix(asked)
        answered = self._apply([user, {"role": "assistant", "content": content}], [], generate=False)
        if content not in answered:
            raise ValueError("the chat template does not write an assistant's content as it is: take another one")
        header, _, close = answered.removeprefix(asked).partition(content)
        self._close = close.strip()
        self._reasons = END_THINK in template
        self._takes_reasoning = "reasoning_content" in template
        # white space that the template writes before an answer, and the model samples as a part of it
        self._space = "" if self._reasons or header.strip() != self._generation.strip() else header.removeprefix(self._generation)
        self._folds_system = not self._renders([{"role": "system", "content": PROBE}, user], [])
        self._folds_tools = not self._renders([{**user, "content": "?"}], [PROBE_TOOL])
        self._needs_calls = not self._folds_tools and not self._renders(_with_result(_answer("!")), [])
        if self._needs_calls and not self._renders(_with_result(_answer("", [PROBE_CALL])), []):
            self._folds_tools, self._needs_calls = True, False
        self._before_call = ""
        if self._needs_calls:
            call = _answer("", [{**PROBE_CALL, "function": {"name": content, "arguments": {}}}])
            called = self._apply([user, call], [], generate=False).removeprefix(asked)
            self._before_call = called.partition(content)[0].removeprefix(header)
        self._format = "hermes" if self._folds_tools else self._read_format(user, header)

    def prompt(
        self, messages: Sequence[Message], tools: Sequence[Tool], answers: Mapping[int, Answer], former: int | None = None
    ) -> Prompt:
        """Plain messages; `answers`: of the sampled ones, by index; `former`: the one of these that the prompt should continue.

        Raises:
            MessageError: the template refuses the messages.
        """
        self.format_of_calls(tools)
        text, known = self._text(messages, tools, answers, generate=True)
        begun = text.removesuffix(self._generation)
        if len(begun) == len(text) and self._generation:
            begun = self._text(messages, tools, answers, generate=False)[0]
        ids, continues = self._ids(text, known, answers, former)
        return Prompt(ids, begun, continues)

    def begin(
        self, messages: Sequence[Message], tools: Sequence[Tool], answers: Mapping[int, Answer], former: int | None = None
    ) -> tuple[Prompt, list[int]]:
        """For a last message, of the assistant's, that the model continues: the prompt before its content, and its tokens.

        Raises:
            MessageError: the template refuses the messages.
        """
        *earlier, last = messages
        content = MARK.sub("", last["content"])
        if content.lstrip().startswith(THINK):  # the turn from its begin on
            text, known = self._text(earlier, tools, answers, generate=True)
            content = content.lstrip().removeprefix(THINK).lstrip("\n") if text.rstrip().endswith(THINK) else content
        else:
            place = mark(len(earlier), "content")
            text, known = self._text([*earlier, {**last, "content": place}], tools, answers, generate=False, keeps=place)
            text, content = text.partition(place)[0], self._space + content
        begun = self._text(earlier, tools, answers, generate=False)[0]
        ids, continues = self._ids(text, known, answers, former)
        together, _ = self._ids(text + content, known, answers, former)
        given = together[len(ids) :] if together[: len(ids)] == ids else self.tokens.encode(content)
        return Prompt(ids, begun, continues), given

    def with_arguments(self, arguments: Mapping[str, Any]) -> TemplateRenderer:
        """The same with other values of the template's variables.

        Raises:
            MessageError: it has no variable of that name.
        """
        refuse_unknown(self.tokens.tokenizer, arguments)
        return TemplateRenderer(self.tokens, {**self.arguments, **arguments})

    def read(self, prompt_ids: Sequence[int], token_ids: Sequence[int], tools: Sequence[Tool]) -> Parsed:
        """The sampled tokens as a message."""
        return read_answer(self.tokens, self.format_of_calls(tools), prompt_ids, token_ids, tools)

    def format_of_calls(self, tools: Sequence[Tool]) -> Format:
        """The format in which the model writes tool calls.

        Raises:
            MessageError: there are tools, and the template writes calls in a way that is not known here.
        """
        if tools and not self._format:
            raise MessageError("the chat template writes tool calls in a format that is not known: offer no tools, read the text")
        return self._format or "hermes"

    # ------------------------------------------------------------------------------------------------ inside

    def _read_format(self, user: Message, header: str) -> Format | None:
        """The format that reads how the template writes a call of a former turn. What format_of says is tried first, and it is
        taken, or hermes, where the template writes no such calls. Where no format reads them: what format_of says if they are
        objects with a key `name`, such as nested ones, or ones with a dict of Python as arguments; else None.
        """
        tools, call = [PROBE_TOOL], {**PROBE_CALL, "function": {"name": PROBE, "arguments": {"a": 1}}}
        said = format_of(self.tokens.tokenizer.get_chat_template(tools=tools))
        try:
            before = self._apply([user], tools, generate=False) + header
            whole = self._apply([user, _answer("", [call])], tools, generate=False)
        except MessageError:
            return said or "hermes"
        if said and not whole.startswith(before):  # the turn begins in another way
            return said
        text = whole.removeprefix(before)
        text = text.partition(self._close)[0] if self._close else text
        if PROBE not in text:
            return said or "hermes"
        forms = [said, *FORMATS] if said else FORMATS
        found = next((form for form in forms if read_calls(text, form, [PROBE_TOOL]).calls == [(PROBE, {"a": 1})]), None)
        return found or (said if all(part.search(text) for part in PROBE_AS_JSON) else None)

    def _text(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        answers: Mapping[int, Answer],
        *,
        generate: bool,
        keeps: str = "",
    ) -> tuple[str, dict[str, list[int]]]:
        """The conversation with marks (`keeps` is one already), and the tokens that they stand for."""
        known: dict[str, list[int]] = {}
        marked = [
            self._marked(index, messages, answers[index], known)
            if index in answers
            else (of_template(message) | ({"content": keeps} if message["content"] == keeps else {}))
            for index, message in enumerate(messages)
        ]
        if self._folds_tools or self._folds_system:
            marked, tools = fold(marked, tools, with_tools=self._folds_tools, with_system=self._folds_system)
        return self._bare(self._apply(marked, tools, generate=generate)), known

    def _ids(
        self, text: str, known: Mapping[str, Sequence[int]], answers: Mapping[int, Answer], former: int | None
    ) -> tuple[list[int], bool]:
        """The text as tokens, and whether they continue those of `former`."""
        if former is not None:
            answer = answers[former]
            added = self._added(text, former, answer, known)
            if added is not None:
                return [*answer.prompt.ids, *answer.token_ids, *added], True
        return self.tokens.encode(text, known), False

    def _added(self, text: str, index: int, answer: Answer, known: Mapping[str, Sequence[int]]) -> list[int] | None:
        """The tokens behind the sampled ones; None where the template now renders the text before them in another way."""
        rest = text.removeprefix(answer.prompt.text)
        reasoning, content = mark(index, "reasoning"), mark(index, "content")
        if not text.startswith(answer.prompt.text) or content not in rest or (known.get(reasoning) and reasoning not in rest):
            return None
        is_open = bool(known.get(reasoning)) and not answer.parsed.content and not known[content] and self._is_open(answer)
        after = rest.partition(reasoning if is_open else content)[2]
        if not self.tokens.is_closed(answer.token_ids):
            return self.tokens.encode(after, known)
        closing = self.tokens.decode(answer.token_ids[-1:])
        for close in (closing, self._close):  # sampled; or the template's own, where the model ended with another one
            before, found, behind = after.partition(close) if close else ("", "", "")
            if found and not before.strip():
                return self._encode_behind(closing, behind, answer.token_ids[-1], known)
        return self._encode_behind(closing, after, answer.token_ids[-1], known)

    def _encode_behind(self, closing: str, text: str, last: int, known: Mapping[str, Sequence[int]]) -> list[int]:
        """Token ids of `text` behind `closing`: some tokenizers encode the first word of a text differently."""
        ids = self.tokens.encode(closing + text, known)
        return ids[1:] if ids[:1] == [last] else self.tokens.encode(text, known)

    def _is_open(self, answer: Answer) -> bool:
        return END_THINK not in self.tokens.decode(answer.token_ids)

    def _marked(self, index: int, messages: Sequence[Message], answer: Answer, known: dict[str, list[int]]) -> Message:
        """The message as the template is given it: marks for reasoning and for the rest, in which tool calls are included."""
        reasoning, content = parts(self.tokens, answer) if self._reasons else ([], self.tokens.without_stop(answer.token_ids))
        names = mark(index, "reasoning"), mark(index, "content")
        known.update(zip(names, (reasoning, content), strict=True))
        is_answered = any(each["role"] == "tool" for each in messages[index + 1 : index + 2])  # also a call that is broken
        if self._needs_calls and (answer.parsed.calls or is_answered):
            call_id = answer.call_ids[0] if answer.call_ids else PROBE_CALL["id"]
            return _answer("", [{**PROBE_CALL, "id": call_id, "function": {"name": names[1], "arguments": {}}}])
        if not reasoning:
            return _answer(names[1])
        if self._takes_reasoning:
            return {**_answer(names[1]), "reasoning_content": names[0]}
        return _answer(f"{THINK}\n{names[0]}\n{END_THINK}\n\n{names[1]}")

    def _bare(self, text: str) -> str:
        """Without what the template writes around a mark and the model samples itself: a space, the form of a tool call."""
        if not self._space and not self._before_call:
            return text
        made, end = "", 0
        for found in MARK.finditer(text):
            before = text[end : found.start()]
            end = found.end()
            if self._before_call and before.endswith(self._before_call):
                before, end = before.removesuffix(self._before_call), text.index(self._close, end)
            made += before.removesuffix(self._space) + found[0]
        return made + text[end:]

    def _apply(self, messages: Sequence[Message], tools: Sequence[Tool], *, generate: bool) -> str:
        from jinja2 import TemplateError

        try:
            return self._written.render(messages, tools=tools, generate=generate)
        except (TemplateError, TypeError) as error:
            roles = ", ".join(message["role"] for message in messages)
            message = f"the model's chat template refuses the messages: {error}; their roles: {roles}"
            raise MessageError(f"{message}. Write them in an order that the template takes") from error

    def _renders(self, messages: Sequence[Message], tools: Sequence[Tool]) -> bool:
        """The template accepts these and renders their contents."""
        try:
            return PROBE in self._apply(messages, tools, generate=True)
        except MessageError:
            return False


def refuse_unknown(tokenizer: Any, arguments: Mapping[str, Any]) -> None:
    """MessageError where the chat template reads no variable of that name, or we give it ourselves."""
    usable = [name for name in check_template(tokenizer, {}) if name not in OWN_VARIABLES]
    for name in arguments:
        if name not in usable:
            remedy = f"write one of {', '.join(usable)}" if usable else "leave it out"
            raise MessageError(f"chat_template_kwargs: the chat template has no variable {name!r:.80} to be set: {remedy}")


def _answer(content: str, calls: Sequence[Any] = ()) -> Message:
    return {"role": "assistant", "content": content, **({"tool_calls": list(calls)} if calls else {})}


def _with_result(answer: Message) -> list[Message]:
    """A tool's result after that answer, and a turn more: some templates count how messages alternate."""
    result = {"role": "tool", "content": PROBE, "tool_call_id": PROBE_CALL["id"]}
    return [{"role": "user", "content": "?"}, answer, result, _answer("!"), {"role": "user", "content": "?"}]


def of_template(message: Message) -> Message:
    """Marks are only ours; reasoning has the name that templates give it."""
    made = {**message, "content": MARK.sub("", message["content"])}
    return {**made, "reasoning_content": made.pop("reasoning")} if "reasoning" in made else made
