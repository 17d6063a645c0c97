"""The training program of a fault run: megasync.train with a replica that signals itself once, and with a record.

The replica of the case sends the signal to its own engine core or actor when it comes to the phase. What is started, committed
and trained on is noted. Leaves out faults of ranks, which come from outside (watch.py), and of vLLM workers (worker.py).

    MEGASYNC_BENCH_FAULTS=FOLDER python -m megasync.launch.torchrun --nproc-per-node 2 -m tests.faults.program FILE.yaml
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import threading
import time
from typing import TYPE_CHECKING, Any, Self

from bridge.config import ReplicaConfig
from bridge.generation import GroupRequest
from bridge.replicas.pool import ReplicaPool
from bridge.replicas.replica import Replica
from megasync import train
from megasync.episodes.task import EpisodeResult
from megasync.run import replica_start
from tests.faults import orders
from megasync.launch.processes import run_and_leave
from megasync.rollouts import rollout
from megasync.rollouts.stream import RolloutStream

if TYPE_CHECKING:
    from bridge.generation import Completion
    from megasync.rollouts.group import Group
    from megasync.rollouts.progress import Progress

WORKER_EXTENSION = "tests.faults.worker.FaultyWorkerExtension"
GENERATING_SECONDS = 0.03  # after groups were handed in
STARTING_SECONDS = 2.0  # after the start began; at the engine core as soon as it is there


class FaultyReplica(Replica):
    """Gets its signal in the phase of the case, once in a run."""

    async def start(self) -> int:
        orders.note(orders.STARTS, replica=self.index, pid=os.getpid())
        self._case = orders.read_case()
        if self.version is None and orders.is_due(self._case, self.index, "starting", None):
            threading.Thread(target=self._signal_while_starting, daemon=True).start()
        return await super().start()

    def _signal_while_starting(self) -> None:
        time.sleep(STARTING_SECONDS)
        while True:
            try:
                return orders.signal_replica(self._case)
            except (ValueError, KeyError):  # there is no core yet
                time.sleep(0.01)

    async def hand_in(self, groups: list[GroupRequest], num_collects: int) -> None:
        if self._is_due_while_generating():
            asyncio.get_running_loop().call_later(GENERATING_SECONDS, orders.signal_replica, self._case)
        await super().hand_in(groups, num_collects)

    def _is_due_while_generating(self) -> bool:
        """Where a later start is to be signalled, this process ends at once, so that there is one."""
        if self._case.phase == "starting" and self._case.number == self.index and self.version == self._case.version:
            os._exit(1)
        return orders.is_due(self._case, self.index, "generating", self.version)

    async def pause(self, num_calls: int, number: int, *, slot: int = 0) -> None:
        if self.version is not None and orders.is_due(self._case, self.index, "pausing", self.version + 1):
            orders.signal_replica(self._case)
        await super().pause(num_calls, number, slot=slot)

    async def commit(self, version: int) -> None:
        if orders.is_due(self._case, self.index, "committing", version):
            orders.signal_replica(self._case)
        await super().commit(version)
        orders.note(orders.COMMITS, replica=self.index, pid=os.getpid(), version=version)


class FaultyPool(ReplicaPool):
    """A pool of FaultyReplicas."""

    replica_class = FaultyReplica

    @classmethod
    def begin_start(cls, config: ReplicaConfig, num_replicas: int) -> Self:
        arguments = {"worker_extension_cls": WORKER_EXTENSION, **config.engine_arguments}
        return super().begin_start(dataclasses.replace(config, engine_arguments=arguments), num_replicas)


class RecordedStream(RolloutStream):
    """Notes what is trained on, token by token."""

    async def restore(self, progress: Progress, step: int) -> None:
        await super().restore(progress, step)
        orders.note(orders.TRAINED, begin=self.num_trained)

    async def take(self, step: int) -> list[Group] | None:
        groups = await super().take(step)
        for group in groups or ():
            done = [completion for completion in group.completions if completion is not None]
            samples = [sample for each in done for sample in _recorded(each)]
            orders.note(orders.TRAINED, step=step, ordinal=group.key, prompt=list(group.request.prompt_ids), samples=samples)
        return groups


def _recorded(done: Completion | EpisodeResult) -> list[dict[str, Any]]:
    """Of an episode each branch is a sample, with a prompt of its own and given tokens among those behind it."""
    if not isinstance(done, EpisodeResult):
        arrays = {"tokens": done.token_ids, "log_probs": done.log_probs, "versions": done.weight_versions}
        return [{name: array.tolist() for name, array in arrays.items()}]
    samples = []
    for branch in done.branches:
        rest = slice(branch.prompt_length, None)
        arrays = {"tokens": branch.token_ids[rest], "log_probs": branch.log_probs[rest], "versions": branch.weight_versions[rest]}
        arrays |= {"prompt": branch.token_ids[: branch.prompt_length], "sampled": branch.is_sampled[rest]}
        samples.append({name: array.tolist() for name, array in arrays.items()})
    return samples


if __name__ == "__main__":
    vars(replica_start)["ReplicaPool"], vars(rollout)["RolloutStream"] = FaultyPool, RecordedStream
    run_and_leave(train.main)
