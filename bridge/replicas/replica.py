"""One vLLM replica: what runs inside its Ray actor, around an AsyncLLM.

Holds the replica's state in one place (`_state`, `version`) and the one lock that keeps generation and syncs apart.
Leaves out who calls it (pool.py) and the workers' side of a sync (receiver.py).
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Awaitable, Callable
from typing import Any

from bridge.config import ReplicaConfig
from bridge.messages import (
    FOLDER_VERSION,
    BeginSync,
    Completion,
    Event,
    GenerationRequest,
    ReplicaState,
    Spans,
    StageSpan,
    next_state,
)
from bridge.replicas import processes, vllm_api
from bridge.replicas.output import Output

CLOSE_SECONDS = 10.0  # for vLLM to end its processes in good order, shared memory removed; then it kills them


class Replica:
    """Methods are called through Ray, many at a time, on one event loop."""

    def __init__(self, index: int, config: ReplicaConfig, *, serves_folder: bool) -> None:
        """`serves_folder`: whether it may generate before the first sync, with the weights of the model folder."""
        self.index, self.config = index, config
        self.version: int | None = FOLDER_VERSION if serves_folder else None
        self._state = ReplicaState.SERVING
        self._failure = ""
        self._in_sync = False  # the lock is held for a sync, or asleep
        self._given_up: list[str] = []  # kinds of memory that vLLM does without, asleep
        self._spans = Spans()
        self._num_calls = 0  # that generate, all
        self._num_running = 0  # those whose requests are in the engine
        self._ids = itertools.count()
        self._output = Output()
        self._engine: Any = None

    async def start(self) -> int:
        """Start the engine; gives this process's id.

        Raises:
            RuntimeError: vLLM did not start; its own error text, that of its child processes included.
        """
        self._control = asyncio.Lock()  # held while requests are handed in, and from pause to resume or abort
        vllm_api.prepare_process()
        try:
            with self._output.taking(), vllm_api.noticing_failure(self._output.text):
                self._engine = vllm_api.build_engine(self.config)
        except (Exception, SystemExit) as error:  # noqa: BLE001 # whatever vLLM raises, the text is what counts
            told = f"{error}\n{self._output.summary()}"
            raise RuntimeError(f"vLLM did not start for replica {self.index}: {told}") from None
        return os.getpid()

    async def generate(self, requests: list[GenerationRequest]) -> list[list[Completion]]:
        """Completions of each request, in order.

        The same requests give the same tokens and bit for bit the same log-probs, at the same weights, when no other
        call runs: all enter the scheduler at once, with nothing cached.
        """
        version = FOLDER_VERSION

        async def submit(queues: list[Any]) -> None:
            nonlocal version
            version = self.version if self.version is not None else FOLDER_VERSION
            for request in requests:
                for sample in range(request.num_samples):
                    queue = await vllm_api.submit(self._engine, request, sample, self._new_id(), with_adapter=self._has_adapter)
                    queues.append(queue)

        outputs = iter(await self._run(submit))
        return [[vllm_api.to_completion(next(outputs), version) for _ in range(r.num_samples)] for r in requests]

    async def _run(self, submit: Callable[[list[Any]], Awaitable[None]]) -> list[Any]:
        """Hand requests in as one batch and wait for their outputs; `submit` appends a queue for each.

        A pause of mode "keep" makes the core hold what it gets; it finds the resume behind the requests in its one
        input queue (vllm/v1/engine/core.py:926), so that they are scheduled together.
        """
        queues: list[Any] = []
        self._num_calls += 1
        async with self._control:
            self._require_serving()
            alone, self._num_running = self._num_running == 0, self._num_running + 1
            try:
                if alone:
                    await vllm_api.pause(self._engine, "keep")
                    await self._engine.reset_prefix_cache()
                await submit(queues)
            except Exception as error:
                await self._give_up(queues, error)
                raise
            finally:
                if alone and not self._engine.errored:
                    await self._engine.resume_generation()
        try:
            return [await queue.get() for queue in queues]
        except Exception as error:
            await self._give_up(queues, error)
            raise
        finally:
            self._num_running -= 1
            for queue in queues:
                queue.close()

    async def _give_up(self, queues: list[Any], error: Exception) -> None:
        self._notice_death()
        if self._engine.errored:
            told = f"{error}\n{self._output.summary()}"
            raise RuntimeError(f"vLLM died in replica {self.index}: {told}") from None
        await self._engine.abort([queue.request_id for queue in queues], internal=True)

    async def pause(self, num_calls: int) -> None:
        """Take on no new requests, and wait until the running ones are done; asleep, get memory for weights.

        `num_calls`: how many calls that generate come before; they may still be on their way.
        """
        if self._state is ReplicaState.ASLEEP:
            await self._wake([vllm_api.WEIGHTS])
            self._advance(Event.PAUSE)
            return
        await self._stop(Event.PAUSE, num_calls)

    async def sleep(self, num_calls: int, *, keep_weights: bool) -> None:
        """As pause, then give the devices' memory up until resume; weights that are not kept come with the next sync."""
        await self._stop(Event.SLEEP, num_calls)
        if not keep_weights:
            self.version = None
        await self._engine.reset_prefix_cache()
        await vllm_api.sleep(self._engine, keep_weights=keep_weights)
        self._given_up = [vllm_api.WEIGHTS, vllm_api.CACHES]

    async def _stop(self, event: Event, num_calls: int) -> None:
        while self._num_calls < num_calls:  # they are on their way here
            await asyncio.sleep(1e-3)
        await self._control.acquire()
        self._in_sync = True
        before = self._state
        try:
            self._require_service()
            self._advance(event)
            await self._unless_dead(vllm_api.pause(self._engine, "wait"))
        except BaseException:
            self._leave_sync()
            if self._state is not ReplicaState.FAILED:
                self._state = before
            raise

    async def _wake(self, kinds: list[str]) -> None:
        """Get these kinds of memory back, those that were given up."""
        wanted = [kind for kind in kinds if kind in self._given_up]
        if wanted:
            await vllm_api.wake(self._engine, wanted)
            self._given_up = [kind for kind in self._given_up if kind not in wanted]

    async def _unless_dead(self, call: Awaitable[None]) -> None:
        """Wait for an answer that has no time limit; vLLM leaves it open when its core dies."""
        task = asyncio.ensure_future(call)
        while not task.done():
            await asyncio.wait([task], timeout=1.0)
            if not task.done() and self._engine.errored:
                task.cancel()
                raise RuntimeError(f"vLLM's processes ended in replica {self.index}")
        await task

    async def begin(self, message: BeginSync) -> list[str]:
        """Offer a manifest to every worker; the reasons of a refusal, none when it is accepted. Changes no weight."""
        self._advance(Event.BEGIN)
        answers = await self._engine.collective_rpc("megasync_begin", args=(message.to_dict(),))
        return list(dict.fromkeys(reason for answer in answers for reason in answer))

    async def receive(self, message: BeginSync) -> None:
        """Load the stream of a manifest that was accepted; comes back when every worker has all of it."""
        self._advance(Event.RECEIVE)
        self._spans = Spans()
        with self._spans.measure("update"):
            await self._engine.collective_rpc("megasync_receive", args=(message.to_dict(),))
        self._advance(Event.RECEIVED)

    async def commit(self, version: int) -> None:
        """Finish the reload, stamp the version and forget cached prefixes."""
        with self._spans.measure("finish"):
            if not await vllm_api.finish_update(self._engine, version, adapter=self.config.adapter_rank > 0):
                raise RuntimeError(f"replica {self.index} could not reset its prefix cache")
        self._advance(Event.COMMIT)
        self.version = version

    async def resume(self) -> None:
        self._advance(Event.RESUME)
        await self._wake(self._given_up)
        await self._engine.resume_generation()
        self._leave_sync()

    async def abort(self, reason: str) -> bool:
        """Leave the sync; whether this replica is out of service from now on."""
        self._notice_death()
        before, self._state = self._state, next_state(self._state, Event.ABORT)
        if self._state is ReplicaState.FAILED:
            self._failure = self._failure or reason
        elif before is ReplicaState.PAUSED:
            await self._wake(self._given_up)
            await self._engine.resume_generation()
        if self._state is not ReplicaState.ASLEEP:
            self._leave_sync()
        return self._state is ReplicaState.FAILED

    async def sync_spans(self) -> list[StageSpan]:
        """What the last sync's time went to in here, for the timeline."""
        return self._spans.taken

    async def loader_fallback(self) -> dict[str, str]:
        """Of the first worker: see SyncReport."""
        answers = await self._engine.collective_rpc("megasync_loader_fallback")
        return dict(answers[0])

    async def read_digests(self) -> dict[str, int]:
        """digest.digest_value of every tensor that the replica holds."""
        return dict((await self._engine.collective_rpc("megasync_read_digests"))[0])

    async def close(self) -> None:
        """Stop the engine and its processes."""
        if self._engine is not None:
            vllm_api.stop_engine(self._engine, CLOSE_SECONDS)
        processes.remove_sockets(os.getpid())

    @property
    def _has_adapter(self) -> bool:
        return self.config.adapter_rank > 0 and self.version != FOLDER_VERSION

    def _leave_sync(self) -> None:
        if self._in_sync:
            self._in_sync = False
            self._control.release()

    def _advance(self, event: Event) -> None:
        self._state = next_state(self._state, event)

    def _notice_death(self) -> None:
        if self._engine.errored and self._state is not ReplicaState.FAILED:
            self._advance(Event.DIE)
            self._failure = f"vLLM's processes ended: {'; '.join(self._output.errors()) or 'without a word'}"

    def _require_service(self) -> None:
        self._notice_death()
        if self._state is ReplicaState.FAILED:
            raise RuntimeError(
                f"replica {self.index} is out of service ({self._failure}); restart it (ReplicaPool.restart) and publish again"
            )

    def _require_serving(self) -> None:
        self._require_service()
        if self.version is None:
            raise RuntimeError(f"replica {self.index} has no weights and waits for a publish before it can generate")

    def _new_id(self) -> str:
        return f"{self.index}-{next(self._ids)}"
