"""The requests of one AsyncLLM: handed in as a batch, held or restarted when weights change, with the version of each token.

Leaves out when weights change (replica.py) and what depends on the vLLM version (vllm/serving/).

    generator = Generator(engine, 0, on_update="continue", serving=lambda slot: (version, NO_ADAPTER), explain=str)
    await generator.hand_in([GroupRequest(key=7, request=request, samples=(0, 1))], num_collects=0)
    (await generator.collect(1.0, number=1)).finished
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from bridge.config import OnUpdate
from bridge.generation import (
    NO_ADAPTER,
    NO_EXPERTS,
    Collected,
    Completion,
    Finished,
    GenerationRequest,
    GroupRequest,
    ScoreRequest,
    TokenScores,
)
from bridge.messages import NotServingError
from bridge.vllm.serving import api, routing
from bridge.vllm.serving import requests as vllm_requests

Result = TypeVar("Result")
PAUSE_MODES: dict[OnUpdate, str] = {"drain": "wait", "continue": "keep", "restart": "abort"}  # AsyncLLM.pause_generation's
PING_SECONDS = 1.0
SLOT_SECONDS = 0.01  # from one look at a slot's requests to the next
ANSWER_SECONDS = 0.01  # from one answer of `collect` to the next: each takes a millisecond or two from the engine's outputs


@dataclass(eq=False)
class RunningSample:
    """A sample that the engine works on. `marks`: (number of tokens, version) at each update: how many it had when that ended."""

    request: GenerationRequest
    sample: int = 0
    key: int = 0  # of its group
    answer: asyncio.Future[Ended] | None = None  # who waits for its output; None: `collect` has it
    version: int = 0
    slot: int = NO_ADAPTER  # of the adapter that it runs with
    marks: list[tuple[int, int]] = field(default_factory=list)


Ended = tuple[str, RunningSample, Any]  # vLLM's id, and its RequestOutput


class Generator:
    """Methods are called on one event loop. `lock` is held while requests are handed in, and by a sync from pause to resume.

    vLLM's output processor calls `put` with the outputs of all requests: no task, thread or event is a sample's own.
    """

    def __init__(
        self,
        engine: Any,
        index: int,
        on_update: OnUpdate,
        serving: Callable[[int | None], tuple[int, int]],
        explain: Callable[[Exception], Exception],
        *,
        returns_experts: bool = False,
        returns_support: bool = False,
        has_slots: bool = False,
    ) -> None:
        """`serving` returns the version in a slot, and the slot or NO_ADAPTER, or raises; `explain` returns a better error.

        `has_slots`: an update changes what is in one of several slots.
        """
        self.lock = asyncio.Lock()
        self.is_busy = False  # with weights
        self._engine, self._index, self.on_update = engine, index, on_update
        self._serving, self._explain = serving, explain
        self._returns_experts, self._returns_support = returns_experts, returns_support
        self._has_slots = has_slots
        self._ids = itertools.count()
        self._live: dict[str, RunningSample] = {}  # in the engine, by vLLM's id
        self._held: set[str] = set()  # the part of these that a pause holds
        self._ended: list[Ended] = []  # for `collect`
        self._newest_collect = 0  # the highest number of a call of it that is known here
        self._again: list[Ended] = []  # ended by an update: they restart after it
        self._problem: Exception | None = None
        self._has_news, self._is_open, self._is_no_sync_waiting = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._is_open.set()
        self._is_no_sync_waiting.set()
        self._beginning_again: asyncio.Task[None] | None = None
        self._asked = self._answered = self._next_answer = time.monotonic()

    # ------------------------------------------------------------------------------------------------ one call, one answer

    async def generate(self, requests: Sequence[GenerationRequest], *, keeps_cache: bool = False) -> list[list[Completion]]:
        """Completions of each request, in order. `keeps_cache`: what was cached before may be read, too.

        The same requests give the same tokens and bit for bit the same log-probs, at the same weights, when no other
        call runs: all enter the scheduler at once, with nothing cached.
        """
        samples = [RunningSample(request, sample) for request in requests for sample in range(request.num_samples)]
        ended = await self._answers(samples, keeps_cache=keeps_cache)
        completions = iter(await self._completions(ended))
        return [[next(completions) for _ in range(request.num_samples)] for request in requests]

    async def score(self, sequences: Sequence[tuple[int, ...]], num_top: int = 0, slot: int | None = None) -> list[TokenScores]:
        """At temperature 1, with the `num_top` most likely tokens (vLLM: max_logprobs at most)."""
        requests = [ScoreRequest(ids, max_new_tokens=0, temperature=0.0, num_top=num_top, slot=slot) for ids in sequences]
        ended = await self._answers([RunningSample(request) for request in requests])
        await self._forget_experts(ended)
        return [vllm_requests.token_scores(output, num_top) for _, _, output in ended]

    async def _answers(self, lives: Sequence[RunningSample], *, keeps_cache: bool = False) -> list[Ended]:
        answers = []
        for live in lives:
            live.answer = asyncio.get_running_loop().create_future()
            answers.append(live.answer)
        await self._begin(lives, keeps_cache=keeps_cache)
        return await asyncio.gather(*answers)

    # ------------------------------------------------------------------------------------------------ a stream of groups

    async def hand_in(self, groups: Sequence[GroupRequest], num_collects: int) -> None:
        """Begin to generate; `collect` has each sample once it has ended. A sync that waits for `lock` goes first.

        `num_collects`: the number of the last `collect` that was called before this; older calls get none of these samples.
        """
        self._newest_collect = max(self._newest_collect, num_collects)
        lives = [RunningSample(group.request, sample, group.key) for group in groups for sample in group.samples]
        await self._begin(lives, yields_to_sync=True)

    async def collect(self, seconds: float, number: int) -> Collected:
        """The samples that have ended since the last call, or as soon as one has; none after `seconds`.

        While others run it answers every ANSWER_SECONDS at most. `number` counts the calls as they are made: Ray may
        deliver them in another order. Only the newest call gets samples: whoever made an older one may be gone.

        Raises:
            RuntimeError: a sample cannot be completed, such as after vLLM died.
        """
        self._newest_collect = max(self._newest_collect, number)
        if number == self._newest_collect:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._has_news.wait(), seconds)
            if self._live:  # others may end meanwhile
                await asyncio.sleep(max(0.0, self._next_answer - time.monotonic()))
        if number != self._newest_collect:
            return Collected((), self.silent_seconds)
        self._next_answer = time.monotonic() + ANSWER_SECONDS
        self._has_news.clear()
        if self._problem is not None:
            raise self._problem
        ended, self._ended = self._ended, []
        pairs = zip(ended, await self._completions(ended), strict=True)
        finished = tuple(Finished(live.key, live.sample, completion) for (_, live, _), completion in pairs)
        return Collected(finished, self.silent_seconds)

    async def abort_groups(self, keys: Sequence[int]) -> None:
        """Stop with these groups; `collect` has no samples of them any more."""
        chosen = {name for name, live in self._live.items() if live.answer is None and live.key in keys}
        self._live = {name: live for name, live in self._live.items() if name not in chosen}
        dropped = [each for each in self._ended if each[1].key in keys]
        self._ended = [each for each in self._ended if each[1].key not in keys]
        await self._forget_experts(dropped)
        await self._engine.abort(list(chosen), internal=True)

    # ------------------------------------------------------------------------------------------------ at an update

    async def acquire_for_sync(self) -> None:
        """Take `lock` before all groups that wait to be handed in."""
        self._is_no_sync_waiting.clear()
        try:
            await self.lock.acquire()
        finally:
            self._is_no_sync_waiting.set()

    async def pause(self, slot: int, *, drain: bool = False) -> None:
        """Stop generation as `on_update` says, or with `drain` once all that runs is done; the lock is held.

        Requests without tokens restart with the new weights, in their own prefix cache. With several slots those of `slot` are
        waited for, and the others held, which the update does not change.
        """
        self._is_open.clear()
        if self._has_slots and not drain:
            while any(live.slot == slot for live in self._live.values()):
                await asyncio.sleep(SLOT_SECONDS)
            await self._unless_dead(api.pause(self._engine, "keep"))
            return
        await self._unless_dead(api.pause(self._engine, PAUSE_MODES["drain" if drain else self.on_update]))
        counts = await self._unless_dead(api.num_tokens(self._engine))
        await self._engine.abort([name for name in self._live if counts.get(name) == 0], internal=True)
        self._held = self._live.keys() & counts.keys()
        for name in self._held:
            self._live[name].marks.append((counts[name], self._live[name].version))

    async def give_up(self, slot: int) -> None:
        """Fail the samples of `slot`, which changes next: a sync that broke off holds them, so that they cannot end."""
        error = RuntimeError(f"replica {self._index}: other weights replace those of the samples, after a sync that broke off")
        chosen = {name: live for name, live in self._live.items() if live.slot == slot}
        self._live = {name: live for name, live in self._live.items() if name not in chosen}
        for live in chosen.values():
            if live.answer is None:
                self._problem = error
                self._has_news.set()
            elif not live.answer.done():
                live.answer.set_exception(error)
        await self._engine.abort(list(chosen), internal=True)

    async def resume(self) -> None:
        """Held requests continue under the version that is served now."""
        for name in self._held & self._live.keys():  # the output of others is on its way to us
            self._live[name].version, _ = self._serving(self._live[name].request.slot)
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

    async def _begin(self, lives: Sequence[RunningSample], *, yields_to_sync: bool = False, keeps_cache: bool = False) -> None:
        """Hand samples in as one batch.

        A pause of mode "keep" makes the core hold its requests; it finds the resume behind the requests in its one
        input queue (vllm/v1/engine/core.py:926), so that they are scheduled together.
        """
        async with self._turn(yields_to_sync=yields_to_sync):
            serving = {slot: self._serving(slot) for slot in {live.request.slot for live in lives}}
            alone = not self._live
            named = {f"{self._index}-{next(self._ids)}": live for live in lives}
            for live in lives:
                (live.version, live.slot), live.marks = serving[live.request.slot], []
            try:
                requests = await self._core_requests(named)
                if alone:
                    await self._unless_dead(api.pause(self._engine, "keep"))
                    if not keeps_cache:
                        await self._unless_dead(self._engine.reset_prefix_cache())
                self._live |= named
                await vllm_requests.submit(self._engine, requests, self)
            except Exception as error:  # noqa: BLE001 # whatever vLLM raises
                self._live = {name: live for name, live in self._live.items() if name not in named}
                explained = self._explain(error)
                if not self._engine.errored:
                    await self._engine.abort(list(named), internal=True)
                raise explained from None
            finally:
                if alone and not self._engine.errored:
                    await self._engine.resume_generation()

    async def _core_requests(self, named: Mapping[str, RunningSample]) -> list[Any]:
        """vLLM's requests for these samples: adjacent samples of one prompt share one."""
        make = partial(
            vllm_requests.core_requests,
            self._engine,
            returns_experts=self._returns_experts,
            returns_support=self._returns_support,
        )
        found: list[Any] = []
        for request, own in itertools.groupby(named.items(), lambda item: item[1].request.of_sample(item[1].sample)):
            samples = {name: live.sample for name, live in own}
            first = named[next(iter(samples))]
            found += await make(request, samples, version=first.version, slot=first.slot)
        return found

    def put(self, output: Any) -> None:
        """From vLLM: the final output of a request, or what ended the engine, once for each request."""
        if isinstance(output, Exception):
            self._fail(self._problem or self._explain(output))
        elif (live := self._live.pop(output.request_id, None)) is None:
            return  # it was given up
        elif output.outputs[0].finish_reason == "abort":
            self._again.append((output.request_id, live, output))
            if self._beginning_again is None or self._beginning_again.done():
                self._beginning_again = asyncio.create_task(self._begin_again())
        elif live.answer is None:
            self._ended.append((output.request_id, live, output))
            self._has_news.set()
        elif not live.answer.done():
            live.answer.set_result((output.request_id, live, output))

    async def _begin_again(self) -> None:
        """Restart the requests that updates ended, together, under the new weights."""
        while self._again:
            await self._is_open.wait()
            again, self._again = self._again, []
            try:
                await self._forget_experts(again)
                await self._begin([live for _, live, _ in again], yields_to_sync=True)
            except NotServingError:  # another sync came first, and broke off: the next whole one opens
                self._is_open.clear()
                self._again = again + self._again
            except Exception as error:  # noqa: BLE001 # who waits for them has to hear of it
                self._fail(error, [live for _, live, _ in again])

    def _fail(self, error: Exception, lives: Sequence[RunningSample] = ()) -> None:
        """Tell who waits for these, or for any, and `collect`."""
        self._problem = error
        for live in [*lives, *self._live.values()]:
            if live.answer is not None and not live.answer.done():
                live.answer.set_exception(self._problem)
        self._live.clear()
        self._has_news.set()

    async def _completions(self, ended: Sequence[Ended]) -> list[Completion]:
        experts: Sequence[Any] = [NO_EXPERTS] * len(ended)
        if self._returns_experts and ended:
            experts = await routing.routed_experts(self._engine, {name: output for name, _, output in ended})
        pairs = zip(ended, experts, strict=True)
        return [
            vllm_requests.to_completion(output, live.marks, live.version, own, live.request.num_top)
            for (_, live, output), own in pairs
        ]

    async def _forget_experts(self, ended: Sequence[Ended]) -> None:
        if self._returns_experts and routing.is_captured():
            await routing.take(self._engine, [name for name, _, _ in ended])

    @asynccontextmanager
    async def _turn(self, *, yields_to_sync: bool) -> AsyncIterator[None]:
        """With `lock`, which is given to its waiters in order."""
        await self.lock.acquire()
        while yields_to_sync and not self._is_no_sync_waiting.is_set():
            self.lock.release()
            await self._is_no_sync_waiting.wait()
            await self.lock.acquire()
        try:
            yield
        finally:
            self.lock.release()

    async def _unless_dead(self, call: Awaitable[Result]) -> Result:
        """Wait for an answer that has no time limit; vLLM leaves it open when its core dies."""
        task = asyncio.ensure_future(call)
        while not task.done():
            await asyncio.wait([task], timeout=1.0)
            if not task.done() and self._engine.errored:
                task.cancel()
                raise RuntimeError(f"vLLM's processes ended in replica {self._index}")
        return await task
