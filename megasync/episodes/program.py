"""The function of episode workers: plays one episode, with the tokenizer at hand. The trainer samples turns. No torch in here.

Leaves out processes and limits on time (workers/), limits on turns, and where tokens come from (rollouts/).
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import math
import resource
import threading
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerFast as _PreTrainedTokenizerFast  # noqa: F401 # takes seconds: once for all forks

from megasync.config.data_section import TURN_REWARDS
from megasync.data.prompts import Prompts
from megasync.episodes.chat import Completion, Model, Reply
from megasync.episodes.environments import CannotResumeError
from megasync.episodes.exchange import Answered, Ask, EpisodeEnd, Play, RestartEpisode, Sampled, Settings, ToolTime
from megasync.episodes.messages import MessageError
from megasync.episodes.output import limit_output
from megasync.episodes.proxy import Access, Proxy
from megasync.episodes.record import Answers, EnvironmentAnswer
from megasync.episodes.render import renderer_of
from megasync.episodes.resolve import resolve_episode
from megasync.episodes.segments import Recorder, Turn
from megasync.episodes.task import EpisodeLimitError, Result
from megasync.episodes.tokens import Tokens
from megasync.episodes.tool_clock import ASKING, CLOCK, ToolClock
from megasync.models.folder import read_json_object
from megasync.workers.failure import BadValueError
from megasync.workers.job import MAX_LATE
from megasync.workers.program import Caller

MAX_PRINTED_BYTES = 16 << 10
STACK_BYTES = 2 << 20  # of a thread; the system's 8 MiB, times hundreds, would be most of a limit on memory
MAX_INFO_CHARACTERS = 100_000


class Player:
    """Plays the episodes of one worker. The target of workers/protocol.py; made in the worker's event loop."""

    def __init__(self, settings: Settings) -> None:
        limit_output(MAX_PRINTED_BYTES)
        self.play, self.credits_turns = resolve_episode(settings.episode), settings.credits_turns
        prompts = Prompts(settings.model_path, settings.data, has_turns=True)
        tokens = Tokens(prompts.tokenizer, prompts.stop_token_ids)
        threading.stack_size(STACK_BYTES)
        num_threads = settings.concurrency + MAX_LATE  # one for each episode, also beside those of late ones that hang
        threads = ThreadPoolExecutor(num_threads, "episode")  # asyncio's own are a few more than there are cores
        asyncio.get_running_loop().set_default_executor(threads)
        arguments, model_type = settings.data.chat_template_arguments, _model_type(settings.model_path)
        has_template = bool(prompts.tokenizer.chat_template)
        self.renderer = renderer_of(tokens, model_type, arguments) if has_template else PlainRenderer(tokens)
        if settings.memory_bytes is not None:
            resource.setrlimit(resource.RLIMIT_AS, (settings.memory_bytes,) * 2)
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)  # the system's for a process at its start is often 1024
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(settings.open_files, most),) * 2)
        self._proxy: asyncio.Task[Proxy] | None = None

    async def __call__(self, given: Play, caller: Caller) -> EpisodeEnd:
        CLOCK.set(clock := ToolClock())
        untouched = copy.deepcopy(given.task) if given.answers else given.task  # an environment may change the line's columns
        try:
            try:
                return await self._end_of(given, caller)
            except CannotResumeError:
                caller.post(RestartEpisode())
                return await self._end_of(Play(untouched), caller)
        finally:
            caller.post(ToolTime(clock.seconds))

    async def _end_of(self, given: Play, caller: Caller) -> EpisodeEnd:
        recorder = TurnRecorder()
        try:
            value = await self.play(given.task, EpisodeModel(self, given, caller, recorder))
        except BaseException as error:
            if not (limit := _limit(error)):
                raise
            return EpisodeEnd(tuple(recorder.numbers), limit=limit)
        is_cut_off = isinstance(value, Result) and value.is_cut_off
        rewards = _turn_rewards(value, len(recorder.numbers), credits_turns=self.credits_turns)
        return EpisodeEnd(tuple(recorder.numbers), *_result(value, rewards), is_cut_off=is_cut_off, turn_rewards=rewards)

    async def proxy(self) -> Proxy:
        """One for all episodes of the worker, started by the first that wants it."""
        if self._proxy is None:
            self._proxy = asyncio.get_running_loop().create_task(Proxy.start())
        return await asyncio.shield(self._proxy)


