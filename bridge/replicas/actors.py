"""The Ray actors behind a pool of replicas: started together, called, restarted, and ended with all their processes.

Leaves out ray.init (the caller's), what is asked of them (pool.py) and what they do (replica.py).
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import ray
import torch
from ray.exceptions import RayActorError, RayTaskError

from bridge.replicas import processes, vllm_api
from bridge.replicas.replica import Replica

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bridge.config import ReplicaConfig

CLOSE_SECONDS = 40.0  # longer than the replica gives vLLM
UNSTARTED_CLOSE_SECONDS = 3.0  # an actor in the midst of starting cannot answer


class ReplicaActors:
    """`num_replicas` actors, each an AsyncLLM of `tensor_parallel` workers. Use `start`."""

    replica_class: type[Replica] = Replica

    def __init__(self, config: ReplicaConfig, num_replicas: int) -> None:
        self.config, self.num_replicas = config, num_replicas
        self._actors: list[Any] = [None] * num_replicas
        self._pids = [0] * num_replicas
        self._shared_memory: list[set[str]] = [set() for _ in range(num_replicas)]  # vLLM's, for when it is killed

    @classmethod
    def start(cls, config: ReplicaConfig, num_replicas: int) -> Self:
        """Start all replicas at once, in the Ray that is already initialised.

        Raises:
            RuntimeError: a replica did not start, with vLLM's own error; nothing is left running.
            ValueError: the cluster has too few GPUs.
        """
        actors = cls(config, num_replicas)
        if torch.cuda.is_available() and not config.devices:
            needed, there = num_replicas * config.tensor_parallel, int(ray.cluster_resources().get("GPU", 0))
            if needed > there:
                raise ValueError(
                    f"rollout.replicas={num_replicas} times rollout.tensor_parallel={config.tensor_parallel} needs "
                    f"{needed} GPUs, Ray has {there}; lower one of them"
                )
        try:
            actors._launch(range(num_replicas), serves_folder=True)
        except BaseException:
            actors.close()
            raise
        return actors

    def restart(self, *replicas: int) -> None:
        """New actors in the place of those that failed or died. They generate after the next publish."""
        self._kill(replicas)
        self._launch(replicas, serves_folder=False)

    def close(self) -> None:
        """Stop everything, the engines' processes too. Safe to repeat."""
        self._kill(range(self.num_replicas))

    def _forget(self, replica: int) -> None:
        """What is known of an actor that is about to be replaced by a new one."""

    def gather(self, refs: list[Any], timeout: float | None = None) -> list[Any]:
        """Wait for all, then ray.get with the actor's own error, without Ray's wrapping.

        Raises:
            RuntimeError: an actor raised, died, or did not answer in time.
        """
        finished, waiting = ray.wait(refs, num_returns=len(refs), timeout=timeout) if refs else ([], [])
        try:
            values = dict(zip(finished, ray.get(finished), strict=True))
        except RayTaskError as error:
            raise RuntimeError(str(error.cause)) from None
        except RayActorError as error:
            raise RuntimeError(f"a replica's actor died: {error}") from None
        if waiting:
            raise RuntimeError(f"{len(waiting)} replicas gave no answer within {timeout:g} seconds")
        return [values[ref] for ref in refs]

    def _call(
        self, method: Callable[[Any], Any], timeout: float | None, replicas: Sequence[int] | None = None
    ) -> list[Any]:
        chosen = range(self.num_replicas) if replicas is None else replicas
        return self.gather([method(self._actors[replica]) for replica in chosen], timeout)

    def _launch(self, replicas: Sequence[int], *, serves_folder: bool) -> None:
        cuda, devices = torch.cuda.is_available(), self.config.devices
        actor_class: Any = ray.remote(self.replica_class)
        for replica in replicas:
            self._forget(replica)
            own = {"CUDA_VISIBLE_DEVICES": devices[replica]} if devices else {}
            options = {
                "num_cpus": 0,
                "num_gpus": self.config.tensor_parallel if cuda and not devices else 0,
                "runtime_env": {"env_vars": vllm_api.environment(cuda=cuda) | own},
                "max_concurrency": 1000,
            }
            actor = actor_class.options(**options).remote(replica, self.config, serves_folder=serves_folder)
            self._actors[replica] = actor
        refs = [self._actors[replica].start.remote() for replica in replicas]
        for replica, pid in zip(replicas, self._wait_for_start(refs), strict=True):
            self._pids[replica] = pid
            self._shared_memory[replica] = processes.shared_memory_below(pid)

    def _wait_for_start(self, refs: list[Any]) -> list[int]:
        """The actors' process ids. The first error ends the wait for the others."""
        deadline = time.monotonic() + self.config.start_timeout_seconds
        waiting = refs
        while waiting and time.monotonic() < deadline:
            finished, waiting = ray.wait(waiting, timeout=min(1.0, max(0.0, deadline - time.monotonic())))
            self.gather(finished)
        if waiting:
            raise RuntimeError(
                f"{len(waiting)} of {len(refs)} replicas did not start within {self.config.start_timeout_seconds:g} "
                "seconds (ReplicaConfig.start_timeout_seconds)"
            )
        return self.gather(refs)

    def _kill(self, replicas: Sequence[int]) -> None:
        """Ask nicely, then kill, then wait until the processes are gone; their children end with them (vllm_api)."""
        actors = {replica: self._actors[replica] for replica in replicas if self._actors[replica] is not None}
        started = all(self._pids[replica] for replica in actors)
        refs = [actor.close.remote() for actor in actors.values()]
        if refs:
            ray.wait(refs, num_returns=len(refs), timeout=CLOSE_SECONDS if started else UNSTARTED_CLOSE_SECONDS)
        for replica, actor in actors.items():
            ray.kill(actor)
            self._actors[replica] = None
        deadline = time.monotonic() + CLOSE_SECONDS
        while any(self._pids[replica] and processes.is_alive(self._pids[replica]) for replica in replicas):
            if time.monotonic() > deadline:
                break
            time.sleep(0.02)
        for replica in replicas:
            for path in self._shared_memory[replica]:  # left when Ray killed vLLM's processes before they could
                Path(path).unlink(missing_ok=True)
            processes.remove_sockets(self._pids[replica])
            self._pids[replica] = 0
            self._shared_memory[replica] = set()
