"""Processes of episodes on the other nodes of the run's Ray: an actor there starts one, and passes on what both sides say.

Nothing listens for this: messages travel in calls of Ray, which lets in nobody but the run. A program that an episode starts
speaks to the proxy of its own process, on the loopback of that node. The actor's process ends with the run, and the episodes'
with the actor's. A node that is lost is to blame itself: its episodes begin anew elsewhere. Leaves out who else may be to blame
(pool.py).

    places = Places(config.rollout)         # in a process that Ray knows
    process = places.start(owner, held)     # here or there, as EpisodeProcess
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from megasync.config.schema import RolloutConfig
from megasync.rewards.process import ENVIRONMENT, Owner, RewardProcess
from megasync.rewards.wire import pack

COLLECT_SECONDS = 0.5  # an actor with no news answers after so long
NODES_SECONDS = 5.0  # for which the list of nodes is taken as it was
JOIN_SECONDS = 5.0
ANSWER_KEY = "rollout.answer_timeout_seconds"


class EpisodeProcess(RewardProcess):
    """Its many threads take little of the address space that it may have. `_process` is its keeper."""

    module = "megasync.episodes.keeper"
    program = "megasync/episodes/program.py"
    environment = ENVIRONMENT | {"MALLOC_ARENA_MAX": "2"}
    node, is_lost = "", False  # on this one

    def kill(self) -> None:
        """As RewardProcess; what has left its session ends, too."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self._process.pid, signal.SIGTERM)


class Collected(NamedTuple):
    """What an actor has to tell. `end`: how its process ended, and its stack."""

    messages: list[Any]
    begun_ago: float  # when the step that the process is in began
    begun: int  # whose it is
    end: tuple[str, str] | None


class Host:
    """The actor on another node; methods are called on its event loop."""

    def __init__(self) -> None:
        self._messages: list[Any] = []
        self._end: tuple[str, str] | None = None
        self._begun = (0.0, 0)
        self._process: EpisodeProcess | None = None

    async def start(self, names: list[str], search_path: list[str], folder: str) -> None:
        """`search_path`, `folder`: where modules and files are found, on this node, too.

        Raises:
            OSError: it cannot be started.
        """
        self._news = asyncio.Event()
        sys.path[:] = [*search_path, *(path for path in sys.path if path not in search_path)]
        with contextlib.suppress(OSError):
            os.chdir(folder)
        self._process = EpisodeProcess(self, names, 0.0)

    async def send(self, data: bytes) -> None:
        if self._process is not None and self._end is None:
            self._process.send_packed(data)

    async def kill(self, *, with_stack: bool) -> None:
        if self._process is not None and self._end is None:
            (self._process.kill_with_stack if with_stack else self._process.kill)()

    async def collect(self, seconds: float) -> Collected:
        """What is new, once there is something, or after so long."""
        assert self._process is not None
        if not self._messages and self._end is None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._news.wait()
        self._news.clear()
        messages, self._messages = self._messages, []
        begin, number = self._process.begun() if self._end is None else self._begun
        return Collected(messages, time.monotonic() - begin, number, self._end)

    def on_message(self, process: RewardProcess, message: Any) -> None:
        """Of RewardProcess."""
        self._messages.append(message)
        self._news.set()

    def on_end(self, process: RewardProcess, how: str, stack: str) -> None:
        """Of RewardProcess, whose notes are read for the last time."""
        self._end, self._begun = (how, stack), process.begun()
        self._news.set()


