"""Episodes that tests play: what one does, and how it fails, is the prompt of its task."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import mmap
import os
import random
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import numpy as np

from megasync.episodes.task import Result, Task
from examples.clients import openai_client


async def episode(task: Task, model: Any) -> Any:  # noqa: C901, PLR0912 - one for each kind
    """Two turns with a tool between them, unless the prompt asks for something else."""
    kind, _, option = task.prompt.partition(" ")
    marks = task.extra.get("marks", [])
    marks.append(kind)
    first = await model.complete(task.prompt_ids)
    await asyncio.sleep(float(option) if kind == "good" and option else 0)
    match kind:
        case "raises":
            raise ZeroDivisionError("on purpose")
        case "hangs":
            await asyncio.sleep(1000)
        case "naps":
            time.sleep(float(option))
        case "holds":
            time.sleep(1000)
        case "swallows":
            while True:
                try:
                    await asyncio.sleep(1000)
                except asyncio.CancelledError:
                    print("cancelled")
        case "exits":
            os._exit(3)
        case "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        case "floods":
            for _ in range(100_000):
                print("x" * 1000)
                print("y" * 1000, file=sys.stderr)
        case "leaves":
            child = subprocess.Popen(["sleep", "600"])
            return Result(float(child.pid), {"pid": child.pid})
        case "none":
            return None
        case "unusual":
            return Result(1.0, {7: 2.0, "calls": 1}, {"scores": [0.5, float("nan"), float("-inf")], "file": "a\udcff.txt"})  # type: ignore[dict-item]
        case "greedy":
            held = bytearray(8 << 30)
            return float(len(held))
        case "opens":
            opened = [Path(os.devnull).open() for _ in range(2000)]  # noqa: SIM115
            print(len(opened))
        case "rewards":  # each turn, by a list that is given as JSON; the total, too, unless it is null
            await model.complete(task.prompt_ids)
            total, given = json.loads(option)
            return Result(total, turn_rewards=given)
        case "rests":
            for _ in range(3):
                await asyncio.sleep(float(option))
                await model.complete(task.prompt_ids)
        case "endless":
            ids = [*task.prompt_ids, *first.token_ids]
            while True:
                ids += (await model.complete(ids)).token_ids
    ids = [*task.prompt_ids, *first.token_ids, *model.encode("=7")]
    second = await model.complete(ids, max_new_tokens=2, stop=["z"])
    info = {"text": second.text, "seed": task.seed, "parent": os.getppid(), "marks": marks}
    return Result(len(second.token_ids) / 2, {"length": len(ids)}, info)


_left: list[asyncio.Task[None]] = []


async def on_and_on(task: Task, model: Any) -> float:
    """Asks for longer and longer turns, in the way that the prompt says, until a limit ends it."""

    async def ask() -> None:
        ids = list(task.prompt_ids)
        while True:
            ids += (await model.complete(ids)).token_ids

    match task.prompt:
        case "tasks":
            async with asyncio.TaskGroup() as group:
                group.create_task(ask())
                group.create_task(ask())
        case "program":
            await _run_program(model)
        case "caught":
            with contextlib.suppress(KeyError):
                async with model.serve() as access:
                    await asyncio.to_thread(_until_refused, access)
            return 0.5
        case "thread":
            await asyncio.to_thread(lambda: asyncio.run(model.complete(task.prompt_ids)))
        case "left":
            _left.append(asyncio.create_task(ask()))
            await asyncio.sleep(0.05)
    if task.prompt == "looks":
        while not (_left and _left[0].done()):
            await asyncio.sleep(0.05)
    return 1.0


async def _run_program(model: Any) -> None:
    async with model.serve() as access:
        environment = os.environ | access.environment()
        source = PROGRAM.replace("range(2)", "range(99)")
        started = await asyncio.create_subprocess_exec(sys.executable, "-c", source, env=environment)
        if await started.wait():
            raise ValueError("the program has failed")


def _until_refused(access: Any) -> None:
    """KeyError for the first answer that holds no choices."""
    data = {"model": "any", "messages": [{"role": "user", "content": "1+1="}]}
    headers = {"Authorization": f"Bearer {access.key}", "Content-Type": "application/json"}
    while True:
        request = Request(f"{access.openai_url}/chat/completions", json.dumps(data).encode(), headers)
        try:
            with urlopen(request) as answer:
                said = json.load(answer)
        except HTTPError as error:
            raise KeyError("choices") from error
        data["messages"] += [said["choices"][0]["message"], {"role": "user", "content": "2+2="}]


async def two_turns(task: Task, model: Any) -> float:
    """A tool takes a moment and gives two tokens."""
    first = await model.complete(task.prompt_ids)
    await asyncio.sleep(0.02)
    await model.complete([*task.prompt_ids, *first.token_ids, *model.encode("=7")])
    return float(task.member)


async def unsteady(task: Task, model: Any) -> Result | None:
    """Two turns with a reward each. Every eighth line fails, every seventh is played by OpenAI's client, which gives one reward,
    every third forgets its first turn. Every fifth is scored by the run's reward.
    """
    if task.line % 8 == 0:
        raise RuntimeError("broken on purpose")
    if task.line % 7 == 0:
        return await by_client(task, model)
    first = await model.complete(task.prompt_ids)
    await asyncio.sleep(0.01 * (task.seed + task.member) % 0.05)
    given = model.encode("=7" if task.line % 3 else "xyz")
    second = await model.complete([*task.prompt_ids, *(first.token_ids if task.line % 3 else []), *given])
    if task.line % 5 == 0:
        return None
    rewards = [len(each.token_ids) / 6 for each in (first, second)]
    return Result(None, {"first": len(first.token_ids)}, {"line": task.line}, turn_rewards=rewards)


async def by_client(task: Task, model: Any) -> Result:
    """Two turns of a chat; the client is the official one."""
    messages: list[Any] = [{"role": "user", "content": task.prompt}]
    lengths = []
    async with model.serve() as access:
        client = openai_client().with_options(base_url=access.openai_url, api_key=access.key)
        for _ in range(2):
            completion = await client.chat.completions.create(model="policy", messages=messages)
            lengths.append(completion.usage.completion_tokens)
            messages += [completion.choices[0].message, {"role": "user", "content": "7"}]
    return Result(lengths[0] / 6, {"first": lengths[0]}, {"line": task.line})


PROGRAM = """
import openai
client, messages = openai.OpenAI(), [{"role": "user", "content": "Hello"}]
for _ in range(2):
    reply = client.chat.completions.create(model="any", messages=messages, max_tokens=3).choices[0]
    messages += [reply.message, {"role": "user", "content": "Go on"}]
