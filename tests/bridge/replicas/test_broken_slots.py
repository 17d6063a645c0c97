"""Samples that a replica with several slots holds behind a sync that breaks off. An engine that never ends a request, no vLLM.

python -m pytest tests/bridge/replicas/test_broken_slots.py
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from bridge.config import ReplicaConfig
from bridge.generation import GenerationRequest
from bridge.messages import BeginSync, ReplicaState
from bridge.replicas.generator import Generator, RunningSample
from bridge.replicas.replica import Replica

MESSAGE = BeginSync(3, "d", None, (1,), 1, ((),), 0, 0, 1, 0, True, 1.0, adapter={}, slot=1)


class Unending:
    """What a Replica calls of an AsyncLLM during a sync. `problem`: of the next stream."""

    def __init__(self) -> None:
        self.errored, self.problem, self.aborted = False, "", list[str]()
        self.engine_core = SimpleNamespace(pause_scheduler_async=self.nothing, call_utility_async=self.nothing)
        self.resume_generation = self.reset_prefix_cache = self.nothing

    async def nothing(self, *_: Any, **__: Any) -> bool:
        return True

    async def collective_rpc(self, name: str, args: Sequence[Any] = ()) -> list[str]:
        return [self.problem if name == "megasync_receive" else ""]

    async def abort(self, names: list[str], *, internal: bool) -> None:
        assert internal
        self.aborted += names


@pytest.mark.parametrize("is_collected", [False, True])
def test_samples_end_with_an_error_where_their_slot_changes(*, is_collected: bool) -> None:
    """The sync of slot 1 breaks off, the next one is into slot 0; samples of slot 2 are held through both."""

    async def run() -> None:
        replica, engine = Replica(0, ReplicaConfig("x", adapter_rank=8, adapter_slots=4), serves_folder=True), Unending()
        generator = Generator(engine, 0, "drain", replica._serving, replica._explain, has_slots=True)
        replica._engine, replica._generator, replica._versions = engine, generator, {0: 1, 1: 2, 2: 3}
        answers = {slot: asyncio.get_running_loop().create_future() for slot in (0, 2)}
        for slot, answer in answers.items():
            request = GenerationRequest(prompt_ids=(1,), slot=slot)
            generator._live[f"of {slot}"] = RunningSample(request, answer=None if is_collected else answer, slot=slot)
        engine.problem = "late"
        await replica.pause(0, 1, slot=1)
        with pytest.raises(RuntimeError, match="late"):
            await replica.receive(MESSAGE)
        assert await replica.abort(1) is ReplicaState.STALE
        await replica.pause(0, 2, slot=1)  # the same slot again: nothing of it was held
        assert await replica.abort(2) is ReplicaState.STALE and engine.aborted == []
        engine.problem = ""
        await replica.pause(0, 3, slot=0)
        assert engine.aborted == ["of 0"] and [*generator._live] == ["of 2"]
        with pytest.raises(RuntimeError, match="a sync that broke off"):
            await (generator.collect(0.0, 1) if is_collected else answers[0])
        assert not answers[2].done()

    asyncio.run(run())
