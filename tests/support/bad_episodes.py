"""Episodes with one mistake each, by the prompt of their task: test_bad_inputs.py has their messages."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from megasync.episodes.environments import play
from megasync.episodes.task import Result, Task
from examples.clients import openai_client

QUESTION: list[Any] = [{"role": "user", "content": "6 * 7?"}]
NAMELESS: Any = {"type": "function", "function": {"description": "Adds."}}


async def returns(value: Any) -> Any:
    return value


async def raises(error: BaseException) -> Any:
    raise error


class Environment:
    """Whose step gives `given`."""

    def __init__(self, given: Any) -> None:
        self.given = given

    def reset(self) -> str:
        return ""

    def step(self, action: str) -> Any:
        return self.given


def talk(*messages: Any) -> list[Any]:
    return [*QUESTION, *messages]


async def over_http(model: Any, **options: Any) -> Any:
    async with model.serve() as access:
        client = openai_client().with_options(base_url=access.openai_url, api_key=access.key)
        await client.chat.completions.create(**{"model": "policy", "messages": QUESTION, **options})


Kind = Callable[[Any, Task], Awaitable[Any]]
KINDS: dict[str, Kind] = {
    "text": lambda model, task: returns("good"),
    "nan": lambda model, task: returns(float("nan")),
    "infinite": lambda model, task: returns(float("inf")),
    "list": lambda model, task: returns([1.0, 0.0]),
    "dict": lambda model, task: returns({"reward": 1.0}),
    "message": lambda model, task: model.chat(QUESTION),
    "metric_text": lambda model, task: returns(Result(1.0, {"calls": "two"})),  # type: ignore[dict-item]
    "metric_nan": lambda model, task: returns(Result(1.0, {"calls": float("nan")})),
    "metrics_list": lambda model, task: returns(Result(1.0, ["calls"])),  # type: ignore[arg-type]
    "info_text": lambda model, task: returns(Result(1.0, {}, "said")),  # type: ignore[arg-type]
    "turn_rewards": lambda model, task: returns(Result(None, turn_rewards=[1.0, 0.5])),
    "turn_text": lambda model, task: returns(Result(None, turn_rewards=["much"])),  # type: ignore[list-item]
    "raises": lambda model, task: raises(ZeroDivisionError("on purpose")),
    "system_exit": lambda model, task: raises(SystemExit(3)),
    "missing_module": lambda model, task: raises(ModuleNotFoundError("No module named 'my_tools'")),
    "no_messages": lambda model, task: model.chat([]),
    "messages_text": lambda model, task: model.chat("6 * 7?"),
    "no_role": lambda model, task: model.chat([{"content": "6 * 7?"}]),
    "unknown_role": lambda model, task: model.chat(talk({"role": "robot", "content": "42"})),
    "content_number": lambda model, task: model.chat([{"role": "user", "content": 42}]),
    "image": lambda model, task: model.chat([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]),
    "call_text": lambda model, task: model.chat(talk({"role": "assistant", "tool_calls": ["add(1, 2)"]})),
    "call_nameless": lambda model, task: model.chat(talk({"role": "assistant", "tool_calls": [{"function": {}}]})),
    "tool_nameless": lambda model, task: model.chat(QUESTION, tools=[NAMELESS]),
    "tool_text": lambda model, task: model.chat(QUESTION, tools=["add"]),
    "tool_function": lambda model, task: model.chat(QUESTION, tools=[print]),
    "tool_schema": lambda model, task: model.chat(QUESTION, tools=[{"name": "add", "parameters": "two numbers"}]),
    "no_ids": lambda model, task: model.complete([]),
    "ids_text": lambda model, task: model.complete("6 * 7?"),
    "ids_numbers": lambda model, task: model.complete([1.5, 2.0]),
    "ids_negative": lambda model, task: model.complete([-1]),
    "ids_unknown": lambda model, task: model.complete([10**6]),
    "ids_huge": lambda model, task: model.complete([10**12]),
    "no_new_tokens": lambda model, task: model.complete(task.prompt_ids, max_new_tokens=0),
    "new_tokens_text": lambda model, task: model.chat(QUESTION, max_tokens="many"),
    "stop_number": lambda model, task: model.complete(task.prompt_ids, stop=[7]),
    "tool_stops": lambda model, task: model.call(next, iter(())),
    "step_two": lambda model, task: play(Environment(("x", 1.0)), task, model),
    "step_reward": lambda model, task: play(Environment(("x", "much", True, False, {})), task, model),
    "step_nothing": lambda model, task: play(Environment(None), task, model),
    "http_messages": lambda model, task: over_http(model, messages=[{"content": "?"}]),
    "http_format": lambda model, task: over_http(model, response_format={"type": "json_object"}),
    "http_limit": lambda model, task: over_http(model, max_tokens=-1),
}


async def episode(task: Task, model: Any) -> Any:
    return await KINDS[task.prompt](model, task)


async def too_many(task: Task, model: Any, more: Any) -> float:
    return 0.0


async def by_name(*, task: Task, model: Any) -> float:
    return 0.0


async def yields(task: Task, model: Any) -> Any:
    yield 0.0


class NoReset:
    def step(self, action: str) -> Any:
        return action


class TwoArguments:
    """That are not the task."""

    def __init__(self, task: Task, folder: str) -> None:
        self.folder = folder

    def reset(self) -> str:
        return ""

    def step(self, action: str) -> Any:
        return action