print(reply.finish_reason, len(messages))
"""


async def program(task: Task, model: Any) -> Result:
    """What it does is a program's that knows OpenAI's protocol alone."""
    async with model.serve() as access:
        environment = os.environ | access.environment()
        options = {"env": environment, "stdout": asyncio.subprocess.PIPE}
        started = await asyncio.create_subprocess_exec(sys.executable, "-c", PROGRAM, **options)
        said, _ = await started.communicate()
    return Result(float(started.returncode == 0), info={"said": said.decode().strip()})


async def programs(task: Task, model: Any) -> float:
    """Starts four that would outlive it, writes their ids and its own into the file that the prompt names, and hangs."""
    started = [subprocess.Popen(["sleep", "600"]), subprocess.Popen(["sleep", "600"], start_new_session=True)]
    stopped = subprocess.Popen(["sleep", "600"], start_new_session=True)
    stopped.send_signal(signal.SIGSTOP)
    daemon = subprocess.run(["sh", "-c", "setsid sleep 600 > /dev/null 2>&1 & echo $!"], stdout=subprocess.PIPE, check=True)
    ids = [os.getpid(), *(each.pid for each in (*started, stopped)), int(daemon.stdout)]
    path = Path(task.prompt)
    path.with_suffix(".new").write_text(" ".join(map(str, ids)), encoding="utf-8")
    path.with_suffix(".new").rename(path)
    await asyncio.sleep(600)
    return 1.0


_held: list[mmap.mmap] = []


def _most(size: int) -> Iterator[mmap.mmap]:
    """Address space in parts of so many bytes, until there is no more."""
    with contextlib.suppress(OSError):
        while True:
            yield mmap.mmap(-1, size)


def deed(kind: str) -> str:
    """A plain tool, in a thread: it ends the process that it is in, as the kind says, while others are under way."""
    time.sleep(0.05)
    match kind:
        case "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "leaves":
            os._exit(3)
        case "crashes":
            ctypes.string_at(0)
        case "takes all":  # of 4 GiB
            _held.extend(_most(2**28))
            time.sleep(1)
            _held.clear()
        case "wants too much":
            return str(len(bytearray(8 << 30)))
        case "wants some":
            time.sleep(0.3)
            mmap.mmap(-1, 2**29).close()
        case "holds the lock":
            re.match(r"(a+)+$", "a" * 60 + "b")
    return "=7"


async def with_a_tool(task: Task, model: Any) -> Result:
    """Three turns; the tool is called by what the prompt says between the second and the third."""
    kind, ids = task.prompt.partition(":")[0], list(task.prompt_ids)
    for turn in range(3):
        ids += (await model.complete(ids)).token_ids
        ids += model.encode(await model.call(deed, kind) if turn == 1 else "=5")
    return Result(1.0, {"length": len(ids)})


_played = {"num": 0}


async def draws(task: Task, model: Any) -> Result:
    """Two random numbers, and how many episodes this module has seen; then the deed that the prompt says."""
    _played["num"] += 1
    deed(task.prompt.partition(":")[0])
    return Result(random.random(), {"numpy": np.random.random(), "num": _played["num"]})


_crowd = {"size": 0}


async def crowd(task: Task, model: Any) -> float:
    """More than three at a time end their process, whoever comes last."""
    _crowd["size"] += 1
    if _crowd["size"] > 3:
        os.kill(os.getpid(), signal.SIGKILL)
    await asyncio.sleep(0.1)
    await model.complete(task.prompt_ids)
    _crowd["size"] -= 1
    return 1.0


class WithADeed:
    """An environment whose second step is the deed that the prompt says."""

    def __init__(self, task: Task) -> None:
        self.kind, self.place = task.prompt.partition(":")[0], 0

    def reset(self) -> str:
        return "="

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.place += 1
        return deed(self.kind if self.place == 2 else "good"), 0.5, self.place == 3, False, {}


class Guess:
    """An environment in Gymnasium's manner: the action is a number of tokens."""

    def __init__(self, task: Task) -> None:
        self.answer, self.left = task.answer, 3

    def reset(self, *, seed: int) -> tuple[str, dict[str, Any]]:
        return f"?{seed % 10}", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.left -= 1
        return "no", float(action == self.answer), self.left == 0, False, {"left": self.left}


