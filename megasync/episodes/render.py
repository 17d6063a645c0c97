"""Which renderer a model's folder gets, and that of its family in the `renderers` package, for families that it knows.

The family's is taken where the package is installed and gives the same tokens as the folder's chat template for some
conversations; else the template itself (template.py). Its bridge goes from a former prompt and what was sampled to the next
prompt; where it gives none the conversation is rendered again, with marks (tokens.py) for the sampled tokens.

    renderer = renderer_of(Tokens(tokenizer, stop_token_ids), "qwen3", {"enable_thinking": False})
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from megasync.episodes.chat import Renderer
from megasync.episodes.messages import Message, MessageError, Tool
from megasync.episodes.parse import Parsed
from megasync.episodes.sampled import Answer, Prompt, parts, read_answer
from megasync.episodes.template import TemplateRenderer, of_template
from megasync.episodes.tokens import Tokens, mark

# By model_type of config.json. Which of them it is, if any, is found out by rendering.
NAMES = {
    "qwen3": ("qwen3", "prime-qwen3"),
    "qwen3_moe": ("qwen3",),
    "qwen3_5": ("qwen3.5", "qwen3.6"),
    "qwen3_5_moe": ("qwen3.5", "qwen3.6"),
    "llama": ("llama-3",),
    "glm4_moe": ("glm-4.5", "glm-5"),
    "glm4_moe_lite": ("glm-5",),
    "deepseek_v3": ("deepseek-v3", "deepseek-r1", "kimi-k2"),
    "kimi_k2": ("kimi-k2",),
    "minimax_m2": ("minimax-m2",),
    "nemotron_h": ("nemotron-3", "nemotron-3-ultra", "nemotron-3.5"),
}
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


class FamilyRenderer:
    """`name`: one of the package's. `arguments`: the template's variables. `model_type`: as renderer_of's.

    Raises:
        ValueError: the package knows no such name or argument, or the tokenizer lacks the family's tokens.
    """

    def __init__(self, tokens: Tokens, name: str, arguments: Mapping[str, Any] | None = None, model_type: str = "") -> None:
        import renderers

        self.tokens, self.name, self.model_type = tokens, name, model_type
        self.template = TemplateRenderer(tokens, arguments)
        self._tokenizer = _Marked(tokens)
        config = renderers.merge_chat_template_kwargs(renderers.config_from_name(name), arguments)
        made = getattr(renderers, type(config).__name__.removesuffix("Config"))  # create_renderer imports all families: seconds
        try:
            self._renderer = made(self._tokenizer, config)
        except (AssertionError, TypeError) as error:
            raise ValueError(f"the tokenizer is not of the family {name}: {error}") from error

    def prompt(
        self, messages: Sequence[Message], tools: Sequence[Tool], answers: Mapping[int, Answer], former: int | None = None
    ) -> Prompt:
        """Like the method of TemplateRenderer."""
        self.template.format_of_calls(tools)
        named = _with_names(messages)
        if former is not None:
            answer = answers[former]
            begun = [*answer.prompt.ids, *answer.token_ids]
            bridged = self._renderer.bridge_to_next_turn(
                answer.prompt.ids, answer.token_ids, [of_template(each) for each in named[former + 1 :]], tools=_functions(tools)
            )
            if bridged is not None and list(bridged.token_ids[: len(begun)]) == begun:
                return Prompt(list(bridged.token_ids), "", continues=True)
        known: dict[str, list[int]] = {}
        marked = [self._marked(index, each, answers.get(index), known) for index, each in enumerate(named)]
        return Prompt(self.render(marked, tools, known), "")

    def render(self, messages: Sequence[Message], tools: Sequence[Tool], known: Mapping[str, list[int]]) -> list[int]:
        """With `known` tokens for the marks in the messages."""
        self._tokenizer.known = known
        try:
            ids = self._renderer.render_ids(list(messages), tools=_functions(tools), add_generation_prompt=True)
        finally:
            self._tokenizer.known = {}
        return list(ids)

    def begin(
        self, messages: Sequence[Message], tools: Sequence[Tool], answers: Mapping[int, Answer], former: int | None = None
    ) -> tuple[Prompt, list[int]]:
        """By TemplateRenderer: the package cannot begin a turn of the assistant."""
        return self.template.begin(messages, tools, answers)

    def with_arguments(self, arguments: Mapping[str, Any]) -> Renderer:
        """Like the method of TemplateRenderer."""
        return renderer_of(self.tokens, self.model_type, self.template.with_arguments(arguments).arguments)

    def read(self, prompt_ids: Sequence[int], token_ids: Sequence[int], tools: Sequence[Tool]) -> Parsed:
        """By our own reader: the package's takes a call's `parameters` for none, and the last of two values of one key."""
        return read_answer(self.tokens, self.template.format_of_calls(tools), prompt_ids, token_ids, tools)

    def _marked(self, index: int, message: Message, answer: Answer | None, known: dict[str, list[int]]) -> Message:
        if answer is None:
            return of_template(message)
        names = mark(index, "reasoning"), mark(index, "content")
        known.update(zip(names, parts(self.tokens, answer), strict=True))
        marked: Message = {"role": "assistant", "content": names[1]}
        return {**marked, "reasoning_content": names[0]} if known[names[0]] else marked


class _Marked:
    """The tokenizer as the package wants one; marks in a text become the tokens that are known of them."""

    def __init__(self, tokens: Tokens) -> None:
        self.known: Mapping[str, list[int]] = {}
        self._tokens = tokens

    def encode(self, text: str, *_: Any, **__: Any) -> list[int]:
        return self._tokens.encode(text, self.known)

    def decode(self, token_ids: Any, *_: Any, **__: Any) -> str:
        return self._tokens.decode([token_ids] if isinstance(token_ids, int) else list(token_ids))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # calling it would tokenise past the marks
            raise AttributeError(name)
        return getattr(self._tokens.tokenizer, name)


def _functions(tools: Sequence[Tool]) -> list[Any] | None:
    """The package takes both forms; templates are given the whole."""
    return list(tools) or None


def _with_names(messages: Sequence[Message]) -> list[Message]:
    """Tool results with the name of the tool: some families write it."""
    names: dict[str, str] = {}
    made = []
    for message in messages:
        names.update({call["id"]: call["function"]["name"] for call in message.get("tool_calls", ()) if "id" in call})
        name = names.get(message.get("tool_call_id", ""), "")
        made.append({**message, "name": name} if message["role"] == "tool" and name else message)
    return made


def renderer_of(tokens: Tokens, model_type: str, arguments: Mapping[str, Any] | None = None) -> Renderer:
    """`model_type` of the folder's config.json; `arguments`: variables of the chat template.

    Raises:
        ValueError: there is no chat template that can be used.
    """
    template = TemplateRenderer(tokens, arguments)
    for name in NAMES.get(model_type, ()) if find_spec("renderers") else ():
        try:
            family = FamilyRenderer(tokens, name, arguments, model_type)
        except ValueError:  # of another model of that type
            continue
        if _writes_the_same(family, template):
            return family
    return template


def _writes_the_same(family: FamilyRenderer, template: TemplateRenderer) -> bool:
    """Whether both write the same tokens in conversations that the template accepts."""
    for messages, tools in CONVERSATIONS:
        try:
            wanted = template.prompt(messages, tools, {}).ids
        except MessageError:
            continue
        if family.render([of_template(message) for message in messages], tools, {}) != wanted:
            return False
    return True
