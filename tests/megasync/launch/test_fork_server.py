"""The fork server of workers: it ends whatever its parent had ignored, and its own end, or a lack of files, is a worker's end."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
from contextlib import suppress
from typing import Any

from megasync.workers.process import ForkServer, Worker
from megasync.workers.protocol import Ready, Start

START = Start("tests.megasync.rewards.reward_cases:length", (), is_serial=True, ends_children=False)


class Watcher:
    def __init__(self) -> None:
        self.messages: list[Any] = []
        self.is_ready, self.end = asyncio.Event(), asyncio.get_running_loop().create_future()

    def on_message(self, worker: Any, message: Any) -> None:
        self.messages.append(message)
        self.is_ready.set()

    def on_end(self, worker: Any, how: str, stack: str) -> None:
        self.end.set_result(how)


def begun(server: ForkServer) -> tuple[Watcher, Worker]:
    watcher = Watcher()
    worker = Worker(watcher, server, START.target)
    worker.send(START)
    return watcher, worker


def run(main: Any) -> Any:
    """`main` of a new server, which is ended."""
    server = ForkServer()
    try:
        return asyncio.run(asyncio.wait_for(main(server), 60))
    finally:
        server.process.terminate()
        server.join()
        assert server.process.returncode is not None


def test_a_server_that_dies_before_it_forks_ends_the_worker() -> None:
    async def main(server: ForkServer) -> str:
        os.kill(server.process.pid, signal.SIGSTOP)
        watcher, _ = begun(server)
        server.process.kill()
        return str(await watcher.end)

    assert "SIGKILL" in run(main)


def test_a_worker_whose_process_cannot_be_watched_is_ended() -> None:
    """The trainer may open no more files when the worker is forked."""

    async def main(server: ForkServer) -> tuple[str, bool]:
        os.kill(server.process.pid, signal.SIGSTOP)
        watcher, _ = begun(server)
        await asyncio.sleep(0.2)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        free = list[int]()
        with suppress(OSError):
            while True:
                free.append(os.dup(0))
        try:
            os.kill(server.process.pid, signal.SIGCONT)
            how = str(await watcher.end)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for each in free:
                os.close(each)
        return how, server.process.wait(120) is not None

    how, is_over = run(main)
    assert is_over and "SIGTERM" in how


def test_a_server_ends_where_sigterm_was_ignored() -> None:
    former = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:

        async def main(server: ForkServer) -> list[Any]:
            watcher, worker = begun(server)
            await watcher.is_ready.wait()
            worker.kill()
            await watcher.end
            assert not server.is_busy and server.process.poll() is None
            return watcher.messages

        assert isinstance(run(main)[0], Ready)
    finally:
        signal.signal(signal.SIGTERM, former)
