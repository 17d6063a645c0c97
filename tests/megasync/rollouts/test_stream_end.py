"""The end of a stream's thread: tasks end first, then what they use, and an error is raised with the thread ended."""

from __future__ import annotations

import asyncio
import gc

import pytest

from megasync.rollouts.events import EventThread


def test_what_tasks_use_ends_after_them() -> None:
    happened = list[str]()
    begun = asyncio.Event()

    async def work() -> None:
        try:
            begun.set()
            await asyncio.sleep(600)
        finally:
            happened.append("task")

    async def last() -> None:
        happened.append("last")

    async def start() -> None:
        events.start(work())
        await begun.wait()

    events = EventThread("test", lambda _: None)
    events.run(start())
    events.close(last)
    assert happened == ["task", "last"]
    events.close(last)
    assert happened == ["task", "last"]


def test_tasks_of_others_on_the_loop_end_with_it(caplog: pytest.LogCaptureFixture) -> None:
    """Such as a worker's reader; asyncio complains of each that is left when the loop is closed."""
    ended, begun = list[str](), asyncio.Event()

    async def reader() -> None:
        try:
            begun.set()
            await asyncio.sleep(600)
        finally:
            ended.append("reader")

    async def start() -> None:
        events.loop.create_task(reader(), name="reader")
        await begun.wait()

    async def last() -> None:
        assert not ended, "what is last may need it"

    events = EventThread("test", lambda _: None)
    events.run(start())
    events.close(last)
    assert ended == ["reader"]
    gc.collect()
    assert [record.message for record in caplog.records if record.name == "asyncio"] == []


def test_an_error_at_the_end_is_raised_and_the_thread_ends() -> None:
    async def last() -> None:
        raise RuntimeError("a session")

    events = EventThread("test", lambda _: None)
    with pytest.raises(RuntimeError, match="a session"):
        events.close(last)
    assert not events._thread.is_alive() and events.loop.is_closed()
