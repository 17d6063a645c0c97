"""An episode of `python -m megasync.bench episodes`: so many turns of a chat, and a tool between them that takes its time.

The tool's words are the same whether it takes time or none. Rendering messages as tokens, and reading what was sampled, is timed.
No torch in here. Leaves out who plays it (episodes.py).
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from typing import Any

from megasync.episodes.chat import Model, Renderer
from megasync.episodes.task import Result, Task

NAME = f"{__name__}:episode"


class Timed:
    """A renderer that notes the seconds it takes."""

    def __init__(self, renderer: Renderer) -> None:
        self.tokens, self.seconds = renderer.tokens, 0.0
        self.prompt, self.read = self._timed(renderer.prompt), self._timed(renderer.read)
        self.begin, self.with_arguments = renderer.begin, renderer.with_arguments

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **options: Any) -> Any:
            begin = time.perf_counter()
            try:
                return function(*arguments, **options)
            finally:
                self.seconds += time.perf_counter() - begin

        return timed


async def episode(task: Task, model: Model) -> Result:
    """`task.extra`: `turns`, and how long the tool takes, `least` and `most` seconds, or none where `waits` is false."""
    given, draw = task.extra, random.Random(f"{task.seed}/{task.member}")
    model.renderer = timed = Timed(model.renderer)
    messages: list[Any] = [{"role": "user", "content": task.prompt}]
    for turn in range(given["turns"]):
        if turn:
            seconds = draw.uniform(given["least"], given["most"])
            if given["waits"]:
                await asyncio.sleep(seconds)
            said = f"The search took {seconds:.2f} s and found {draw.randrange(10**6)} lines."
            messages.append({"role": "user", "content": said})
        messages.append(await model.chat(messages))
    return Result(1.0, {"render_seconds": timed.seconds})