class Parity:
    """Three turns, each worth the less the later it is, if the sum of its text's bytes is odd."""

    def __init__(self, task: Task) -> None:
        self.place = 0

    def reset(self) -> str:
        return "="

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.place += 1
        return "+", sum(action.encode()) % 2 / self.place, self.place == 3, False, {}


class Endless(Guess):
    """It goes on until a limit ends it."""

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return "no", 0.25, False, False, {}


class Walk:
    """Three steps, which it writes into its line. It answers differently once a file exists; `calls`: of this object."""

    switch = Path(tempfile.gettempdir()) / "megasync-test-answers-otherwise"

    def __init__(self, task: Task) -> None:
        self.place = self.calls = 0
        self.actions = cast(Any, task.extra).setdefault("actions", [])

    def reset(self) -> str:
        self.calls += 1
        return "="

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.place, self.calls = self.place + 1, self.calls + 1
        self.actions.append(action)
        said = "0" if self.switch.exists() else str(self.place)
        return said, 1.0, self.place == 3, False, {"calls": self.calls, "actions": len(self.actions)}


class StatefulWalk(Walk):
    """Goes on where it was."""

    def state(self) -> dict[str, int]:
        return {"place": self.place}

    def set_state(self, state: dict[str, int]) -> None:
        self.place = state["place"]


class BadState(Walk):
    def state(self) -> object:
        return {self.place}

    def set_state(self, state: object) -> None:
        raise AssertionError(state)


async def chance(task: Task, model: Any) -> Result:
    """Its tool says something else each time that it is called."""
    ids, reported = list(task.prompt_ids), []
    for number in range(3):
        ids += (await model.complete(ids)).token_ids
        reported.append(await model.call(drawn, number))
        ids += model.encode(reported[-1])
    return Result(1.0, {}, {"reported": reported})


def drawn(number: int) -> str:
    return f"{number}{secrets.randbelow(10**6)}"


class Sleeps:
    """Its step holds a thread up: for ever where the prompt says so."""

    def __init__(self, task: Task) -> None:
        self.seconds = 1000.0 if task.prompt.startswith("hangs") else 0.2

    def reset(self) -> str:
        return ""

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        time.sleep(self.seconds)
        return "", 1.0, True, False, {}


def not_async(task: Task, model: Any) -> float:
    return 0.0


async def one_argument(task: Task) -> float:
    return 0.0


class NoSteps:
    def reset(self) -> str:
        return ""


number = 7
