"""Samples for rewards, and the processes that score them."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import psutil

from megasync.rewards.functions import RewardInput

WORKER = "megasync.workers.fork_server"  # in the command of the fork server, and of its workers
CASES = "tests.megasync.rewards.reward_cases"


def given(*responses: str, answer: str = "46", **extra: Any) -> list[RewardInput]:
    return [RewardInput("12+34=", response, answer, 2, 8, extra, line) for line, response in enumerate(responses, start=1)]


def children(pid: int | None = None) -> list[int]:
    """Reward processes and what they have started."""
    found = []
    for process in psutil.Process(pid).children(recursive=True):
        with suppress(psutil.Error):
            command = " ".join(process.cmdline())
            is_ours = (WORKER in command and WORKER in " ".join(process.parent().cmdline())) or command == "sleep 600"
            found += [process.pid] if is_ours and process.status() != psutil.STATUS_ZOMBIE else []
    return found


def until(condition: Callable[[], bool], seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
