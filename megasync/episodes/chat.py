"""The model for an episode: messages or token ids in, sampled messages out; the tokens are kept inside.

A message of the model is recognised in the next call's history, whatever form a client has given it, and stands there for its own
tokens. Leaves out HTTP (proxy.py) and where tokens come from (the sampler).

    model = Model(sampler, renderer, Recorder())
    reply = await model.chat([{"role": "user", "content": "6 * 7?"}], tools=[calculator])
    reply.content, reply.tool_calls, reply.reasoning
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from megasync.episodes.messages import (
    WAYS,
    Fields,
    Message,
    MessageError,
    Tool,
    canonical,
    following,
    key,
    keys_of_histories,
    plain,
    plain_tools,
)
from megasync.episodes.parse import Parsed
from megasync.episodes.record import Answers
from megasync.episodes.replies import before_stop, behind, call_id, message_of, tokens_shown
from megasync.episodes.sampled import Answer, Prompt
from megasync.episodes.segments import Recorder, Sampler, Turn
from megasync.episodes.tokens import Tokens
from megasync.episodes.tool_clock import call_tool


class Renderer(Protocol):
    """Messages to tokens, and sampled tokens to a message (render.py)."""

    tokens: Tokens

    def prompt(
        self, messages: Sequence[Message], tools: Sequence[Tool], answers: Mapping[int, Answer], former: int | None = None
    ) -> Prompt: ...

    def begin(
        self, messages: Sequence[Message], tools: Sequence[Tool], answers: Mapping[int, Answer], former: int | None = None
    ) -> tuple[Prompt, list[int]]: ...

    def with_arguments(self, arguments: Mapping[str, Any]) -> Renderer: ...

    def read(self, prompt_ids: Sequence[int], token_ids: Sequence[int], tools: Sequence[Tool]) -> Parsed: ...


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """The sampled answer to token ids."""

    token_ids: list[int]  # the stop token included
    text: str  # without it
    finish_reason: str  # stop | length


@dataclass(frozen=True, slots=True, eq=False)
class Reply:
    """A message with the counts of an HTTP answer."""

    message: Fields  # role, content, reasoning, tool_calls, invalid_tool_calls, finish_reason
    finish_reason: str  # stop | length | tool_calls
    num_prompt_tokens: int
    num_sampled_tokens: int
    continues: bool  # the prompt began with the tokens of a former one and its answer
    stopped_by: str = ""  # the text of `stop` before which the message ends


@dataclass(frozen=True, slots=True, eq=False)
class _TurnInput:
    """The input of a turn. `given`: tokens of the model's own turn behind the prompt, which it continues, and their text."""

    renderer: Renderer
    prompt: Prompt
    tools: list[Tool]
    before: bytes  # the key of the history before the turn
    given: list[int]
    text: str = ""

    @property
    def ids(self) -> list[int]:
        return [*self.prompt.ids, *self.given]


