"""Samples on a replica that gives no answer. Actors of a real Ray, without vLLM.

python -m pytest tests/megasync/service/test_sampling.py
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import ray
from tests.megasync.service.desks import sample_body, start

from bridge.config import ReplicaConfig
from bridge.generation import Collected
from bridge.replicas.launched import ReplicaActor
from bridge.replicas.pool import ReplicaPool
from megasync.service.requests import Request, Result
from megasync.service.sampling import Sampling

LIMIT_SECONDS = 60.0


@pytest.mark.usefixtures("local_ray")
def test_samples_of_a_hung_replica_wait_for_another_one(tmp_path: Path) -> None:
    """Those of one that is slow stay with it."""

    class Unanswering:
        """Generates without end. `is_hung`: its vLLM gives no sign of life either."""

        def __init__(self, *, is_hung: bool) -> None:
            self._is_hung = is_hung

        async def generate(self, _: object) -> None:
            await asyncio.Event().wait()

        async def silent_seconds(self) -> float:
            return 2 * LIMIT_SECONDS if self._is_hung else 0.0

        async def collect(self, _seconds: float, _number: int) -> Collected:
            return Collected((), await self.silent_seconds())

    pool = ReplicaPool(ReplicaConfig("nowhere", answer_timeout_seconds=LIMIT_SECONDS), 2)
    actors = {number: ray.remote(Unanswering).remote(is_hung=number == 1) for number in range(2)}
    pool._take_as_members({number: ReplicaActor(actor) for number, actor in actors.items()})
    desk = start(tmp_path)
    slow, hung, later = (desk.submit("asample", sample_body(seed=seed), "") for seed in range(3))

    def finish(request: Request, result: Result) -> None:
        desk.finish_all([(request, result)])

    sampling = Sampling(pool, (), desk, finish)
    desk.queue.take_samples("")
    desk.queue.add(slow)
    desk.queue.add(hung)
    sampling.start(desk.queue.next_work(lambda: {"": 0}).requests, {"": 0})
    assert desk.queue.next_work(dict).kind == "sync"  # once the sample is back
    assert sampling.lost == {1} and (slow.result, hung.result) == (None, None)
    assert desk.queue.take_samples("") == [hung] and hung.num_failures == 1
    desk.queue.add(later)
    desk.queue.add(hung)
    sampling.start(desk.queue.next_work(lambda: {"": 0}).requests, {"": 0})
    assert desk.queue.take_samples("") == [hung] and hung.num_failures == 1, "nothing more is sent to a lost one"
    assert desk.queue.num_open()[1].total() == 2
    for actor in actors.values():
        ray.kill(actor)
    sampling.close()
