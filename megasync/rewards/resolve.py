"""`rollout.reward` becomes functions: found by name or imported, and looked at before anything starts. No torch in here.

Of judges only the names are looked up here; judges/ has the rest.

reward = resolve_rewards("exact_match")[0]
rewards = resolve_rewards({"exact_match": 1.0, "my_package.my_module:my_reward": 0.2})
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from megasync.config.errors import ConfigError, nearest_name
from megasync.config.named import IMPORT_PATH, digest_of_module, import_named
from megasync.data.packages import add_packages
from megasync.rewards import functions
from megasync.rewards.functions import exact_match, math_verify, reasoning_gym, token_count

REWARDS: dict[str, Callable[..., Any]] = {
    "exact_match": exact_match,
    "math_verify": math_verify,
    "reasoning_gym": reasoning_gym,
    "token_count": token_count,
}
JUDGE = "judge:"  # before a name in `judges`
PATH_REMEDY = "write rollout.reward=exact_match, or a function as rollout.reward=my_package.my_module:my_reward"
# Whose rewards have a first parameter of this name.
THEIRS = {"completions": "TRL", "prompts": "TRL", "data_source": "verl", "solution_str": "verl"}
LIST = re.compile(r"['\"]?(typing\.|collections\.abc\.)?(list|List|Sequence|Collection|Iterable|tuple|Tuple)\b")  # annotations


@dataclass(frozen=True)
class Reward:
    """One function with its weight."""

    name: str  # as the config has it
    weight: float
    function: Callable[..., Any]
    takes_list: bool  # all samples of a prompt at once
    is_async: bool


def weights(reward: str | Mapping[str, float]) -> dict[str, float]:
    """`rollout.reward` as a mapping of names to weights."""
    return {reward: 1.0} if isinstance(reward, str) else dict(reward)


def resolve_rewards(reward: str | Mapping[str, float]) -> list[Reward]:
    """The functions that `rollout.reward` names, imported if need be, in its order, without judges.

    Raises:
        ConfigError: there is no such function, or it does not take one argument.
    """
    return [_resolve(name, weight) for name, weight in weights(reward).items() if not name.startswith(JUDGE)]


def named_judges(reward: str | Mapping[str, float], judges: Iterable[str]) -> list[str]:
    """The judges that `rollout.reward` names, without `judge:`; `judges`: the declared ones.

    Raises:
        ConfigError: one is not declared.
    """
    names = [name.removeprefix(JUDGE) for name in weights(reward) if name.startswith(JUDGE)]
    for name in names:
        if name not in judges:
            near, choices = nearest_name(name, judges), ", ".join(judges) or "none"
            message = f"rollout.reward = {JUDGE}{name}: there is no such judge"
            remedy = f"declare judges.{name}, with a path or an endpoint; a module named judge needs another name"
            raise ConfigError(message, choices=choices, nearest=near, remedy=remedy)
    return names


def require_packages(
    reward: str | Mapping[str, float], has_module: Callable[[str], object] = find_spec, *, fetches: bool = True
) -> None:
    """Find, or fetch by pip where it `fetches`, the packages that our own functions import.

    Raises:
        ConfigError: a package is missing and cannot be fetched.
    """
    for name in weights(reward):
        if name == "math_verify" and not has_module("math_verify"):
            message = f"rollout.reward = {name}: needs the package math_verify, which is not installed"
            raise ConfigError(message, remedy="pip install math-verify")
        if name == "reasoning_gym" and fetches:
            try:
                add_packages("reasoning_gym")
            except ConfigError as error:
                raise ConfigError(f"rollout.reward = {name}: {error}") from error


def identity(rewards: Sequence[Reward]) -> str:
    """Names, weights, and digests of the files that the functions are in: where it differs, the numbers may."""
    parts = []
    for reward in rewards:
        module = functions.__name__ if reward.name in REWARDS else reward.name.partition(":")[0]
        parts.append((reward.name, reward.weight, digest_of_module(module)))
    return repr(parts)


def _resolve(name: str, weight: float) -> Reward:
    function = REWARDS.get(name) or _import_function(name)
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
    return Reward(name, weight, function, _takes_list(function), is_async)


def _takes_list(function: Callable[..., Any]) -> bool:
    """Whether the first parameter is annotated as a list; the text of the annotation decides, which need not be importable."""
    try:
        first = next(iter(inspect.signature(function).parameters.values()), None)
    except ValueError:  # a function of C that does not tell
        return False
    return first is not None and LIST.match(inspect.formatannotation(first.annotation)) is not None


def _import_function(path: str) -> Callable[..., Any]:
    headline = f"rollout.reward = {path!r}"
    if not IMPORT_PATH.fullmatch(path):
        choices = ", ".join([*REWARDS, f"{JUDGE}NAME", "package.module:function"])
        near = nearest_name(path, REWARDS)
        raise ConfigError(f"{headline}: there is no such reward", choices=choices, nearest=near, remedy=PATH_REMEDY)
    module, function = import_named(path, headline)
    function_name = path.partition(":")[2]
    if function is None:
        problem = f"is not in {module.__file__}"
    elif not callable(function) or inspect.isclass(function):
        problem = "is no function"
    elif inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        problem = "is a generator"
    else:
        problem = _wrong_arguments(function)
    if problem:
        others = [name for name, value in vars(module).items() if inspect.isfunction(value) and name != function_name]
        near = nearest_name(function_name, others)
        remedy = "name a function that takes one RewardInput, or a list of them, and returns a number for each"
        remedy += ", such as docs/your_own.md makes of it" if problem.startswith("is written for") else ""
        raise ConfigError(f"{headline}: {function_name} {problem}", nearest=near, remedy=remedy)
    return function  # type: ignore[no-any-return]


def _wrong_arguments(function: Callable[..., Any]) -> str:
    try:
        signature = inspect.signature(function)
        first = next(iter(signature.parameters.values()), None)
        if first and (project := THEIRS.get(first.name)) and "RewardInput" not in inspect.formatannotation(first.annotation):
            return f"is written for {project}: it takes {', '.join(signature.parameters)}"
        signature.bind("a RewardInput")
    except TypeError as error:
        return f"cannot be called with one argument: {error}"
    except ValueError:  # a function of C that does not tell
        return ""
    return ""
