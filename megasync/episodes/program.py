"""The program of one process of episodes: plays those that the trainer begins, side by side, until it hangs up or dies.

Each step of an episode, from one wait to the next, is noted with its begin, so that the trainer knows which one holds the process
up. Leaves out limits on time and turns, which are the trainer's, and where tokens come from. No torch in here. pool.py starts it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import pickle
import resource
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from megasync.data.prompts import Prompts
from megasync.episodes.chat import Completion, Model, Reply
from megasync.episodes.children import CURRENT, Children, limit_output
from megasync.episodes.environments import CannotGoOnError
from megasync.episodes.messages import MessageError
from megasync.episodes.proxy import Access, Proxy
from megasync.episodes.record import Answers, EnvironmentAnswer
from megasync.episodes.render import renderer_of
from megasync.episodes.resolve import Episode, resolve_episode
from megasync.episodes.segments import Recorder, Turn
from megasync.episodes.task import EpisodeLimitError, Result
from megasync.episodes.tokens import Tokens
from megasync.episodes.tool_clock import ASKING, CLOCK, ToolClock
from megasync.episodes.wire import Anew, Answered, Ask, Begin, Cancel, Drop, Ended, Held, Settings, Told
from megasync.hf.folder import read_json_object
from megasync.rewards.program import BadValueError, Steps, begin, failure_of, note, noted, text_of
from megasync.rewards.wire import LENGTH, Failure, Ready, Setup, pack

MOST_PRINTED_BYTES = 16 << 10
STACK_BYTES = 2 << 20  # of a thread; the system's 8 MiB, times hundreds, would be most of a limit on memory
MOST_INFO_CHARACTERS = 100_000
STEP_SECONDS = 0.1  # a step that takes longer is told
TICK_SECONDS = 0.25  # a note at least so often, while nothing holds the process up


def main(fields: list[Any]) -> None:
    """`fields` are those of a Setup."""
    setup = Setup(*fields)
    if (connection := begin(setup)) is None:
        return
    limit_output(MOST_PRINTED_BYTES)
    try:
        play = resolve_episode(setup.names[0])
    except BaseException as error:  # noqa: BLE001 # told below
        connection.sendall(pack(Ready(text_of(error))))
        return
    asyncio.run(Program(connection, play, setup.notes).run())


class NumberedTurn(Turn):
    """As the trainer numbered it."""

    __slots__ = ("number",)
    number: int


class Kept(Recorder):
    """Notes which turns are kept; the trainer has their tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers: list[int] = []

    def add(self, prompt_ids: Sequence[int] | Any, turn: Turn) -> None:
        assert isinstance(turn, NumberedTurn)
        if turn.number >= 0:
            self.numbers.append(turn.number)


class PlainRenderer:
    """Of a tokenizer without a chat template: tokens alone."""

    def __init__(self, tokens: Tokens) -> None:
        self.tokens = tokens

    def _refuse(self, *_: Any) -> Any:
        raise MessageError("the tokenizer has no chat template: use model.complete, or take a model with one")

    prompt = begin = with_arguments = read = _refuse


class EpisodeModel(Model):
    """With the tokenizer at hand, and a way to programs that speak HTTP."""

    def __init__(self, program: Program, given: Begin, recorder: Recorder) -> None:
        asker = Asker(program, given.number)
        super().__init__(asker, program.renderer, recorder)
        self._program, self._clock = program, CLOCK.get()

        def send(place: int, answer: EnvironmentAnswer, state: Any, is_other: bool) -> None:
            program.send(Answered(given.number, place, answer, state, is_other))

        self.answers = Answers(given.answers, given.state, lambda: asker.num_turns, send)

    async def complete(self, ids: Sequence[int], *, max_new_tokens: int | None = None, stop: Sequence[str] = ()) -> Completion:
        with self._clock.during(ASKING):
            return await super().complete(ids, max_new_tokens=max_new_tokens, stop=stop)

    async def reply(self, *arguments: Any, **options: Any) -> Reply:
        with self._clock.during(ASKING):
            return await super().reply(*arguments, **options)

    @property
    def has_template(self) -> bool:
        return not isinstance(self.renderer, PlainRenderer)

    @contextlib.asynccontextmanager
    async def serve(self) -> AsyncIterator[Access]:
        """Where programs that speak OpenAI's or Anthropic's protocol find this model, on the loopback, until the block ends."""
        with (await self._program.proxy()).episode(self) as access:
            yield access

    def encode(self, text: str) -> list[int]:
        """A text that the model did not sample, such as a tool's answer; nothing is added around it."""
        return self.renderer.tokens.encode(text)