class Model:
    """The model of one episode. Calls may run side by side; a cancelled one has no effect."""

    def __init__(self, sampler: Sampler, renderer: Renderer, recorder: Recorder) -> None:
        self.sampler, self.renderer, self.recorder = sampler, renderer, recorder
        self.answers = Answers()
        self._by_arguments: dict[bytes, Renderer] = {}
        self._by_history: dict[bytes, Answer] = {}
        self._by_message: dict[bytes, Answer] = {}

    async def complete(self, ids: Sequence[int], *, max_new_tokens: int | None = None, stop: Sequence[str] = ()) -> Completion:
        """Sampled tokens after these. Those of an earlier call and its answer may begin them.

        Raises:
            ValueError: these are no token ids.
        """
        (turn,) = await self._sample(token_ids_of(ids), max_new_tokens, stop)
        tokens = self.renderer.tokens
        token_ids = turn.token_ids.tolist()
        return Completion(token_ids, tokens.decode(tokens.without_stop(token_ids)), turn.finish_reason)

    async def call(self, tool: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """The tool's answer, which is recorded: an episode that resumes after a kill gets it again, and the tool is not called.

        A plain function runs in a thread. Arguments and answer are such as JSON has; else it is called again. An error of the
        tool is raised, and not kept.
        """
        what, asked = f"call {getattr(tool, '__qualname__', repr(tool))}", [list(arguments), options]
        place, former = self.answers.next(what, asked)
        if former is not None:
            return former.value
        value = await call_tool(tool, *arguments, **options)
        self.answers.keep(place, what, asked, value)
        return value

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Fields:
        """The model's message: `content`, `reasoning`, `tool_calls`, `finish_reason`, as keys and as attributes.

        A call that cannot be read stays in the content, and is one of `invalid_tool_calls`: `id`, `text` and `error`, which
        says why and is meant for the model, as the answer to that id.

        continue_final_message: the last message is the beginning of the model's message; the result is its continuation.
        chat_template_kwargs: variables of the chat template, in addition to the run's.

        Raises:
            MessageError: a message or a variable that the chat template does not take.
        """
        options: dict[str, Any] = {"max_tokens": max_tokens, "stop": stop, "continue_final_message": continue_final_message}
        return (await self.reply(messages, tools, chat_template_kwargs=chat_template_kwargs, **options)).message

    async def reply(self, *arguments: Any, **options: Any) -> Reply:
        """`chat` with the counts of tokens."""
        (reply,) = await self.replies(*arguments, **options)
        return reply

    async def replies(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        num_samples: int = 1,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        keeps_stop: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[Reply]:
        """Several answers to the same messages; if one fails, none is trained.

        keeps_stop: whether a message has the text of `stop` that ended it. The others as for `chat`.
        """
        asked = self._turn_input(messages, tools, continue_final_message, chat_template_kwargs)
        turns = await self._sample(asked.ids, max_tokens, stop, num_samples)
        return [self._reply(asked, turn, () if keeps_stop else stop) for turn in turns]

    def _reply(self, asked: _TurnInput, turn: Turn, stop: Sequence[str]) -> Reply:
        """`stop`: texts before which the message ends."""
        prompt = asked.prompt
        token_ids = [*asked.given, *turn.token_ids.tolist()]
        parsed = asked.renderer.read(prompt.ids, token_ids, asked.tools)
        num_calls = len(parsed.calls) + len(parsed.broken)
        call_ids = tuple(call_id(prompt.ids, token_ids, place) for place in range(num_calls))
        new = behind(parsed, asked.renderer.read(prompt.ids, asked.given, ())) if asked.given else parsed
        shown, stopped_by = before_stop(new, stop)
        message = message_of(shown, call_ids, turn.finish_reason)
        whole = message | {"content": asked.text + message["content"]}
        self._keep(asked.before, whole, Answer(prompt, token_ids, parsed, call_ids))
        return Reply(message, message.finish_reason, len(asked.ids), len(turn.token_ids), prompt.continues, stopped_by)

    def num_prompt_tokens(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> int:
        """The number of tokens in the prompt of `chat`."""
        return len(self._turn_input(messages, tools, continue_final_message, chat_template_kwargs).ids)

    def _turn_input(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        continues: bool,
        arguments: Mapping[str, Any] | None,
    ) -> _TurnInput:
        renderer = self._with_arguments(arguments) if arguments else self.renderer
        history, offered = _plain_messages(messages), plain_tools(tools)
        keys = keys_of_histories(history, offered)
        answers, former = self._known(history, keys)
        if not continues:
            return _TurnInput(renderer, renderer.prompt(history, offered, answers, former), offered, keys[-1], [])
        last = history[-1]
        if last["role"] != "assistant" or last.get("tool_calls"):
            raise MessageError("the last message is to be continued: write one of the assistant's, without tool_calls")
        place = len(history) - 1
        if (answer := answers.get(place)) is None:
            prompt, given = renderer.begin(history, offered, answers, former)
        else:  # it was sampled: by its tokens
            given = tokens_shown(renderer.tokens, answer, last["content"])
            if former == place:
                prompt = replace(answer.prompt, continues=len(given) == len(answer.token_ids))
            else:
                prompt = renderer.prompt(history[:-1], offered, *self._known(history[:-1], keys))
        return _TurnInput(renderer, prompt, offered, keys[-2], given, last["content"])

    def _with_arguments(self, arguments: Mapping[str, Any]) -> Renderer:
        """Made once for the same arguments."""
        name = canonical(dict(arguments))
        if name not in self._by_arguments:
            self._by_arguments[name] = self.renderer.with_arguments(arguments)
        return self._by_arguments[name]

    async def _sample(self, ids: list[int], max_new_tokens: int | None, stop: Sequence[str], number: int = 1) -> list[Turn]:
        """Sample `number` turns of one prompt; they are recorded once all have ended."""
        limit, stop = max_new_tokens, (stop,) if isinstance(stop, str) else stop
        if limit is not None and (not isinstance(limit, int) or limit < 1):
            raise ValueError(f"a limit of tokens is {limit!r:.80}: write a whole number from 1 on")
        if not all(isinstance(text, str) and text for text in stop):
            raise ValueError(f"stop = {stop!r:.80}: write a list of texts")
        stop = tuple(map(str.__str__, stop))  # also members of enumerations, whose modules a replica does not have
        draws = [self.sampler(ids, max_new_tokens=limit, stop=stop) for _ in range(number)]
        turns = [await draws[0]] if number == 1 else await _all_of(draws)
        for turn in turns:
            self.recorder.add(ids, turn)
        return turns

    def _known(self, history: Sequence[Message], keys: Sequence[bytes]) -> tuple[dict[int, Answer], int | None]:
        """Messages that were sampled here, by index, and the last that was sampled after exactly the messages before it."""
        answers, former = {}, None
        for index, message in enumerate(history):
            if message["role"] != "assistant":
                continue
            if answer := self._by_history.get(keys[index + 1]):
                former = index
            if answer := answer or self._by_message.get(key(message)):
                answers[index] = answer
        return answers, former

    def _keep(self, before: bytes, message: Mapping[str, Any], answer: Answer) -> None:
        made = plain(message)
        self._by_history[following(before, made)] = answer
        self._by_message[key(made)] = answer
        for way in WAYS:  # where no other answer is written so
            self._by_history.setdefault(following(before, made, way), answer)
            self._by_message.setdefault(key(made, way), answer)


async def _all_of(draws: Sequence[Coroutine[Any, Any, Turn]]) -> list[Turn]:
    """If one fails, the others are cancelled."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(draw) for draw in draws]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


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
