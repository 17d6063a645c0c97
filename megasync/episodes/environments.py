"""Environments in the Gymnasium manner, played by the model turn by turn: its message is the action.

Known are Gymnasium's `reset(seed=...)` and `step(action)` with texts, and skyrl-gym's `init(messages)` and `step(action)`. They
run in threads, so that one that waits does not hold others up. With a chat template an observation is a message, without one
its text follows the tokens so far. One that has `state()` and `set_state(state)`, of values as JSON has them, resumes after
a kill. Leaves out spaces: observations and actions are texts.

    async def episode(task, model):
        return await play(skyrl_gym.make("gsm8k", extras={"reward_spec": {"ground_truth": task.answer}}), task, model)
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any

from megasync.config.data_section import TURN_REWARDS
from megasync.episodes.record import Answers, as_json
from megasync.episodes.task import EpisodeLimitError, Result, Task
from megasync.episodes.tool_clock import call_tool


class CannotResumeError(RuntimeError):
    """An environment without a kept state gave other answers to its former actions: the episode has to start again."""


async def play(environment: Any, task: Task, model: Any) -> Result:
    """The rewards of turns and their sum, up to the end that the environment gives or a limit of the run, which cuts it off."""
    rewards, metrics, talk, is_cut_off = list[float](), dict[str, float](), _Talk(task, model), False
    kept = _Recorded(environment, task, getattr(model, "answers", None) or Answers())
    try:
        await kept.begin(talk)
        while True:
            observation, reward, is_over, info = await kept.step(await talk.say())
            rewards.append(reward)
            metrics |= info
            if is_over:
                break
            talk.hear(observation)
    except EpisodeLimitError:
        is_cut_off = True
    else:
        if callable(of_whole := getattr(environment, "get_metrics", None)):  # skyrl-gym's
            metrics |= _numbers(await call_tool(of_whole))
    finally:
        if callable(close := getattr(environment, "close", None)):
            await call_tool(close)
    return Result(math.fsum(rewards), metrics, {TURN_REWARDS: rewards}, is_cut_off, rewards)


class _Recorded:
    """An environment whose answers are kept. Those of a checkpoint come without it; then it is brought to where it was.

    `set_state` sets the result of its `state()` after the last of them, if it has both; else it starts and takes the same
    actions again, and has to answer the same.
    """

    def __init__(self, environment: Any, task: Task, answers: Answers) -> None:
        self.environment, self.task, self.answers = environment, task, answers
        self.has_state = callable(getattr(environment, "state", None)) and callable(getattr(environment, "set_state", None))
        self.former: list[tuple[str, Any, Any]] = []  # questions with their answers, in which the environment had no part

    async def begin(self, talk: _Talk) -> None:
        """Begin the talk with the first observation beside the prompt."""
        if callable(getattr(self.environment, "init", None)):  # skyrl-gym's: it may change the messages
            talk.messages = list(await self._ask("init", talk.messages))
        else:
            talk.hear(await self._ask("reset", self.task.seed))

    async def step(self, action: str) -> tuple[Any, float, bool, dict[str, float]]:
        """Observation, reward, whether it is over, and the numbers that there are to log."""
        observation, reward, is_over, info = await self._ask("step", action)
        return observation, reward, is_over, info

    async def _ask(self, what: str, asked: Any) -> Any:
        place, former = self.answers.next(what, asked)
        if former is not None:
            self.former.append((what, asked, former.value))
            if not self.answers.has_more:
                await self._catch_up()
            return former.value
        if self.former:
            await self._catch_up()
        value = await self._do(what, asked)
        self.answers.keep(place, what, asked, value, await self._state())
        return value

    async def _state(self) -> Any:
        if not self.has_state:
            return None
        state, is_json = as_json(found := await call_tool(self.environment.state), keeps_keys=False)
        if not is_json:
            raise TypeError(f"state() gave {found!r:.80}, a value that JSON has is expected, of 1 MB at most")
        return state

    async def _catch_up(self) -> None:
        former, self.former = self.former, []
        if self.has_state and self.answers.state is not None:
            await call_tool(self.environment.set_state, self.answers.state)
            return
        for what, asked, value in former:
            if as_json(await self._do(what, asked))[0] != value:
                raise CannotResumeError

    async def _do(self, what: str, asked: Any) -> Any:
        if what == "init":
            return list((await call_tool(self.environment.init, asked))[0])
        if what == "step":
            return _parts(await call_tool(self.environment.step, asked))
        options = {"seed": asked} if "seed" in inspect.signature(self.environment.reset).parameters else {}
        found = await call_tool(self.environment.reset, **options)
        return found[0] if isinstance(found, tuple) else found


class _Talk:
    """The conversation: messages if there is a chat template, else tokens."""

    def __init__(self, task: Task, model: Any) -> None:
        self.model, self.ids = model, list(task.prompt_ids)
        turns = task.turns or (("user", task.prompt),)
        self.messages: list[Any] = [{"role": role, "content": content} for role, content in turns]

    def hear(self, observation: Any) -> None:
        """A text, or messages; empty: nothing new."""
        if isinstance(observation, str):
            observation = [{"role": "user", "content": observation}] if observation else []
        if self.model.has_template:
            self.messages += observation
        else:
            self.ids += self.model.encode("".join(message["content"] for message in observation))

    async def say(self) -> str:
        if not self.model.has_template:
            completion = await self.model.complete(self.ids)
            self.ids += completion.token_ids
            return str(completion.text)
        message = await self.model.chat(self.messages)
        self.messages.append(message)
        return str(message.content)


def _parts(step: Any) -> tuple[Any, float, bool, dict[str, float]]:
    """Observation, reward, whether it is over, and the numbers that there are to log."""
    if isinstance(step, Mapping):
        observation, reward, is_over, info = step["observations"], step["reward"], step["done"], step.get("metadata")
    elif isinstance(step, Sequence) and len(step) == 5:
        observation, reward, terminated, truncated, info = step
        is_over = terminated or truncated
    else:
        what = f"a {type(step).__name__} of {len(step)}" if isinstance(step, Sequence) else type(step).__name__
        raise TypeError(f"step gave {what}, expected are (observation, reward, terminated, truncated, info)")
    return observation, _number(reward), bool(is_over), _numbers(info or {})


def _numbers(info: Mapping[Any, Any]) -> dict[str, float]:
    """The finite numbers in it, also numpy's and tensors without dimensions."""
    numbers = {}
    for name, value in info.items():
        with contextlib.suppress(Exception):  # whatever an object of the user's raises
            number = value.item() if getattr(value, "ndim", 1) == 0 else value
            if isinstance(number, int | float):
                numbers[str(name)] = float(number)
    return {name: number for name, number in numbers.items() if math.isfinite(number)}


def _number(reward: Any) -> float:
    try:
        return float(reward)
    except (TypeError, ValueError) as error:
        raise TypeError(f"step gave the reward {reward!r:.80}, a number is expected") from error