class Asker:
    """The sampler of one episode: asks the trainer."""

    def __init__(self, program: Program, number: int) -> None:
        self.program, self.number, self.num_turns = program, number, 0

    async def __call__(self, prompt_ids: Sequence[int], *, max_new_tokens: int | None = None, stop: Sequence[str] = ()) -> Turn:
        if not len(prompt_ids):
            raise ValueError("there are no tokens that a turn could go on from")
        turn, answer = self.num_turns, asyncio.get_running_loop().create_future()
        self.num_turns += 1
        self.program.asked[self.number, turn] = answer
        self.program.send(Ask(self.number, turn, np.asarray(prompt_ids, np.int32), max_new_tokens, tuple(stop)))
        try:
            told: Told = await answer
        except asyncio.CancelledError:
            self.program.send(Drop(self.number, turn))
            raise
        finally:
            del self.program.asked[self.number, turn]
        if told.limit:
            raise EpisodeLimitError(told.limit)
        if told.problem:
            raise ValueError(f"a turn was refused: {told.problem}")
        made = NumberedTurn(told.token_ids, told.log_probs, told.weight_versions, told.finish_reason)
        object.__setattr__(made, "number", turn)
        return made


class Program:
    """Begins and cancels episodes, and brings them what the trainer tells."""

    def __init__(self, connection: socket.socket, play: Episode, notes: int) -> None:
        self.connection, self.play, self.notes = connection, play, notes
        self.asked: dict[tuple[int, int], asyncio.Future[Told]] = {}
        self.tasks: dict[int, asyncio.Task[None]] = {}
        self.children = Children()
        self.renderer: Any = None
        self._proxy: asyncio.Task[Proxy] | None = None

    async def proxy(self) -> Proxy:
        """One for all episodes of the process, started by the first that wants it."""
        if self._proxy is None:
            self._proxy = asyncio.get_running_loop().create_task(Proxy.start())
        return await asyncio.shield(self._proxy)

    async def run(self) -> None:
        """Until the trainer hangs up."""
        self.reader, self.writer = await asyncio.open_unix_connection(sock=self.connection)
        settings = await self._read()
        if not isinstance(settings, Settings):
            return
        try:
            self._set_up(settings)
        except BaseException as error:  # noqa: BLE001 # told below
            self.send(Ready(text_of(error)))
            await self.writer.drain()
            return
        self.send(Ready())
        self._tick()
        while (message := await self._read()) is not None:
            if isinstance(message, Begin):
                self.tasks[message.number] = asyncio.get_running_loop().create_task(self._episode(message))
            elif isinstance(message, Cancel) and message.number in self.tasks:
                self.tasks[message.number].cancel()
            elif isinstance(message, Told):
                answer = self.asked.get((message.number, message.turn))
                if answer is not None and not answer.done():
                    answer.set_result(message)

    def _set_up(self, settings: Settings) -> None:
        prompts = Prompts(settings.model_path, settings.data, has_turns=True)
        tokens = Tokens(prompts.tokenizer, prompts.stop_token_ids)
        threading.stack_size(STACK_BYTES)
        threads = ThreadPoolExecutor(settings.concurrency, "episode")  # asyncio's own are a few more than there are cores
        asyncio.get_running_loop().set_default_executor(threads)
        arguments, model_type = settings.data.chat_template_arguments, _model_type(settings.model_path)
        has_template = bool(prompts.tokenizer.chat_template)
        self.renderer = renderer_of(tokens, model_type, arguments) if has_template else PlainRenderer(tokens)
        if settings.memory_bytes is not None:
            resource.setrlimit(resource.RLIMIT_AS, (settings.memory_bytes,) * 2)
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)  # the system's for a process at its start is often 1024
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(settings.open_files, most),) * 2)

    def _tick(self) -> None:
        note(self.notes, 0)
        asyncio.get_running_loop().call_later(TICK_SECONDS, self._tick)

    @contextlib.contextmanager
    def _step(self, number: int) -> Iterator[None]:
        begin = time.monotonic()
        try:
            with noted(self.notes, number + 1), self.children.of(number):
                yield
        finally:
            if (seconds := time.monotonic() - begin) > STEP_SECONDS:
                self.send(Held(number, seconds))

    def send(self, message: tuple[Any, ...]) -> None:
        self.writer.write(pack(message))

    async def _read(self) -> Any:
        try:
            header = await self.reader.readexactly(LENGTH.size)
            return pickle.loads(await self.reader.readexactly(*LENGTH.unpack(header)))  # noqa: S301 # the trainer's
        except (asyncio.IncompleteReadError, ConnectionError):
            return None

    def _play(self, given: Begin, kept: Kept) -> Awaitable[Any]:
        return Steps(self.play(given.task, EpisodeModel(self, given, kept)), lambda: self._step(given.number))

    async def _episode(self, given: Begin) -> None:
        CURRENT.set(given.number)
        CLOCK.set(clock := ToolClock())
        kept = Kept()
        try:
            try:
                value = await self._play(given, kept)
            except CannotGoOnError:
                self.send(Anew(given.number))
                kept, given = Kept(), Begin(given.number, given.task)
                value = await self._play(given, kept)
            is_cut_off = isinstance(value, Result) and value.is_cut_off
            ended = Ended(given.number, tuple(kept.numbers), *_result(value), is_cut_off=is_cut_off)
        except EpisodeLimitError as error:
            ended = Ended(given.number, tuple(kept.numbers), limit=str(error))
        except BaseException as error:  # noqa: BLE001 # the user's, told to the trainer
            cancelled = Failure("was cancelled") if isinstance(error, asyncio.CancelledError) else failure_of(error)
            ended = Ended(given.number, failure=cancelled)
        del self.tasks[given.number]
        self.children.end(given.number)
        if not self.tasks:
            self.children.end_all()
        self.send(ended._replace(tool_seconds=clock.seconds))


