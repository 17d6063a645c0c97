"""Environments in the Gymnasium manner, played by the model turn by turn: what it says is the action.

Known are Gymnasium's `reset(seed=...)` and `step(action)` with texts, and skyrl-gym's `init(messages)` and `step(action)`. They
run in threads, so that one that waits does not hold others up. With a chat template an observation is a message, without one
its text follows the tokens so far. Leaves out spaces: observations and actions are texts.

    async def episode(task, model):
        return await play(skyrl_gym.make("gsm8k", extras={"reward_spec": {"ground_truth": task.answer}}), task, model)
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megasync.episodes.task import EpisodeLimitError, Result, Task


async def play(environment: Any, task: Task, model: Any) -> Result:
    """The sum of the rewards, up to the end that the environment gives or a limit of the run."""
    total, metrics, talk = 0.0, dict[str, float](), _Talk(task, model)
    try:
        talk.hear(await _begin(environment, task, talk))
        while True:
            action = await talk.say()
            step = await _call(environment.step, action)
            observation, reward, is_over, info = _parts(step)
            total += reward
            metrics |= {name: float(value) for name, value in info.items() if isinstance(value, int | float | bool)}
            if is_over:
                break
            talk.hear(observation)
    except EpisodeLimitError:
        metrics["cut_off"] = 1.0
    finally:
        if callable(close := getattr(environment, "close", None)):
            await _call(close)
    return Result(total, metrics)


class _Talk:
    """What has been said: messages where there is a chat template, else tokens."""

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


async def _begin(environment: Any, task: Task, talk: _Talk) -> Any:
    """The first observation beside the prompt."""
    if callable(init := getattr(environment, "init", None)):  # skyrl-gym's: it may change the messages
        talk.messages = list((await _call(init, talk.messages))[0])
        return ""
    options = {"seed": task.seed} if "seed" in inspect.signature(environment.reset).parameters else {}
    found = await _call(environment.reset, **options)
    return found[0] if isinstance(found, tuple) else found


def _parts(step: Any) -> tuple[Any, float, bool, Mapping[str, Any]]:
    """Observation, reward, whether it is over, and what there is to log."""
    if isinstance(step, Mapping):
        return step["observations"], _number(step["reward"]), bool(step["done"]), step.get("metadata") or {}
    if isinstance(step, Sequence) and len(step) == 5:
        observation, reward, terminated, truncated, info = step
        return observation, _number(reward), bool(terminated or truncated), info or {}
    what = f"a {type(step).__name__} of {len(step)}" if isinstance(step, Sequence) else type(step).__name__
    raise TypeError(f"step gave {what}, expected are (observation, reward, terminated, truncated, info)")


def _number(reward: Any) -> float:
    try:
        return float(reward)
    except (TypeError, ValueError) as error:
        raise TypeError(f"step gave the reward {reward!r:.80}, a number is expected") from error


async def _call(method: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    if inspect.iscoroutinefunction(method):
        return await method(*arguments, **options)
    return await asyncio.to_thread(method, *arguments, **options)
