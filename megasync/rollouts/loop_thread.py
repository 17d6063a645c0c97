"""An event loop in a thread of its own, beside the one that gives it work. Leaves out what that work is (stream.py)."""

from __future__ import annotations

import asyncio
import threading
from abc import abstractmethod
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")
CLOSE_SECONDS = 10.0  # for what still runs to hear that it is cancelled


class LoopThread:
    """`run` and `close` are for other threads, all else for the loop's own. `_begin_thread` comes last in a constructor."""

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        """`loop`: with a clock of its own; None: a plain one."""
        self._loop = loop or asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[Any]] = set()

    def _begin_thread(self, name: str) -> None:
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """What `work` on the event loop gives."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:  # also a signal's: nobody waits for it any more
            future.cancel()
            raise

    def close(self) -> None:
        """Cancel what is started and end the thread. Safe to repeat."""
        if self._thread.is_alive():
            self.run(self._cancel())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    async def _cancel(self) -> None:
        for task in (tasks := list(self._tasks)):
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=CLOSE_SECONDS)

    @abstractmethod
    def _fail(self, error: BaseException) -> None:
        """A task ended with this error."""

    def _start(self, work: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._note_end)
        return task

    def _note_end(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)
