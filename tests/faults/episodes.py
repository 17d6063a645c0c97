"""The episode of a fault run: two turns, and between them, once in a run, what its case says. No torch in here.

Leaves out what becomes of it (judge.py).
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from typing import Any

from megasync.episodes.task import Task
from tests.faults import orders

LINE, MEMBER = 7, 1  # whose episode it is
SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]


async def episode(task: Task, model: Any) -> float:
    """Worth the share of its tokens that are the first of them."""
    first = await model.complete(task.prompt_ids)
    case = orders.read_case()
    if case.episode and (task.line, task.member) == (LINE, MEMBER) and orders.is_first(orders.DEED_FILE):
        await DEEDS[case.episode]()
    second = await model.complete([*task.prompt_ids, *first.token_ids, *model.encode("=7")])
    said = [*first.token_ids, *second.token_ids]
    return said.count(said[0]) / len(said)


async def hangs() -> None:
    """A tool in a thread, that never answers."""
    await asyncio.to_thread(time.sleep, 600)


async def blocks() -> None:
    """The whole process, with all episodes in it."""
    time.sleep(600)


async def raises() -> None:
    raise RuntimeError("the tool is broken on purpose")


async def is_killed() -> None:
    """The process, with all episodes in it."""
    os.kill(os.getpid(), signal.SIGKILL)


async def floods() -> None:
    """Both streams, from Python and from a child."""
    for _ in range(20_000):
        print("x" * 1000)
        print("y" * 1000, file=sys.stderr)
    subprocess.run(["sh", "-c", "yes flood | head -c 200000000"], check=True)


async def forks() -> None:
    """Children that would outlive it: of its own session, and a copy of the process."""
    for _ in range(20):
        subprocess.Popen(SLEEP, start_new_session=True)
    if os.fork() == 0:
        os.setsid()
        time.sleep(600)
        os._exit(0)


DEEDS = {"hangs": hangs, "blocks": blocks, "raises": raises, "is-killed": is_killed, "floods": floods, "forks": forks}
