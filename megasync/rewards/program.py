"""The functions of reward workers, made of `rollout.reward`: a call becomes one finite number a sample. No torch in here."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import math
import reprlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

from megasync.data import reasoning_gym as tasks
from megasync.rewards.functions import RewardInput
from megasync.rewards.resolve import Reward, resolve_rewards
from megasync.workers.failure import BadValueError


class Call(NamedTuple):
    """One reward of one sample, or of a list of samples."""

    reward: int  # its index in `rollout.reward`
    samples: list[RewardInput]


def plain_rewards(names: Sequence[str]) -> Callable[[Call], list[float]]:
    """The function of serial workers."""
    rewards = _imported(names)

    def run(call: Call) -> list[float]:
        reward, num_samples = rewards[call.reward], len(call.samples)  # before the function can change the list
        value = _called(reward, call)
        if inspect.isawaitable(value):  # of a function that does not look like an async one
            value = asyncio.run(_wait(value))
        return numbers(value, reward, num_samples)

    return run


def async_rewards(names: Sequence[str]) -> Callable[[Call, Any], Awaitable[list[float]]]:
    """The function of concurrent workers."""
    rewards = _imported(names)

    async def run(call: Call, _: Any) -> list[float]:
        reward, num_samples = rewards[call.reward], len(call.samples)
        return numbers(await _called(reward, call), reward, num_samples)

    return run


def _imported(names: Sequence[str]) -> list[Reward]:
    rewards = resolve_rewards(dict.fromkeys(names, 1.0))
    if "math_verify" in names:
        importlib.import_module("math_verify")  # takes a second, which would count against the first sample's time limit
    if "reasoning_gym" in names:
        tasks.reasoning_gym()  # is fetched if it is missing
    return rewards


def _called(reward: Reward, call: Call) -> Any:
    return reward.function(call.samples if reward.takes_list else call.samples[0])


async def _wait(value: Any) -> Any:
    return await value


def numbers(value: Any, reward: Reward, num_samples: int) -> list[float]:
    """The value of a reward function as one finite number a sample.

    Raises:
        BadValueError: it is something else.
    """
    if not reward.takes_list:
        return [_number(value)]
    try:
        values = None if isinstance(value, str | bytes | dict | set | frozenset) else list(value)
    except TypeError:
        values = None
    if values is None or len(values) != num_samples:
        found = f"{len(values)} values" if values is not None else reprlib.repr(value)
        raise BadValueError(f"returned {found}, a list of {num_samples} numbers is expected")
    return [_number(each) for each in values]


def _number(value: Any) -> float:
    try:
        number = math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise BadValueError(f"returned {reprlib.repr(value)}, a finite number is expected")
    return number
