"""One vLLM replica: the code inside its Ray actor, around an AsyncLLM.

Holds the replica's state in one place (`_state`, `version`) and the one lock that keeps generation and syncs apart.
Leaves out who calls it (pool.py) and the workers' side of a sync (receiver.py).
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bridge import processes
from bridge.config import ReplicaConfig
from bridge.generation import NO_ADAPTER, Collected, Completion, GenerationRequest, GroupRequest, Speculation, TokenScores
from bridge.messages import FOLDER_VERSION, BeginSync, Event, NotServingError, ReplicaState, Spans, StageSpan, next_state
from bridge.notes import find_notes
from bridge.replicas import places
from bridge.replicas.generator import Generator
from bridge.replicas.output import Output, find_errors
from bridge.vllm.serving import api, routing

CLOSE_SECONDS = 10.0  # for vLLM to end its processes in good order, shared memory removed; then it kills them


class Replica:
    """Methods are called through Ray, many at a time, on one event loop."""

    def __init__(self, index: int, config: ReplicaConfig, *, serves_folder: bool) -> None:
        """`serves_folder`: whether it may generate before the first sync, with the weights of the model folder."""
        sys.path.insert(0, str(Path(__file__).parents[2]))  # vLLM's workers inherit it: a user's bridge.py is not taken for ours
        self.index, self.config = index, config
        self._versions = {0: FOLDER_VERSION} if serves_folder else dict[int, int]()  # by slot
        self._slot = self._newest = 0  # of the last pause, and of the last sync
        self._state = ReplicaState.SERVING
        self._failure = ""
        self._num_calls = 0  # of generate, score and trace, also failed ones
        self._in_sync = False  # the lock is held for a sync, or asleep
        self._last_aborted = 0  # number of the last pause whose sync was aborted
        self._is_torn = False  # weights of several versions, after a sync that broke off
        self._given_up: list[str] = []  # kinds of memory that vLLM does without, asleep
        self._spans = Spans()
        self._output = Output()
        self._engine: Any = None

    async def load(self) -> None:
        """Import the modules of `start`, where it has to wait; `start` raises their errors."""
        with suppress(Exception):
            api.import_engine()

    async def start(self) -> int:
        """Start the engine; gives this process's id.

        Raises:
            RuntimeError: vLLM did not start; its own error text, that of its child processes included.
        """
        api.prepare_process()
        places.let_gloo_reach_others()
        try:
            with self._output.capture(), api.noticing_failure(self._output.text):
                self._engine = api.build_engine(self.config)
        except (Exception, SystemExit) as error:  # noqa: BLE001 # vLLM raises many types; only the message is used
            text = f"{error}\n{self._output.summary()}"
            raise RuntimeError(f"vLLM did not start for replica {self.index}: {text}") from None
        if self.config.returns_experts and routing.is_captured():
            await self._engine.collective_rpc("megasync_capture_experts")
        self._generator = Generator(
            self._engine,
            self.index,
            self.config.on_update,
            self._serving,
            self._explain,
            returns_experts=self.config.returns_experts,
            returns_support=self.config.returns_support,
            has_slots=self.config.adapter_slots > 1,
        )
        self._watch = asyncio.create_task(self._generator.watch())
        api.yield_cores()
        return os.getpid()

    async def notes(self) -> list[str]:
        """Notes of its processes while they started."""
        return find_notes(self._output.text())

    async def host(self) -> str:
        """Equal to that of other processes that see the same processes."""
        return processes.host_identity()

    async def host_name(self) -> str:
        return socket.gethostname()

    async def generate(self, requests: list[GenerationRequest]) -> list[list[Completion]]:
        """See Generator."""
        self._num_calls += 1
        return await self._generator.generate(requests)

    async def hand_in(self, groups: list[GroupRequest], num_collects: int) -> None:
        """See Generator."""
        await self._generator.hand_in(groups, num_collects)

    async def abort_groups(self, keys: list[int]) -> None:
        """See Generator."""
        await self._generator.abort_groups(keys)

    async def collect(self, seconds: float, number: int) -> Collected:
        """See Generator."""
        self._require_service()
        return await self._generator.collect(seconds, number)

    async def score(self, sequences: list[tuple[int, ...]], num_top: int, slot: int | None = None) -> list[TokenScores]:
        """See Generator."""
        self._num_calls += 1
        return await self._generator.score(sequences, num_top, slot)

    async def trace(self, token_ids: list[int], num_prompt: int, temperature: float, path: str) -> None:
        """Go through a prompt and a given response as if it were sampled, and write every tensor on the way to `path`."""
        self._num_calls += 1
        request = GenerationRequest(
            prompt_ids=tuple(token_ids[:num_prompt]), max_new_tokens=len(token_ids) - num_prompt, temperature=temperature
        )
        await self._engine.collective_rpc("megasync_begin_trace", args=(token_ids, num_prompt))
        written = ""
        try:
            await self._generator.generate([request], keeps_cache=True)
            written = path
        finally:
            await self._engine.collective_rpc("megasync_end_trace", args=(written,))

    async def forget_prefixes(self) -> None:
        """Nothing that was computed before is read again."""
        await self._engine.reset_prefix_cache()

    async def silent_seconds(self) -> float:
        """How long vLLM's engine core has owed an answer; also where another call waits for it."""
        return self._generator.silent_seconds

    async def pause(self, num_calls: int, number: int, *, slot: int = 0) -> None:
        """Take on no new requests, do with the running ones as `ReplicaConfig.on_update` says; asleep, get memory for weights.

        `num_calls`: how many calls of `generate`, `score` and `trace` come before; they may still be on their way. `number`: of
        this pause, or sleep. `slot`: the one that changes, see Generator.
        """
        if self._state is ReplicaState.ASLEEP:
            self._require_not_aborted(number)
            await self._wake([api.WEIGHTS])
            self._require_not_aborted(number)  # the sync may have ended meanwhile
            self._slot = slot
            self._advance(Event.PAUSE)
            return
        await self._stop(Event.PAUSE, num_calls, number, slot)

    async def sleep(self, num_calls: int, number: int, *, keep_weights: bool) -> None:
        """Pause, then free device memory until resume; weights that are not kept come with the next sync."""
        await self._stop(Event.SLEEP, num_calls, number, self._slot)
        if not keep_weights:
            self._versions.clear()
        await self._engine.reset_prefix_cache()
        await api.sleep(self._engine, keep_weights=keep_weights)
        self._given_up = [api.WEIGHTS, api.CACHES]

    async def _stop(self, event: Event, num_calls: int, number: int, slot: int) -> None:
        while self._num_calls < num_calls:  # they are on their way here
            await asyncio.sleep(1e-3)
        await self._generator.acquire_for_sync()
        self._in_sync = True
        before = self._state
        try:
            self._require_service()
            self._require_not_aborted(number)
            self._slot = slot
            self._advance(event)
            if before is not ReplicaState.STALE:
                await self._generator.pause(self._slot, drain=event is Event.SLEEP)
            elif self.config.adapter_slots > 1:
                await self._generator.give_up(self._slot)
        except BaseException:
            self._leave_sync()
            if self._state is not ReplicaState.FAILED:
                self._state = before
            raise

    async def _wake(self, kinds: list[str]) -> None:
        """Get these kinds of memory back, as far as they were given up."""
        wanted = [kind for kind in kinds if kind in self._given_up]
        if wanted:
            await api.wake(self._engine, wanted)
            self._given_up = [kind for kind in self._given_up if kind not in wanted]

    async def begin(self, message: BeginSync) -> list[str]:
        """Offer a manifest to every worker; the reasons of a refusal, none when it is accepted. Changes no weight.

        Raises:
            RuntimeError: a worker cannot take part, such as where it does not reach a sender.
        """
        self._advance(Event.BEGIN)
        answers = await self._engine.collective_rpc("megasync_begin", args=(asdict(message),))
        if problems := [problem for _, problem in answers if problem]:
            raise RuntimeError("; ".join(dict.fromkeys(problems)))
        return list(dict.fromkeys(reason for reasons, _ in answers for reason in reasons))

    async def receive(self, message: BeginSync) -> None:
        """Load the stream of a manifest that was accepted; comes back when every worker has all of it."""
        self._advance(Event.RECEIVE)
        self._generator.is_busy, self._spans = True, Spans()
        with self._spans.measure("update"):
            problems = await self._engine.collective_rpc("megasync_receive", args=(asdict(message),))
        if any(problems):
            raise RuntimeError("; ".join(dict.fromkeys(problem for problem in problems if problem)))
        self._advance(Event.RECEIVED)

    async def commit(self, version: int) -> None:
        """Finish the reload, stamp the version and forget cached prefixes: of requests that are held, with `recomputes_cache`.

        Requests of other slots keep theirs.
        """
        has_slots = self.config.adapter_slots > 1
        holds = has_slots or self.config.on_update == "continue"
        recompute = holds and self.config.recomputes_cache and not has_slots
        adapter = self.config.adapter_rank > 0
        with self._spans.measure("finish"):
            is_reset = await api.finish_update(self._engine, version, adapter=adapter, recompute=recompute)
            if not is_reset and not holds:
                raise RuntimeError(f"replica {self.index} could not reset its prefix cache")
        self._advance(Event.COMMIT)
        self._generator.is_busy = False
        self._newest, self._is_torn = self._slot, False
        self._versions[self._newest] = version

    async def resume(self) -> None:
        resumed = next_state(self._state, Event.RESUME)
        await self._wake(self._given_up)
        await self._generator.resume()
        self._state = resumed  # not before: an abort has to find out that this gives no answer
        self._leave_sync()

    async def abort(self, number: int) -> ReplicaState:
        """Leave the sync of the pause of this `number`, which may be on its way here; how the replica stands from now on.

        Raises:
            RuntimeError: another sync cannot replace the weights that it received in part.
        """
        self._last_aborted = number
        self._notice_death()
        before, self._state = self._state, next_state(self._state, Event.ABORT)
        if self._state is ReplicaState.STALE and before is not ReplicaState.STALE:
            self._is_torn = True
            self._versions.clear()
            await self._engine.collective_rpc("megasync_break_off")
            self._generator.is_busy = False
        elif before is ReplicaState.PAUSED and self._is_torn:
            self._state = ReplicaState.STALE
        elif before is ReplicaState.PAUSED:
            await self._wake(self._given_up)
            if not self._versions:
                await self._engine.resume_generation()
            else:
                await self._generator.resume()
        if self._state is not ReplicaState.ASLEEP:
            self._leave_sync()
        return self._state

    async def sync_spans(self) -> list[StageSpan]:
        """Stages of the last sync in this replica, for the timeline."""
        return self._spans.taken

    async def loader_fallback(self) -> dict[str, str]:
        """Layers of the first worker that vLLM's loader takes: see SyncReport."""
        answers = await self._engine.collective_rpc("megasync_loader_fallback")
        return dict(answers[0])

    async def take_speculation(self) -> Speculation:
        """Since the last call."""
        return await api.take_speculation(self._engine)

    async def memory_bytes(self) -> tuple[int, int]:
        """The largest peak of a worker's resident memory, and the most that is taken of a worker's GPU."""
        host, device = zip(*await self._engine.collective_rpc("megasync_memory_bytes"), strict=True)
        return max(host), max(device)

    async def read_digests(self) -> dict[str, int]:
        """digest.digest_value of every tensor that the replica holds."""
        return dict((await self._engine.collective_rpc("megasync_read_digests"))[0])

    async def close(self) -> None:
        """Stop the engine and its processes."""
        if self._engine is not None:
            api.stop_engine(self._engine, CLOSE_SECONDS)
        processes.remove_sockets(os.getpid())

    def _leave_sync(self) -> None:
        if self._in_sync:
            self._in_sync = False
            self._generator.lock.release()

    def _advance(self, event: Event) -> None:
        self._state = next_state(self._state, event)

    def _notice_death(self) -> None:
        if self._engine.errored and self._state is not ReplicaState.FAILED:
            self._advance(Event.DIE)
            self._failure = f"vLLM's processes ended: {'; '.join(find_errors(self._output.text())) or 'without a word'}"

    def _explain(self, error: Exception) -> Exception:
        """The error to raise instead of `error`, which a request met."""
        self._notice_death()
        if self._engine.errored:
            return RuntimeError(f"vLLM died in replica {self.index}: {error}\n{self._output.summary()}")
        return error

    def _require_service(self) -> None:
        self._notice_death()
        if self._state is ReplicaState.FAILED:
            remedy = "replace it (ReplicaPool.replace) and publish again"
            raise RuntimeError(f"replica {self.index} is out of service ({self._failure}); {remedy}")

    def _require_not_aborted(self, number: int) -> None:
        if number <= self._last_aborted:
            raise RuntimeError(f"replica {self.index}: the sync was aborted before its pause had its turn")

    @property
    def version(self) -> int | None:
        """The one in the first slot, if there is one."""
        return self._versions.get(0)

    def _serving(self, slot: int | None) -> tuple[int, int]:
        """The version in this slot, None: in that of the last sync, and the slot of its adapter, or NO_ADAPTER.

        Raises:
            NotServingError: nothing may be generated from it before the next sync.
        """
        self._require_service()
        slot = self._newest if slot is None else slot
        if slot == NO_ADAPTER and self.config.adapter_rank and not self._is_torn:
            return FOLDER_VERSION, NO_ADAPTER
        if slot not in self._versions:
            raise NotServingError(f"replica {self.index} has no weights and waits for a publish before it can generate")
        version = self._versions[slot]
        return version, slot if self.config.adapter_rank and version != FOLDER_VERSION else NO_ADAPTER
