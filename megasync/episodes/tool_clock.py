"""The time that an episode's tools take: its own code, its environment, and its waits for anything but the model.

The clock stands still while the model is asked, and while a tool that is called by `call_tool` waits for a thread or for other
episodes of the process. Leaves out the limit on an episode's time (workers/limits.py), which counts those.

    CLOCK.set(clock := ToolClock())
    value = await call_tool(tool, 6, 7)
    clock.seconds
"""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

ASKING, WAITING, WORKING = "asking", "waiting", "working"  # the model; for a tool; in a tool


class ToolClock:
    """The clock of one episode, started here. Used from its threads, too."""

    def __init__(self) -> None:
        self._lock, self._doing = threading.Lock(), Counter[str]()
        self._seconds, self._since = 0.0, time.monotonic()

    @property
    def seconds(self) -> float:
        with self._lock:
            self._take()
            return self._seconds

    @contextmanager
    def during(self, what: str) -> Iterator[None]:
        """Several may run side by side."""
        self._add(what, 1)
        try:
            yield
        finally:
            self._add(what, -1)

    def _add(self, what: str, number: int) -> None:
        with self._lock:
            self._take()
            self._doing[what] += number

    def _take(self) -> None:
        now = time.monotonic()
        is_tool = self._doing[WORKING] > 0 or self._doing[WAITING] == 0
        self._seconds += now - self._since if is_tool and self._doing[ASKING] == 0 else 0.0
        self._since = now

    def timed(self, tool: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        with self.during(WORKING):
            try:
                return tool(*arguments, **options)
            except StopIteration as error:  # which no future takes: whoever awaits the thread would wait for ever
                raise RuntimeError("the tool raised StopIteration") from error


CLOCK: ContextVar[ToolClock] = ContextVar("CLOCK", default=ToolClock())  # noqa: B039 # outside of episodes


async def call_tool(tool: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """The tool's answer; a plain function runs in a thread."""
    clock = CLOCK.get()
    with clock.during(WAITING):
        if inspect.iscoroutinefunction(tool):
            found = tool(*arguments, **options)
        else:
            found = await asyncio.to_thread(clock.timed, tool, *arguments, **options)
        with clock.during(WORKING):
            return await found if inspect.isawaitable(found) else found  # also of one that does not look like an async one