@dataclass(frozen=True, slots=True, eq=False)
class NumberedTurn(Turn):
    number: int = -1


class TurnRecorder(Recorder):
    """Notes which turns are trained; the trainer has their tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers: list[int] = []

    def add(self, prompt_ids: Sequence[int] | Any, turn: Turn) -> None:
        assert isinstance(turn, NumberedTurn)
        self.numbers.append(turn.number)


class PlainRenderer:
    """Renderer of a tokenizer without a chat template: tokens alone."""

    def __init__(self, tokens: Tokens) -> None:
        self.tokens = tokens

    def _refuse(self, *_: Any) -> Any:
        raise MessageError("the tokenizer has no chat template: use model.complete, or take a model with one")

    prompt = begin = with_arguments = read = _refuse


class EpisodeModel(Model):
    """The model of an episode, with its tokenizer, and an address for programs that speak HTTP."""

    def __init__(self, player: Player, given: Play, caller: Caller, recorder: Recorder) -> None:
        asker = Asker(caller)
        super().__init__(asker, player.renderer, recorder)
        self._player, self._clock = player, CLOCK.get()

        def send(place: int, answer: EnvironmentAnswer, state: Any, is_other: bool) -> None:
            caller.post(Answered(place, answer, state, is_other))

        self.answers = Answers(given.answers, given.state, lambda: asker.num_turns, send)

    async def complete(self, ids: Sequence[int], *, max_new_tokens: int | None = None, stop: Sequence[str] = ()) -> Completion:
        with self._clock.during(ASKING):
            return await super().complete(ids, max_new_tokens=max_new_tokens, stop=stop)

    async def replies(self, *arguments: Any, **options: Any) -> list[Reply]:
        with self._clock.during(ASKING):
            return await super().replies(*arguments, **options)

    @property
    def has_template(self) -> bool:
        return not isinstance(self.renderer, PlainRenderer)

    @contextlib.asynccontextmanager
    async def serve(self) -> AsyncIterator[Access]:
        """The address of this model, on the loopback, for programs that speak OpenAI's or Anthropic's protocol.

        An error that leaves the block ends the episode at the limit for which its last request was refused, if there is one.
        """
        with (await self._player.proxy()).episode(self) as access:
            try:
                yield access
            except Exception as error:
                if access.limit:
                    error.episode_limit = access.limit  # type: ignore[attr-defined] # an episode may still catch its client's error
                raise

    def encode(self, text: str) -> list[int]:
        """A text that the model did not sample, such as a tool's answer; nothing is added around it."""
        return self.renderer.tokens.encode(text)


class Asker:
    """The sampler of one episode: asks the trainer."""

    def __init__(self, caller: Caller) -> None:
        self.caller, self.num_turns = caller, 0

    async def __call__(self, prompt_ids: Sequence[int], *, max_new_tokens: int | None = None, stop: Sequence[str] = ()) -> Turn:
        if not len(prompt_ids):
            raise ValueError("there are no tokens for a turn to continue")
        turn, self.num_turns = self.num_turns, self.num_turns + 1
        ask = Ask(self.caller.number, turn, np.asarray(prompt_ids, np.int32), max_new_tokens, tuple(stop))
        sampled: Sampled = await self.caller.request(ask)
        if sampled.limit:
            raise EpisodeLimitError(sampled.limit)
        if sampled.problem:
            raise ValueError(f"a turn was refused: {sampled.problem}")
        arrays = sampled.token_ids, sampled.log_probs, sampled.weight_versions
        return NumberedTurn(*arrays, sampled.finish_reason, number=turn)


