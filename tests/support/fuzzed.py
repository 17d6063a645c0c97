"""Episodes of whole runs under random kills (tests/fuzz_runs.py): each reward follows from its line of samples.jsonl.

Two turns, with two tools at once between them, each of which leaves a program behind that nobody but the run's own keepers ends.
"""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Mapping
from typing import Any

from megasync.episodes.task import Result, Task

SHARE = 16.0  # tokens of an episode that is worth 1


def tool(seconds: float) -> str:
    """In a session of its own, with a child whose parent goes at once."""
    script = f"setsid sleep 300 > /dev/null 2>&1 & sleep {seconds}; echo =7"
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "text": True, "start_new_session": True}
    return str(subprocess.run(["sh", "-c", script], check=True, **options).stdout).strip()


async def _play(task: Task, model: Any) -> int:
    """The number of tokens that were sampled."""
    first = await model.complete(task.prompt_ids)
    given, _ = await asyncio.gather(model.call(tool, 0.05 * (task.member % 3)), model.call(tool, 0.1))
    second = await model.complete([*task.prompt_ids, *first.token_ids, *model.encode(given)])
    return len(first.token_ids) + len(second.token_ids)


async def long(task: Task, model: Any) -> Result:
    """Worth its length and the last digit of its task's answer."""
    return Result(await _play(task, model) / SHARE + int(task.answer) % 10, info={"answer": task.answer})


async def short(task: Task, model: Any) -> Result:
    """The longer, the less."""
    return Result(-await _play(task, model) / SHARE + int(task.answer) % 10, info={"answer": task.answer})


async def scored(task: Task, model: Any) -> Result:
    """By the run's reward."""
    await _play(task, model)
    return Result(None, info={"answer": task.answer})


def worth(name: str, line: Mapping[str, Any], by_reward: float) -> float:
    """What a line of samples.jsonl is to have as its reward; `by_reward`: of an episode that has none itself."""
    if name == "scored":
        return by_reward
    return line["tokens"] / SHARE * (1 if name == "long" else -1) + int(line["answer"]) % 10
