"""The model as an episode talks to it: messages or token ids in, what it sampled out; the tokens are kept inside.

A message that the model gave is known again in the next call's history, whatever form a client has brought it into, and stands
there for its own tokens. Leaves out HTTP (proxy.py) and where tokens come from (the sampler).

    model = Model(sampler, renderer, Recorder())
    reply = await model.chat([{"role": "user", "content": "6 * 7?"}], tools=[calculator])
    reply.content, reply.tool_calls, reply.reasoning
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import json
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from megasync.episodes.messages import Fields, Message, MessageError, Tool, following, key, keys_of_histories, plain, plain_tools
from megasync.episodes.parse import Parsed
from megasync.episodes.record import Answers
from megasync.episodes.segments import Recorder, Sampler, Turn
from megasync.episodes.template import Answer, Prompt
from megasync.episodes.tokens import Tokens


class Renderer(Protocol):
    """Messages to tokens, and sampled tokens to a message (render.py)."""

    tokens: Tokens

    def prompt(
        self, messages: Sequence[Message], tools: Sequence[Tool], answers: Mapping[int, Answer], former: int | None = None
    ) -> Prompt: ...

    def read(self, prompt_ids: Sequence[int], token_ids: Sequence[int], tools: Sequence[Tool]) -> Parsed: ...


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """What was sampled for token ids."""

    token_ids: list[int]  # the stop token included
    text: str  # without it
    finish_reason: str  # stop | length


@dataclass(frozen=True, slots=True, eq=False)
class Reply:
    """A message with what an HTTP answer says of it."""

    message: Fields  # role, content, reasoning, tool_calls, finish_reason
    finish_reason: str  # stop | length | tool_calls
    num_prompt_tokens: int
    num_sampled_tokens: int
    continues: bool  # the prompt began with the tokens of a former one and its answer
    stopped_by: str = ""  # the text of `stop` before which the message ends


class Model:
    """Of one episode. Calls may run side by side; a cancelled one leaves no trace."""

    def __init__(self, sampler: Sampler, renderer: Renderer, recorder: Recorder) -> None:
        self.sampler, self.renderer, self.recorder = sampler, renderer, recorder
        self.answers = Answers()
        self._by_history: dict[bytes, Answer] = {}
        self._by_message: dict[bytes, Answer] = {}

    async def complete(self, ids: Sequence[int], *, max_new_tokens: int | None = None, stop: Sequence[str] = ()) -> Completion:
        """Sampled tokens after these. Those of an earlier call and its answer may begin them.

        Raises:
            ValueError: these are no token ids.
        """
        turn = await self._sample(token_ids_of(ids), max_new_tokens, stop)
        tokens = self.renderer.tokens
        token_ids = turn.token_ids.tolist()
        return Completion(token_ids, tokens.decode(tokens.without_stop(token_ids)), turn.finish_reason)

    async def call(self, tool: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """What the tool gives, which is kept: an episode that goes on after a kill gets it again, and the tool is not called.

        A plain function runs in a thread. Arguments and answer are such as JSON has; else it is called again. An error of the
        tool is raised, and not kept.
        """
        what, asked = f"call {getattr(tool, '__qualname__', repr(tool))}", [list(arguments), options]
        place, former = self.answers.next(what, asked)
        if former is not None:
            return former.value
        is_async = inspect.iscoroutinefunction(tool)
        value = await (tool(*arguments, **options) if is_async else asyncio.to_thread(tool, *arguments, **options))
        self.answers.keep(place, what, asked, value)
        return value

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
    ) -> Fields:
        """The model's message: `content`, `reasoning`, `tool_calls`, `finish_reason`, as keys and as attributes.

        Raises:
            MessageError: a message that the chat template does not take.
        """
        return (await self.reply(messages, tools, max_tokens=max_tokens, stop=stop)).message

    async def reply(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        keeps_stop: bool = True,
    ) -> Reply:
        """`chat` with the counts of tokens. `keeps_stop`: whether the message has the text of `stop` that ended it."""
        prompt, before, offered = self._prompt(messages, tools)
        turn = await self._sample(prompt.ids, max_tokens, stop)
        token_ids = turn.token_ids.tolist()
        parsed = self.renderer.read(prompt.ids, token_ids, offered)
        call_ids = tuple(_call_id(prompt.ids, token_ids, place) for place, _ in enumerate(parsed.calls))
        shown, stopped_by = (parsed, "") if keeps_stop else _before_stop(parsed, stop)
        message = _message(shown, call_ids, turn.finish_reason)
        self._keep(before, message, Answer(prompt, token_ids, parsed, call_ids))
        return Reply(message, message.finish_reason, len(prompt.ids), len(token_ids), prompt.continues, stopped_by)

    def num_prompt_tokens(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None) -> int:
        """How many tokens the prompt of `chat` would have."""
        return len(self._prompt(messages, tools)[0].ids)

    def _prompt(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None
    ) -> tuple[Prompt, bytes, list[Tool]]:
        """With the history's key and the tools that were offered."""
        history, offered = _plain_messages(messages), plain_tools(tools)
        keys = keys_of_histories(history, offered)
        answers, former = self._known(history, keys)
        return self.renderer.prompt(history, offered, answers, former), keys[-1], offered

    async def _sample(self, ids: list[int], max_new_tokens: int | None, stop: Sequence[str]) -> Turn:
        limit, stop = max_new_tokens, (stop,) if isinstance(stop, str) else stop
        if limit is not None and (not isinstance(limit, int) or limit < 1):
            raise ValueError(f"a limit of tokens is {limit!r:.80}: write a whole number from 1 on")
        if not all(isinstance(text, str) and text for text in stop):
            raise ValueError(f"stop = {stop!r:.80}: write a list of texts")
        turn = await self.sampler(ids, max_new_tokens=limit, stop=stop)
        self.recorder.add(ids, turn)
        return turn

    def _known(self, history: Sequence[Message], keys: Sequence[bytes]) -> tuple[dict[int, Answer], int | None]:
        """Which messages were sampled here, and the last that was sampled after exactly the messages before it."""
        answers, former = {}, None
        for index, message in enumerate(history):
            if message["role"] != "assistant":
                continue
            if answer := self._by_history.get(keys[index + 1]):
                former = index
            if answer := answer or self._by_message.get(key(message)):
                answers[index] = answer
        return answers, former

    def _keep(self, before: bytes, message: Fields, answer: Answer) -> None:
        made = plain(message)
        self._by_history[following(before, made)] = answer
        self._by_message[key(made)] = answer


