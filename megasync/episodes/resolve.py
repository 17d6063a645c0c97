"""`rollout.episode` becomes a function: imported, and looked at before anything starts.

Leaves out how it is called (program.py). No torch in here.

    play = resolve_episode("my_package.my_module:episode")
    played = await play(task, model)
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from typing import Any

from megasync.config.errors import ConfigError, nearest_name
from megasync.config.named import IMPORT_PATH, digest_of_module, import_named
from megasync.episodes.environments import play

Episode = Callable[[Any, Any], Awaitable[Any]]
REMEDY = "write rollout.episode=package.module:name, of an async function of (task, model) or a class with reset and step"


def resolve_episode(path: str) -> Episode:
    """The function that plays an episode; an environment class is played turn by turn (environments.py).

    Raises:
        ConfigError: there is none of that name, or it cannot play.
    """
    headline = f"rollout.episode = {path!r}"
    if not IMPORT_PATH.fullmatch(path):
        raise ConfigError(f"{headline}: is not the name of an episode", remedy=REMEDY)
    module, found = import_named(path, headline)
    name = path.partition(":")[2]
    if problem := _problem(found, module):
        others = [other for other, value in vars(module).items() if callable(value) and other != name]
        near = nearest_name(name, others)
        raise ConfigError(f"{headline}: {name} {problem}", nearest=near, remedy=REMEDY)
    return _of_class(found) if inspect.isclass(found) else found


def identity(path: str) -> str:
    """The name, and a digest of the file that it is in: where it differs, episodes may."""
    return f"{path} {digest_of_module(path.partition(':')[0])}"


def _problem(found: Any, module: Any) -> str:
    if found is None:
        return f"is not in {module.__file__}"
    if inspect.isclass(found):
        return _problem_of_class(found)
    if not (inspect.iscoroutinefunction(found) or inspect.iscoroutinefunction(type(found).__call__ if callable(found) else None)):
        return "is no async function"
    try:
        inspect.signature(found).bind("task", "model")
    except TypeError as error:
        return f"cannot be called with a task and a model: {error}"
    return ""


def _problem_of_class(found: Any) -> str:
    has_begin = callable(getattr(found, "reset", None)) or callable(getattr(found, "init", None))
    if not has_begin or not callable(getattr(found, "step", None)):
        return "has no methods reset and step"
    try:
        inspect.signature(found).bind(*["task"] * _takes_task(found))
    except TypeError as error:
        return f"cannot be made with a task: {error}"
    return ""


def _takes_task(environment: Any) -> bool:
    """Whether it is made with the task. One whose arguments all have defaults is not, unless the first is called `task`."""
    given = list(inspect.signature(environment).parameters.values())
    positional = [each for each in given if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    return bool(positional) and (positional[0].default is inspect.Parameter.empty or positional[0].name == "task")


def _of_class(environment: Any) -> Episode:
    takes_task = _takes_task(environment)

    async def episode(task: Any, model: Any) -> Any:
        return await play(environment(task) if takes_task else environment(), task, model)

    return episode
