"""Workers on the other nodes of the run's Ray: an actor there starts one, and passes on the messages of both sides.

No port is open for this: messages travel in calls of Ray, which lets in nobody but the run. The actor ends with the run, and the
worker with the actor. A lost node is the fault of none of its jobs. Leaves out blame (pool.py).

    hosts = Hosts(settings)                            # in a process that is connected to Ray, if is_on_cluster
    worker = hosts.start(owner, hosts.least_loaded(workers))     # a Worker, or a RemoteWorker
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from megasync.workers.process import ForkServer, Owner, Worker
from megasync.workers.protocol import pack
from megasync.workers.settings import PoolSettings

COLLECT_SECONDS = 0.5  # an actor without news answers after that long
NODES_SECONDS = 5.0  # between two looks at the list of nodes
JOIN_SECONDS = 5.0
ANSWER_KEY = "rollout.answer_timeout_seconds"


class Collected(NamedTuple):
    """News of an actor's worker. `end`: how it ended, and its stack."""

    messages: list[Any]
    step_seconds: float  # since the start of the step that runs
    job: int  # of that step
    end: tuple[str, str] | None


class Host:
    """The actor on another node; methods are called on its event loop."""

    def __init__(self) -> None:
        self._messages: list[Any] = []
        self._end: tuple[str, str] | None = None
        self._running = (0.0, 0)
        self._worker: Worker | None = None

    async def start(self, search_path: list[str], folder: str, target: str) -> None:
        """`search_path`, `folder`: of the trainer; the same paths hold on this node. `target`: as Worker's.

        Raises:
            OSError: it cannot be started.
        """
        self._news = asyncio.Event()
        sys.path[:] = [*search_path, *(path for path in sys.path if path not in search_path)]
        with contextlib.suppress(OSError):
            os.chdir(folder)
        self._worker = Worker(self, ForkServer(), target)

    async def send(self, data: bytes) -> None:
        if self._worker is not None and self._end is None:
            self._worker.send_packed(data)

    async def kill(self, *, with_stack: bool) -> None:
        if self._worker is not None and self._end is None:
            (self._worker.kill_with_stack if with_stack else self._worker.kill)()

    async def collect(self, seconds: float) -> Collected:
        """News, as soon as there are some, or after that long."""
        assert self._worker is not None
        if not self._messages and self._end is None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._news.wait()
        self._news.clear()
        messages, self._messages = self._messages, []
        begin, number = self._worker.running_job() if self._end is None else self._running
        return Collected(messages, time.monotonic() - begin, number, self._end)

    def on_message(self, worker: Worker, message: Any) -> None:
        """Called by the worker."""
        self._messages.append(message)
        self._news.set()

    def on_end(self, worker: Worker, how: str, stack: str) -> None:
        """Called by the worker, whose notes are read for the last time."""
        self._end, self._running = (how, stack), worker.running_job()
        self._news.set()


