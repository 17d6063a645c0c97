"""A conversation as token ids, by the chat template of the model's folder, whatever family it is of.

The next prompt is the tokens so far and the tokens of what came after them. The template renders the whole conversation as text,
with marks (tokens.py) for what the model sampled, and only the text behind the last mark is tokenised. Where the template would
now write the part before it in another way (earlier thinking dropped, tools moved to the last user's message), the prompt is
rendered anew, still with the sampled tokens in place of the marks: that begins a branch (segments.py).

What a template does not know is said within what it knows: tools are described in the system message, in the hermes form, and
their results are messages of the user. Leaves out families whose renderer is known by name (render.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megasync.episodes.messages import Message, MessageError, Tool
from megasync.episodes.parse import END_THINK, THINK, Parsed, format_of, parse
from megasync.episodes.tokens import MARK, Tokens, mark

THINK_TOKENS = 12  # in which the tag and white space after it are
PROBE = "probe0c4f"
PROBE_TOOL: Tool = {
    "type": "function",
    "function": {"name": PROBE, "description": "A probe.", "parameters": {"type": "object", "properties": {}}},
}
PROBE_CALL = {"id": "probe0c4f", "type": "function", "function": {"name": PROBE, "arguments": {}}}  # nine characters: mistral's
TOOLS = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    ids: list[int]
    text: str  # with marks and without the generation prompt
    continues: bool = False  # the tokens of a former prompt and its answer begin it


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """What was sampled for a prompt, and how it reads as a message."""

    prompt: Prompt
    token_ids: list[int]
    parsed: Parsed
    call_ids: tuple[str, ...] = ()


class TemplateRenderer:
    """`arguments`: the template's own variables, such as enable_thinking.

    Raises:
        ValueError: there is no chat template, or it does not render one question and its answer.
    """

    def __init__(self, tokens: Tokens, arguments: Mapping[str, Any] | None = None) -> None:
        self.tokens, self.arguments = tokens, dict(arguments or {})
        self._template: str = tokens.tokenizer.get_chat_template() if tokens.tokenizer.chat_template else ""
        if not self._template:
            raise ValueError("the tokenizer has no chat template: give the model's folder one, or take a model with one")
        self.format = format_of(self._template)
        user, content = {"role": "user", "content": PROBE}, mark(1, "content")
        asked = self._apply([user], [], generate=False)
        self._generation = self._apply([user], [], generate=True).removeprefix(asked)
        answered = self._apply([user, {"role": "assistant", "content": content}], [], generate=False)
        if content not in answered:
            raise ValueError("the chat template does not write an assistant's content as it is: take another one")
        header, _, close = answered.removeprefix(asked).partition(content)
        self._close = close.strip()
        self._reasons = END_THINK in self._template
        self._takes_reasoning = "reasoning_content" in self._template
        # white space that the template writes before an answer, and the model samples as a part of it
        self._space = "" if self._reasons or header.strip() != self._generation.strip() else header.removeprefix(self._generation)
        self._thinking = self._generation.rstrip().endswith(THINK)  # the prompt begins the reasoning
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

    def prompt(
        self, messages: Sequence[Message], tools: Sequence[Tool], answers: Mapping[int, Answer], former: int | None = None
    ) -> Prompt:
        """Plain messages; `answers`: of those that were sampled, by index; `former`: which of these the prompt should continue.

        Raises:
            MessageError: the template refuses the messages.
        """
        known: dict[str, list[int]] = {}
        marked = [
            self._marked(index, answers[index], known) if index in answers else of_template(message)
            for index, message in enumerate(messages)
        ]
        if self._folds_tools or self._folds_system:
            marked, tools = fold(marked, tools, with_tools=self._folds_tools, with_system=self._folds_system)
        text = self._bare(self._apply(marked, tools, generate=True))
        begun = text.removesuffix(self._generation)
        if len(begun) == len(text) and self._generation:
            begun = self._bare(self._apply(marked, tools, generate=False))
        if former is not None:
            answer = answers[former]
            added = self._added(text, former, answer, known)
            if added is not None:
                return Prompt([*answer.prompt.ids, *answer.token_ids, *added], begun, continues=True)
        return Prompt(self.tokens.encode(text, known), begun)

    def read(self, prompt_ids: Sequence[int], token_ids: Sequence[int], tools: Sequence[Tool]) -> Parsed:
        """What was sampled, as a message."""
        text = self.tokens.decode(self.tokens.without_stop(token_ids))
        return parse(text, "hermes" if self._folds_tools else self.format, tools, thinking=self._thinking)

    # ------------------------------------------------------------------------------------------------ inside

    def _added(self, text: str, index: int, answer: Answer, known: Mapping[str, Sequence[int]]) -> list[int] | None:
        """The tokens behind the sampled ones; None where the template writes what is before them in another way now."""
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
        """As the text is tokenised where it stands: some tokenizers write the first word of a text in another way."""
        ids = self.tokens.encode(closing + text, known)
        return ids[1:] if ids[:1] == [last] else self.tokens.encode(text, known)

    def _is_open(self, answer: Answer) -> bool:
        return END_THINK not in self.tokens.decode(answer.token_ids)

    def _marked(self, index: int, answer: Answer, known: dict[str, list[int]]) -> Message:
        """The message as the template is given it: marks for reasoning and for the rest, in which tool calls are included."""
        reasoning, content = parts(self.tokens, answer) if self._reasons else ([], self.tokens.without_stop(answer.token_ids))
        names = mark(index, "reasoning"), mark(index, "content")
        known.update(zip(names, (reasoning, content), strict=True))
        if self._needs_calls and answer.parsed.calls:
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
            text: str = self.tokens.tokenizer.apply_chat_template(
                list(messages), tools=list(tools) or None, tokenize=False, add_generation_prompt=generate, **self.arguments
            )
        except (TemplateError, TypeError) as error:
            roles = ", ".join(message["role"] for message in messages)
            message = f"the model's chat template refuses the messages: {error}; their roles: {roles}"
            raise MessageError(f"{message}. Write them in an order that the template takes") from error
        return text

    def _renders(self, messages: Sequence[Message], tools: Sequence[Tool]) -> bool:
        """The template takes these and writes what is to be seen of them."""
        try:
            return PROBE in self._apply(messages, tools, generate=True)
        except MessageError:
            return False


def parts(tokens: Tokens, answer: Answer) -> tuple[list[int], list[int]]:
    """Tokens of the reasoning and of the rest, without the tags and the white space that a template writes itself."""
    ids = tokens.without_stop(answer.token_ids)
    if not tokens.decode(answer.prompt.ids[-THINK_TOKENS:]).rstrip().endswith(THINK):  # the prompt did not begin the reasoning
        begun = tokens.split(ids, THINK)
        if begun is None or tokens.decode(begun[0]).strip():
            return [], ids
        ids = begun[1]
    reasoning, content = tokens.split(ids, END_THINK) or (ids, [])
    return tokens.trimmed(reasoning), tokens.trimmed(content)


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


def fold(
    messages: Sequence[Message], tools: Sequence[Tool], *, with_tools: bool, with_system: bool
) -> tuple[list[Message], Sequence[Tool]]:
    """The messages, and the tools that are left to the template. With folded tools, messages of the user in a row become one."""
    made = [dict(message) for message in messages]
    if with_tools:
        made = _joined([_without_tools(message) for message in made])
        if tools:
            described = TOOLS.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
            if made and made[0]["role"] == "system":
                made[0]["content"] += f"\n\n{described}"
            else:
                made.insert(0, {"role": "system", "content": described})
        tools = ()
    if with_system and len(made) > 1 and made[0]["role"] == "system" and made[1]["role"] == "user":
        system = made.pop(0)
        made[0]["content"] = f"{system['content']}\n\n{made[0]['content']}"
    return made, tools


def _without_tools(message: Message) -> Message:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    if not message.get("tool_calls"):
        return message
    calls = [f"<tool_call>\n{json.dumps(call['function'], ensure_ascii=False)}\n</tool_call>" for call in message["tool_calls"]]
    content = [message["content"]] if message["content"] else []
    return {**{name: message[name] for name in message if name != "tool_calls"}, "content": "\n".join([*content, *calls])}


def _joined(messages: Sequence[Message]) -> list[Message]:
    """Templates that want roles in turn refuse two messages of the user in a row, as results of two tools would be."""
    made: list[Message] = []
    for message in messages:
        if made and made[-1]["role"] == message["role"] == "user":
            made[-1]["content"] += f"\n{message['content']}"
        else:
            made.append(message)
    return made
