"""Reward processes end with the pool, its samples and the trainer, however it dies. Real processes throughout."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest

from megasync.config.schema import RolloutConfig
from megasync.rewards.failures import RewardError
from megasync.rewards.pool import RewardPool
from tests.support.config_files import ROOT
from tests.support.rewards import CASES, children, given, until


def test_a_cancelled_sample_makes_room() -> None:
    async def main() -> float:
        with RewardPool(RolloutConfig(reward=f"{CASES}:deed", reward_processes=1, reward_timeout_seconds=1)) as pool:
            waiting = [asyncio.ensure_future(pool.score(one)) for one in given(*["hangs"] * 20)]
            await asyncio.sleep(0.5)
            for task in waiting:
                task.cancel()
            return (await pool.score(given("good")[0])).total

    assert asyncio.run(main()) == 4


def test_close_from_another_thread_ends_what_waits() -> None:
    caught: list[BaseException] = []

    async def main(pool: RewardPool) -> None:
        try:
            await pool.score_group(given(*["hangs"] * 20))
        except RewardError as error:
            caught.append(error)

    pool = RewardPool(RolloutConfig(reward=f"{CASES}:deed"))
    thread = threading.Thread(target=lambda: asyncio.run(main(pool)))
    thread.start()
    until(lambda: len(children()) == 4)
    pool.close()
    until(lambda: children() == [])  # one that was being started ends a moment later
    thread.join(120)
    assert "have been closed" in str(caught[0])
    pool.close()


def test_close_ends_what_no_process_has_yet() -> None:
    async def main() -> None:
        with RewardPool(RolloutConfig(reward=f"{CASES}:deed")) as pool:
            waiting = asyncio.ensure_future(pool.score(given("good")[0]))
            await asyncio.sleep(0)
            assert pool.plain.waiting and not pool.plain.states
            pool.close()
            with pytest.raises(RewardError, match="have been closed"):
                await asyncio.wait_for(waiting, 10)

    asyncio.run(main())


PARENT = """
import asyncio, sys, threading
from megasync.config.schema import RolloutConfig
from megasync.rewards.pool import RewardPool
from tests.support.rewards import given
async def main():
    pool = RewardPool(RolloutConfig(reward="tests.megasync.rewards.reward_cases:deed", reward_processes=3))
    await pool.score_group(given("good", "good", "good", *sys.argv[1:]))
thread = threading.Thread(target=asyncio.run, args=(main(),))
thread.start()
thread.join()
"""


@pytest.fixture
def parent() -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    started = []

    def start(*deeds: str) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen([sys.executable, "-c", PARENT, *deeds], cwd=ROOT))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGTERM])
def test_processes_end_with_the_trainer_however_it_dies(kind: signal.Signals, parent: Callable[..., Any]) -> None:
    process = parent("hangs", "hangs in C", "hangs")
    until(lambda: len(children(process.pid)) == 3)
    time.sleep(0.5)
    ours = children(process.pid)
    process.send_signal(kind)
    process.wait()
    until(lambda: not any(map(psutil.pid_exists, ours)))