class RemoteWorker:
    """A Worker on another node."""

    def __init__(self, owner: Owner, node: str, target: str, limit_seconds: float) -> None:
        """An actor that does not answer for `limit_seconds` is lost."""
        self.owner, self.node, self.loop, self.is_lost = owner, node, asyncio.get_running_loop(), False
        self._target, self._limit_seconds, self._running = target, limit_seconds, (0.0, 0)
        self._to_send = list[tuple[Any, ...]]()
        self._is_started = self._is_sending = self._is_over = False
        self._ray = ray = _ray()
        on_node = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=False)
        self._actor: Any = ray.remote(Host).options(num_cpus=0, scheduling_strategy=on_node).remote()
        self._killing: list[Any] = []
        self._task = self.loop.create_task(self._receive())

    async def _receive(self) -> None:
        """Start the worker; hand over its messages and its end."""
        try:
            await self._actor.start.remote(list(sys.path), str(Path.cwd()), self._target)
            self._is_started = True
            self._send_soon()
            while not self._is_over:
                async with asyncio.timeout(COLLECT_SECONDS + self._limit_seconds):
                    collected = await self._actor.collect.remote(COLLECT_SECONDS)
                self._take_in(collected)
        except TimeoutError:
            self._lose(f"gave no answer for {self._limit_seconds:g} s ({ANSWER_KEY})")
        except self._ray.exceptions.RayError as error:
            self._lose_by(error)

    def _take_in(self, collected: Collected) -> None:
        if self._is_over:  # lost by a call beside this one
            return
        self._running = time.monotonic() - collected.step_seconds, collected.job
        for message in collected.messages:
            self.owner.on_message(self, message)
        if collected.end is not None:
            self._leave()
            self.owner.on_end(self, *collected.end)

    def send(self, message: tuple[Any, ...]) -> None:
        """One call at a time, so that no message overtakes another; later messages go together in the next one."""
        self._to_send.append(message)
        self._send_soon()

    def _send_soon(self) -> None:
        if self._is_started and self._to_send and not self._is_sending:
            self._is_sending = True
            self._sending = self.loop.create_task(self._send())

    async def _send(self) -> None:
        try:
            while self._to_send and not self._is_over:
                data, self._to_send = pack(self._to_send), []
                await self._actor.send.remote(data)
        except self._ray.exceptions.RayError as error:
            self._lose_by(error)
        self._is_sending = False

    def running_job(self) -> tuple[float, int]:
        """Like Worker.running_job, at most COLLECT_SECONDS old, by this node's clock."""
        return self._running

    def _lose_by(self, error: Exception) -> None:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        self._lose(lines[-1].partition(". ")[0])

    def _lose(self, why: str) -> None:
        """The actor or its node is gone, or does not answer."""
        if not self._is_over:
            self.is_lost, self._running = True, (0.0, 0)
            self._leave()
            self.owner.on_end(self, f"was lost with its actor on another node: {why}", "")

    def _leave(self) -> None:
        self._is_over = True
        threading.Thread(target=self._ray.kill, args=(self._actor,), daemon=True).start()  # blocks where the node does not answer

    def kill_with_stack(self) -> None:
        """Like the method of Worker."""
        if self._is_started:
            self._killing.append(self._actor.kill.remote(with_stack=True))
        else:
            self.loop.call_soon(self._lose, "it did not start")

    def kill(self) -> None:
        """Like the method of Worker."""
        if not self._is_over and self._ray.is_initialized():
            self._killing.append(self._actor.kill.remote(with_stack=False))

    def join(self) -> None:
        """Wait for the end of a killed worker. From any thread."""
        if not self._is_over and self._ray.is_initialized():
            self._ray.wait(self._killing, num_returns=len(self._killing), timeout=JOIN_SECONDS)
            self._ray.kill(self._actor)


def _ray() -> Any:
    """Not loaded by checks of a config."""
    return importlib.import_module("ray")


class Hosts:
    """The machines where workers are started: this one, or spread over the nodes of Ray, at most `max_workers` on each."""

    def __init__(self, settings: PoolSettings) -> None:
        self.max_workers, self.answer_timeout_seconds, self._own = settings.max_workers, settings.answer_timeout_seconds, ""
        self._target, self.servers = settings.start.target, list[ForkServer]()  # on this machine
        self._nodes, self._looked = [""], float("-inf") if settings.is_on_cluster else float("inf")

    def least_loaded(self, workers: Iterable[Worker | RemoteWorker]) -> str | None:
        """The node with the fewest of these workers; the name of this one is empty. None: all are full."""
        if time.monotonic() - self._looked > NODES_SECONDS:
            self._own = self._own or _ray().get_runtime_context().get_node_id()
            others = [node["NodeID"] for node in _ray().nodes() if node["Alive"] and node["NodeID"] != self._own]
            self._nodes, self._looked = ["", *others], time.monotonic()
        counts = Counter(worker.node for worker in workers)
        node = min(self._nodes, key=lambda name: counts[name])
        return node if counts[node] < self.max_workers else None

    def start(self, owner: Owner, node: str) -> Worker | RemoteWorker:
        """OSError: it cannot be started."""
        if node:
            return RemoteWorker(owner, node, self._target, self.answer_timeout_seconds)
        self.servers = [server for server in self.servers if server.process.poll() is None]
        free = next((server for server in self.servers if not server.is_busy), None)
        if free is None:
            self.servers.append(free := ForkServer())
        return Worker(owner, free, self._target)

    def close(self) -> None:
        """End the fork servers of this machine, with their workers. From any thread."""
        servers = list(self.servers)
        for server in servers:
            server.process.terminate()
        for server in servers:
            server.join()

    def look_again(self) -> None:
        """A node may be gone."""
        if self._own:
            self._looked = float("-inf")
