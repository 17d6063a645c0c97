"""Rewards for test_reward_pool.py and test_train.py, as users would write them: good ones, and all ways of going wrong."""

from __future__ import annotations

import asyncio
import ctypes
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

from megasync.rewards.functions import RewardInput


def length(sample: RewardInput) -> float:
    return float(len(sample.response))


def level(sample: RewardInput) -> float:
    """Columns of the data file."""
    return sample.extra["level"] + sample.line / 100


def rank(samples: Sequence[RewardInput]) -> list[float]:
    """The place of each response among those of its prompt, the shortest first."""
    order = sorted(range(len(samples)), key=lambda index: len(samples[index].response))
    return [float(order.index(index)) for index in range(len(samples))]


def takes_out(samples: list[RewardInput]) -> list[float]:
    """Leaves an empty list behind."""
    return [length(samples.pop(0)) for _ in range(len(samples))]


def uses_up(sample: RewardInput) -> float:
    """Returns the number of marks and removes them."""
    found = len(sample.extra["marks"])
    sample.extra["marks"].clear()
    return float(found)


def in_no_order(samples: list[RewardInput]) -> set[float]:
    return {length(sample) for sample in samples}


def too_few(samples: list[RewardInput]) -> list[float]:
    return [0.0] * (len(samples) - 1)


def not_annotated(samples):  # type: ignore[no-untyped-def] # as people write it
    return [1.0 for _ in samples]


def returns_a_list(sample: RewardInput) -> list[float]:
    return [1.0]


async def judge(sample: RewardInput) -> float:
    await asyncio.sleep(0.2)
    return length(sample)


_meeting = {"calls": 0}


async def meets_the_others(sample: RewardInput) -> float:
    """Does not end before 200 of it run in this process."""
    _meeting["calls"] += 1
    while _meeting["calls"] < 200:
        await asyncio.sleep(0.01)
    return length(sample)


async def judges(samples: list[RewardInput]) -> list[float]:
    return await asyncio.gather(*map(judge, samples))


def with_a_loop_of_its_own(sample: RewardInput) -> float:
    return asyncio.run(judge(sample))


def process_of(sample: RewardInput) -> float:
    time.sleep(0.05)
    return float(os.getpid())


def naps(sample: RewardInput) -> float:
    """For as many seconds as the response says."""
    time.sleep(float(sample.response))
    return 1.0


async def async_naps(sample: RewardInput) -> float:
    await asyncio.sleep(float(sample.response))
    return 1.0


def gpus(sample: RewardInput) -> float:
    return float(len(os.environ["CUDA_VISIBLE_DEVICES"]))


def raises() -> float:
    raise KeyError("broken on purpose")


def raises_much() -> float:
    raise ValueError("much " * 10**6)


def hangs() -> float:
    time.sleep(600)
    return 0.0


def hangs_in_c() -> float:
    """Which holds the interpreter's lock, so that no thread nor signal handler in Python comes to run."""
    return float(re.match(r"(a+)+$", "a" * 60 + "b") is None)


def hangs_with_a_child() -> float:
    subprocess.run(["sleep", "600"], check=True)
    return 0.0


def is_killed() -> float:
    os.kill(os.getpid(), signal.SIGKILL)
    return 0.0


def gets_signal() -> float:
    os.kill(os.getpid(), signal.SIGRTMIN + 6)
    return 0.0


def crashes() -> float:
    return float(ctypes.string_at(0)[0])


def leaves() -> float:
    os._exit(3)


def forks_in_vain() -> float:
    """As pty.fork and os.execvp do for a program that is not there: the child comes back with an error."""
    if os.fork() == 0:
        os.execvp("no-such-program", ["no-such-program"])
    time.sleep(0.3)
    return 4.0


def leaves_a_thread() -> float:
    """That ends the process later, when it works on what comes next."""
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
    return 4.0


def takes_a_second() -> float:
    time.sleep(1)
    return 4.0


DEEDS = {
    "forks in vain": forks_in_vain,
    "leaves a thread": leaves_a_thread,
    "takes a second": takes_a_second,
    "raises": raises,
    "raises much": raises_much,
    "nan": lambda: float("nan"),
    "none": lambda: None,
    "text": lambda: "high",
    "hangs": hangs,
    "hangs in C": hangs_in_c,
    "hangs with a child": hangs_with_a_child,
    "is killed": is_killed,
    "gets a real-time signal": gets_signal,
    "crashes": crashes,
    "leaves": leaves,
    "exits": lambda: sys.exit(5),
}


def deed(sample: RewardInput) -> object:
    """What the response says, else its length."""
    return DEEDS[sample.response]() if sample.response in DEEDS else length(sample)


async def async_deed(sample: RewardInput) -> object:
    if sample.response == "waits":
        await asyncio.sleep(600)
    await asyncio.sleep(0.3)  # so that others are under way
    return deed(sample)