def _limit(error: BaseException) -> str:
    """The limit that the error stands for, also within an exception group; empty if it is another error."""
    if limit := getattr(error, "episode_limit", ""):  # of EpisodeModel.serve
        return str(limit)
    if isinstance(error, BaseExceptionGroup):
        limits = [_limit(each) for each in error.exceptions]
        return limits[0] if all(limits) else ""
    return str(error) if isinstance(error, EpisodeLimitError) else ""


def _turn_rewards(value: Any, num_turns: int, *, credits_turns: bool) -> tuple[float, ...]:
    """The turns' rewards in an episode's return value; empty where it has none, or has wrong ones that are not needed.

    Raises:
        BadValueError: there is not one for each turn, or the reward is another number than their sum.
    """
    if not isinstance(value, Result) or value.turn_rewards is None:
        return ()
    if isinstance(value.turn_rewards, Mapping) or not isinstance(value.turn_rewards, Iterable):
        raise BadValueError(f"returned turn_rewards of type {type(value.turn_rewards).__name__}, a list of numbers is expected")
    found = tuple(_finite(reward, "a turn's reward ") for reward in value.turn_rewards)
    total, problem = math.fsum(found), ""
    if len(found) != num_turns:
        problem = f"returned {len(found)} turn_rewards for {num_turns} turns, one for each is expected"
    elif value.reward is not None and not math.isclose(_finite(value.reward, ""), total, rel_tol=1e-6, abs_tol=1e-6):
        problem = f"returned the reward {value.reward!r} beside turn_rewards of {total!r} in all, their sum or None is expected"
    if problem and (credits_turns or value.reward is None):
        raise BadValueError(problem)
    return () if problem else found


def _result(value: Any, turn_rewards: tuple[float, ...]) -> tuple[float | None, dict[str, float], dict[str, Any]]:
    """Reward, metrics and info of an episode's return value.

    Raises:
        BadValueError: an episode may not return that.
    """
    if value is None:
        return None, {}, {}
    result = value if isinstance(value, Result) else Result(value)
    fields: list[tuple[Any, str, str]] = [
        (result.metrics, "metrics", "a mapping of names to numbers"),
        (result.info, "info", "a mapping"),
    ]
    for given, name, expected in fields:
        if not isinstance(given, Mapping):
            raise BadValueError(f"returned {name} of type {type(given).__name__}, {expected} is expected")
    own = math.fsum(turn_rewards) if result.reward is None and result.turn_rewards is not None else result.reward
    reward = None if own is None else _finite(own, "")
    metrics = {str(name): _finite(number, f"the metric {name} = ") for name, number in result.metrics.items()}
    info = {TURN_REWARDS: turn_rewards} if turn_rewards else {}
    return reward, metrics, _json({**info, **result.info})


def _finite(number: Any, prefix: str) -> float:
    is_number = isinstance(number, int | float | np.number) or getattr(number, "ndim", 1) == 0
    if not is_number or not math.isfinite(float(number)):
        raise BadValueError(f"returned {prefix}{number!r:.80}, a finite number is expected")
    return float(number)


def _json(info: Mapping[str, Any]) -> dict[str, Any]:
    """`info` as strict JSON in UTF-8: NaN and infinities become None, half of a surrogate pair becomes a question mark."""
    text = json.dumps(dict(info), default=str, ensure_ascii=False).encode(errors="replace").decode()
    if len(text) > MAX_INFO_CHARACTERS:
        return {"too_long": text[:MAX_INFO_CHARACTERS]}
    return dict(json.loads(text, parse_constant=lambda _: None))


def _model_type(folder: str) -> str:
    path = Path(folder) / "config.json"
    return str(read_json_object(path).get("model_type", "")) if path.is_file() else ""
