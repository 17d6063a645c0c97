"""Episodes whose tools take a known time: nothing, or SECONDS."""

from __future__ import annotations

import time
from typing import Any

SECONDS = 0.3


def multiply(left: int, right: int) -> int:
    return left * right


def slow(left: int, right: int) -> int:
    time.sleep(SECONDS)
    return left * right


async def episode(task: Any, model: Any) -> float:
    ids = list(task.prompt_ids)
    for turn in range(4):
        ids += (await model.complete(ids)).token_ids
        if task.prompt.startswith("trivial"):
            value = multiply(6, 7)
        else:
            value = await model.call(slow if task.prompt.startswith("slow") and turn == 0 else multiply, 6, 7)
        ids += model.encode(str(value))
    return 1.0
