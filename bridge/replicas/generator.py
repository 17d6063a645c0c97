"""What one AsyncLLM generates: requests handed in as a batch, held or begun anew when weights change, each token's version kept.

Leaves out when weights change (replica.py) and what depends on the vLLM version (vllm_api.py).

    generator = Generator(engine, 0, on_update="continue", serving=lambda: (version, False), explain=str)
    await generator.hand_in([GroupRequest(key=7, request=request, samples=(0, 1))])
    (await generator.collect(1.0)).finished
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from bridge.config import OnUpdate
from bridge.generation import Collected, Completion, Finished, GenerationRequest, GroupRequest
from bridge.receive import vllm_routing
from bridge.replicas import vllm_api, vllm_outputs

Result = TypeVar("Result")
PAUSE_MODES: dict[OnUpdate, str] = {"drain": "wait", "continue": "keep", "restart": "abort"}  # AsyncLLM.pause_generation's
PING_SECONDS = 1.0
ANSWER_SECONDS = 0.01  # from one answer of `collect` to the next: each takes a millisecond or two from the engine's outputs


@dataclass
class Live:
    """A sample that the engine works on. `marks`: (number of tokens, version) at each update: how many it had when that ended."""

    request: GenerationRequest
    sample: int
    queue: Any
    version: int
    marks: list[tuple[int, int]] = field(default_factory=list)


class Generator:
    """Methods are called on one event loop. `lock` is held while requests are handed in, and by a sync from pause to resume."""

    def __init__(
        self,
        engine: Any,
        index: int,
        on_update: OnUpdate,
        serving: Callable[[], tuple[int, bool]],
        explain: Callable[[Exception], Exception],
        *,
        returns_experts: bool = False,
    ) -> None:
        """`serving` gives the version that is served and whether an adapter is, or raises; `explain` an error's better form."""
        self.lock = asyncio.Lock()
        self.num_calls = 0  # of generate and run, all
        self.is_busy = False  # with weights
        self._engine, self._index, self.on_update = engine, index, on_update
        self._serving, self._explain = serving, explain
        self._returns_experts = returns_experts
        self._ids = itertools.count()
        self._num_running = 0  # requests in the engine
        self._live: dict[str, Live] = {}  # by vLLM's id
        self._held: dict[str, int] = {}  # of these, those that a pause holds, with the tokens that they have
        self._finished: list[Finished] = []
        self._problem: Exception | None = None
        self._has_news, self._is_open, self._is_no_sync_waiting = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._is_open.set()
        self._is_no_sync_waiting.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._asked = self._answered = self._next_answer = time.monotonic()

    # ------------------------------------------------------------------------------------------------ one call, one answer

    async def generate(self, requests: Sequence[GenerationRequest]) -> list[list[Completion]]:
        """Completions of each request, in order.

        The same requests give the same tokens and bit for bit the same log-probs, at the same weights, when no other
        call runs: all enter the scheduler at once, with nothing cached.
        """
        self.num_calls += 1
        lives = await self._begin([(request, sample) for request in requests for sample in range(request.num_samples)])
        completions = iter(await asyncio.gather(*(self._complete(live) for live in lives)))
        return [[next(completions) for _ in range(request.num_samples)] for request in requests]

    async def run(self, submit: Callable[[list[Any]], Awaitable[None]]) -> list[Any]:
        """vLLM's own outputs of requests for which `submit` appends a queue each."""
        self.num_calls += 1
        queues: list[Any] = []
        await self._enter(submit, queues)
        try:
            return [await self._get(queue) for queue in queues]
        finally:
            self._num_running -= len(queues)

    # ------------------------------------------------------------------------------------------------ a stream of groups

    async def hand_in(self, groups: Sequence[GroupRequest]) -> None:
        """Begin to generate; `collect` has each sample once it has ended. A sync that waits for `lock` goes first."""
        wanted = [(group, sample) for group in groups for sample in group.samples]
        lives = await self._begin([(group.request, sample) for group, sample in wanted], lets_sync_pass=True)
        for (group, sample), live in zip(wanted, lives, strict=True):
            task = asyncio.create_task(self._finish(group.key, sample, live))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def collect(self, seconds: float) -> Collected:
        """The samples that have ended since the last call, or as soon as one has; none after `seconds`.

        While others run it answers every ANSWER_SECONDS at most.

        Raises:
            RuntimeError: a sample cannot be completed, such as after vLLM died.
        """
        with suppress(TimeoutError):
            await asyncio.wait_for(self._has_news.wait(), seconds)
        if self._live:  # others may end meanwhile
            await asyncio.sleep(max(0.0, self._next_answer - time.monotonic()))
        self._next_answer = time.monotonic() + ANSWER_SECONDS
        self._has_news.clear()
        if self._problem is not None:
            raise self._problem
        finished, self._finished = self._finished, []
        return Collected(tuple(finished), self.silent_seconds)

    async def _finish(self, key: int, sample: int, live: Live) -> None:
        try:
            completion = await self._complete(live)
            self._finished.append(Finished(key, sample, completion))
        except Exception as error:  # noqa: BLE001 # the caller of collect has to hear of it
            self._problem = error
        self._has_news.set()

    # ------------------------------------------------------------------------------------------------ at an update

    async def acquire_for_sync(self) -> None:
        """Take `lock` before all groups that wait to be handed in."""
        self._is_no_sync_waiting.clear()
        try:
            await self.lock.acquire()
        finally:
            self._is_no_sync_waiting.set()

    async def pause(self, *, drain: bool = False) -> None:
        """Stop generation as `on_update` says, or with `drain` once all that runs is done; the lock is held."""
        self._is_open.clear()
        await self._unless_dead(vllm_api.pause(self._engine, PAUSE_MODES["drain" if drain else self.on_update]))
        counts = await self._unless_dead(vllm_outputs.num_tokens(self._engine))
        self._held = {name: counts[name] for name in self._live.keys() & counts.keys()}
        for name, num_tokens in self._held.items():
            self._live[name].marks.append((num_tokens, self._live[name].version))

    async def resume(self) -> None:
        """What is held goes on under the version that is served now."""
        version, _ = self._serving()
        for name in self._held.keys() & self._live.keys():  # the output of others is on its way to us
            self._live[name].version = version
        await self._engine.resume_generation()
        self._is_open.set()

    # ------------------------------------------------------------------------------------------------ is it alive

    async def watch(self) -> None:
        """Ask the engine core for a word every second, for as long as it lives."""
        with suppress(Exception):  # no answer comes any more, which `silent_seconds` tells
            while not self._engine.errored:
                self._asked = time.monotonic()
                await self._engine.engine_core.is_sleeping_async()
                self._answered = time.monotonic()
                await asyncio.sleep(PING_SECONDS)

    @property
    def silent_seconds(self) -> float:
        """How long the engine core has owed an answer; none is due while it loads weights."""
        return 0.0 if self._answered >= self._asked or self.is_busy else time.monotonic() - self._asked

    # ------------------------------------------------------------------------------------------------ inside

    async def _begin(self, wanted: Sequence[tuple[GenerationRequest, int]], *, lets_sync_pass: bool = False) -> list[Live]:
        """Hand samples in as one batch."""
        queues: list[Any] = []
        lives: list[Live] = []

        async def submit_all(queues: list[Any]) -> None:
            version, with_adapter = self._serving()
            submit = partial(vllm_api.submit, self._engine, version=version, with_adapter=with_adapter)
            for request, sample in wanted:
                queues.append(await submit(request, sample, self.new_id(), returns_experts=self._returns_experts))
                lives.append(Live(request, sample, queues[-1], version))

        await self._enter(submit_all, queues, lets_sync_pass=lets_sync_pass)
        self._live |= {live.queue.request_id: live for live in lives}
        return lives

    async def _complete(self, live: Live) -> Completion:
        """Once it has ended; an update that ended it lets it begin anew, under the new weights."""
        while True:
            try:
                output = await self._get(live.queue)
            finally:
                self._num_running -= 1
                self._live.pop(live.queue.request_id, None)
            experts = None
            if self._returns_experts:
                experts = await vllm_routing.routed_experts(self._engine, live.queue.request_id, output)
            if output.outputs[0].finish_reason != "abort":
                return vllm_api.to_completion(output, live.marks, live.version, experts)
            await self._is_open.wait()
            (live,) = await self._begin([(live.request, live.sample)], lets_sync_pass=True)

    @asynccontextmanager
    async def _turn(self, *, lets_sync_pass: bool) -> AsyncIterator[None]:
        """With `lock`, which is given to its waiters in order."""
        await self.lock.acquire()
        while lets_sync_pass and not self._is_no_sync_waiting.is_set():
            self.lock.release()
            await self._is_no_sync_waiting.wait()
            await self.lock.acquire()
        try:
            yield
        finally:
            self.lock.release()

    async def _enter(
        self, submit: Callable[[list[Any]], Awaitable[None]], queues: list[Any], *, lets_sync_pass: bool = False
    ) -> None:
        """Hand requests in as one batch; `submit` appends a queue for each.

        A pause of mode "keep" makes the core hold what it gets; it finds the resume behind the requests in its one
        input queue (vllm/v1/engine/core.py:926), so that they are scheduled together.
        """
        async with self._turn(lets_sync_pass=lets_sync_pass):
            self._serving()
            alone = self._num_running == 0
            try:
                if alone:
                    await vllm_api.pause(self._engine, "keep")
                    await self._engine.reset_prefix_cache()
                await submit(queues)
                self._num_running += len(queues)
            except Exception as error:  # noqa: BLE001 # whatever vLLM raises
                explained = self._explain(error)
                if not self._engine.errored:
                    await self._engine.abort([queue.request_id for queue in queues], internal=True)
                raise explained from None
            finally:
                if alone and not self._engine.errored:
                    await self._engine.resume_generation()

    async def _get(self, queue: Any) -> Any:
        try:
            return await queue.get()
        except Exception as error:  # noqa: BLE001 # whatever vLLM raises
            explained = self._explain(error)
            if not self._engine.errored:
                await self._engine.abort([queue.request_id], internal=True)
            raise explained from None
        finally:
            queue.close()

    async def _unless_dead(self, call: Awaitable[Result]) -> Result:
        """Wait for an answer that has no time limit; vLLM leaves it open when its core dies."""
        task = asyncio.ensure_future(call)
        while not task.done():
            await asyncio.wait([task], timeout=1.0)
            if not task.done() and self._engine.errored:
                task.cancel()
                raise RuntimeError(f"vLLM's processes ended in replica {self._index}")
        return await task

    def new_id(self) -> str:
        return f"{self._index}-{next(self._ids)}"