class RemoteProcess:
    """As EpisodeProcess, on another node. Made in the event loop, in which all but `kill` and `join` is called."""

    def __init__(self, owner: Owner, names: list[str], node: str, limit_seconds: float) -> None:
        """`limit_seconds`: an actor that gives no answer for so long is lost."""
        self.owner, self.node, self.loop, self.is_lost = owner, node, asyncio.get_running_loop(), False
        self._limit_seconds, self._to_send = limit_seconds, bytearray()
        self._is_started = self._is_sending = self._is_over = False
        self._timer: asyncio.TimerHandle | None = None
        self._begun = (0.0, 0)
        self._ray = ray = _ray()
        on_node = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=False)
        self._actor: Any = ray.remote(Host).options(num_cpus=0, scheduling_strategy=on_node).remote()
        self._killing: list[Any] = []
        self._then(self._actor.start.remote(names, list(sys.path), str(Path.cwd())), self._on_start)

    def _then(self, ref: Any, follow: Callable[[Any], None]) -> None:
        """Call `follow` with what the actor answers; an error is the end."""

        def hand_over(future: Any) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
                self.loop.call_soon_threadsafe(take, future)

        def take(future: Any) -> None:
            if self._is_over:
                return
            if (error := future.exception()) is not None:
                said = str(error).strip().splitlines() or [type(error).__name__]
                self._lose(said[-1].partition(". ")[0])
            else:
                follow(future.result())

        ref.future().add_done_callback(hand_over)

    def _on_start(self, _: None) -> None:
        self._is_started = True
        self._send_next()
        self._collect()

    # ------------------------------------------------------------------------------------------------ messages

    def send(self, message: tuple[Any, ...]) -> None:
        """What is sent while the actor has not answered to the last call goes in the next one, so that none overtakes another."""
        if not self._to_send and self._is_started and not self._is_sending:
            self.loop.call_soon(self._send_next)
        self._to_send += pack(message)

    def _send_next(self, _: None = None) -> None:
        self._is_sending = bool(self._to_send) and not self._is_over
        if self._is_sending:
            data, self._to_send = bytes(self._to_send), bytearray()
            self._then(self._actor.send.remote(data), self._send_next)

    def _collect(self) -> None:
        late = f"gave no answer for {self._limit_seconds:g} s ({ANSWER_KEY})"
        self._timer = self.loop.call_later(COLLECT_SECONDS + self._limit_seconds, self._lose, late)
        self._then(self._actor.collect.remote(COLLECT_SECONDS), self._on_collected)

    def _on_collected(self, collected: Collected) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._begun = time.monotonic() - collected.begun_ago, collected.begun
        for message in collected.messages:
            self.owner.on_message(self, message)
        if collected.end is None:
            self._collect()
        else:
            self._leave()
            self.owner.on_end(self, *collected.end)

    def begun(self) -> tuple[float, int]:
        """As that of RewardProcess, at most COLLECT_SECONDS old; by this node's clock."""
        return self._begun

    # ------------------------------------------------------------------------------------------------ the end

    def _lose(self, why: str) -> None:
        """The actor or its node is gone, or says nothing."""
        if not self._is_over:
            self.is_lost, self._begun = True, (0.0, 0)
            self._leave()
            self.owner.on_end(self, f"was lost with its actor on another node: {why}", "")

    def _leave(self) -> None:
        self._is_over = True
        if self._timer is not None:
            self._timer.cancel()
        threading.Thread(target=self._ray.kill, args=(self._actor,), daemon=True).start()  # waits where the node says nothing

    def kill_with_stack(self) -> None:
        """Kill it a moment later, once it has written down where it stands."""
        if self._is_started:
            self._killing.append(self._actor.kill.remote(with_stack=True))
        else:
            self.loop.call_soon(self._lose, "it did not start")

    def kill(self) -> None:
        """It and what it has started itself. From any thread."""
        if not self._is_over and self._ray.is_initialized():
            self._killing.append(self._actor.kill.remote(with_stack=False))

    def join(self) -> None:
        """Wait until it is gone. From any thread."""
        if not self._is_over and self._ray.is_initialized():
            self._ray.wait(self._killing, num_returns=len(self._killing), timeout=JOIN_SECONDS)
            self._ray.kill(self._actor)


def _ray() -> Any:
    """What checks of a config do not load."""
    return importlib.import_module("ray")


class Places:
    """Where processes of episodes are started: here, or spread over the nodes of Ray, with the same number at most on each."""

    def __init__(self, rollout: RolloutConfig) -> None:
        self.rollout, self._own = rollout, ""
        self._nodes, self._seen = [""], float("-inf") if rollout.episode_placement == "cluster" else float("inf")

    def room(self, held: Iterable[EpisodeProcess | RemoteProcess]) -> str | None:
        """The node with the fewest of these processes that may have one more; this one's name is empty. None: all are full."""
        if time.monotonic() - self._seen > NODES_SECONDS:
            self._own = self._own or _ray().get_runtime_context().get_node_id()
            others = [node["NodeID"] for node in _ray().nodes() if node["Alive"] and node["NodeID"] != self._own]
            self._nodes, self._seen = ["", *others], time.monotonic()
        counts = Counter(process.node for process in held)
        node = min(self._nodes, key=lambda name: counts[name])
        return node if counts[node] < self.rollout.episode_processes else None

    def start(self, owner: Owner, node: str) -> EpisodeProcess | RemoteProcess:
        """OSError: it cannot be started."""
        names = [self.rollout.episode]
        if not node:
            return EpisodeProcess(owner, names, 0.0)
        return RemoteProcess(owner, names, node, self.rollout.answer_timeout_seconds)

    def look_again(self) -> None:
        """A node may be gone."""
        if self._own:
            self._seen = float("-inf")
