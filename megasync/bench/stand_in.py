"""Replicas that answer at once with responses as long as may be: a ReplicaPool's stand-in for the arrays bench.

What a replica would send of a group is there before, pickled, and becomes arrays as it is asked for. Leaves out Ray, whose
object store holds such messages, and the time that generation takes.
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from bridge.generation import Collected, Completion, Finished, GroupRequest
from megasync.bench.config import ArraysBenchConfig

NUM_REPLICAS = 8
NUM_MESSAGES = 8  # different ones; a group gets one of them
VERSION = 3
VOCABULARY_SIZE = 150_000


def message(sizes: ArraysBenchConfig, number: int) -> bytes:
    """What a replica sends of a group: every response as long as it may be."""
    generator = np.random.default_rng(number)
    shape = (sizes.group_size, sizes.response_tokens)
    tokens = generator.integers(0, VOCABULARY_SIZE, shape, dtype=np.int32)
    log_probs = -generator.random(shape, dtype=np.float32)
    versions = np.full(shape[1], VERSION, np.int32)
    completions = [Completion(ids, probs, versions.copy(), "length") for ids, probs in zip(tokens, log_probs, strict=True)]
    return pickle.dumps(completions, protocol=5)


class _Reference:
    """As ray.ObjectRef."""

    def __init__(self, future: Future[Collected]) -> None:
        self._future = future

    def future(self) -> Future[Collected]:
        return self._future


class StandInPool:
    """What RolloutStream asks of a ReplicaPool. A group comes back with the next call of `collect`."""

    def __init__(self, sizes: ArraysBenchConfig) -> None:
        self.members = list(range(NUM_REPLICAS))
        self._messages = [message(sizes, number) for number in range(NUM_MESSAGES)]
        self._handed: dict[int, list[GroupRequest]] = {replica: [] for replica in self.members}
        self._waiting: dict[int, Future[Collected]] = {}

    async def hand_in(self, replica: int, groups: Sequence[GroupRequest]) -> None:
        self._handed[replica] += groups
        await asyncio.sleep(0)
        if waiting := self._waiting.pop(replica, None):
            waiting.set_result(self._next(replica))

    def collect(self, replica: int, seconds: float) -> Any:  # it has news, or waits for what is handed in
        answer: Future[Collected] = Future()
        if self._handed[replica]:
            answer.set_result(self._next(replica))
        else:
            self._waiting[replica] = answer
        return _Reference(answer)

    def replace(self, *replicas: int) -> None:
        raise AssertionError(f"lost {replicas}")

    def _next(self, replica: int) -> Collected:
        group = self._handed[replica].pop(0)
        completions = pickle.loads(self._messages[group.key % NUM_MESSAGES])  # noqa: S301 # ours
        return Collected(tuple(Finished(group.key, sample, completions[sample]) for sample in group.samples), 0.0)