def _plain_messages(given: Any) -> list[Message]:
    """MessageError where it is no list of messages, or an empty one."""
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise MessageError(f"messages are of type {type(given).__name__}: write a list of messages")
    if not given:
        raise MessageError("there are no messages: write at least one, of the user")
    return [plain(message) for message in given]


def token_ids_of(given: Any) -> list[int]:
    """A list of what an episode has written as token ids.

    Raises:
        ValueError: it is none.
    """
    if isinstance(given, str) or np.ndim(given) != 1:
        raise ValueError(f"token ids are of type {type(given).__name__}: write a list of whole numbers")
    ids = list(given)
    wrong = [each for each in ids if not isinstance(each, int | np.integer) or not 0 <= each < 2**31]
    if wrong:
        raise ValueError(f"token ids have {wrong[0]!r:.80} among them: write whole numbers from 0 to the vocabulary's end")
    return ids


def _call_id(prompt_ids: Sequence[int], token_ids: Sequence[int], place: int) -> str:
    """Nine characters, as mistral's templates want them; the same where an episode is played again, since prompts have them."""
    told = array("q", [*prompt_ids, -1, *token_ids, -1, place]).tobytes()
    return hashlib.blake2b(told, digest_size=5).hexdigest()[:9]


def _before_stop(parsed: Parsed, stop: Sequence[str]) -> tuple[Parsed, str]:
    """Up to the text that ended the content, or reasoning that is all there is; and that text, or "" where there is none."""
    is_thought = not parsed.content and bool(parsed.reasoning)
    text = parsed.reasoning if is_thought else parsed.content
    place, found = min(((place, each) for each in stop if (place := text.find(each)) >= 0), default=(-1, ""))
    if not found:
        return parsed, ""
    return replace(parsed, reasoning=text[:place]) if is_thought else replace(parsed, content=text[:place]), found


def _message(parsed: Parsed, call_ids: Sequence[str], finish_reason: str) -> Fields:
    calls = [
        Fields(id=call_id, type="function", function=Fields(name=name, arguments=json.dumps(arguments, ensure_ascii=False)))
        for call_id, (name, arguments) in zip(call_ids, parsed.calls, strict=True)
    ]
    reason = "tool_calls" if calls and finish_reason == "stop" else finish_reason
    made = Fields(role="assistant", content=parsed.content, finish_reason=reason)
    if parsed.reasoning:
        made["reasoning"] = parsed.reasoning
    if calls:
        made["tool_calls"] = calls
    return made