def _result(value: Any) -> tuple[float | None, dict[str, float], dict[str, Any]]:
    """Reward, metrics and what there is to show of them.

    Raises:
        BadValueError: it is none of what an episode may return.
    """
    if value is None:
        return None, {}, {}
    result = value if isinstance(value, Result) else Result(value)
    told: list[tuple[Any, str]] = [(result.metrics, "metrics"), (result.info, "info")]
    for given, expected in told:
        if not isinstance(given, Mapping):
            of_what = "a mapping of names to numbers" if expected == "metrics" else "a mapping"
            raise BadValueError(f"returned {expected} of type {type(given).__name__}, {of_what} is expected")
    numbers: dict[str, Any] = dict(result.metrics)
    if result.reward is not None:
        numbers[""] = result.reward
    for name, number in numbers.items():
        is_number = isinstance(number, int | float | np.number) or getattr(number, "ndim", 1) == 0
        if not is_number or not math.isfinite(float(number)):
            what = f"the metric {name} = " if name else ""
            raise BadValueError(f"returned {what}{number!r:.80}, a finite number is expected")
    reward = None if result.reward is None else float(result.reward)
    return reward, {str(name): float(number) for name, number in numbers.items() if name != ""}, _shown(result.info)


def _shown(info: Mapping[str, Any]) -> dict[str, Any]:
    """As JSON proper, in UTF-8: None in the place of NaN and infinities, ? in that of half a surrogate pair."""
    text = json.dumps(dict(info), default=str, ensure_ascii=False).encode(errors="replace").decode()
    if len(text) > MOST_INFO_CHARACTERS:
        return {"too_long": text[:MOST_INFO_CHARACTERS]}
    return dict(json.loads(text, parse_constant=lambda _: None))


def _model_type(folder: str) -> str:
    path = Path(folder) / "config.json"
    return str(read_json_object(path).get("model_type", "")) if path.is_file() else ""
