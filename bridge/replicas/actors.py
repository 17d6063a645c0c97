"""The Ray actors behind a pool of replicas: started together, called, restarted, and ended with all their processes.

Leaves out ray.init (the caller's), what is asked of them (pool.py), waiting for answers (answers.py) and what they do
(replica.py).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import psutil
import ray
import torch
from ray.util.placement_group import remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from bridge import processes
from bridge.config import ReplicaConfig
from bridge.replicas import places
from bridge.replicas.answers import gather
from bridge.replicas.replica import Replica
from bridge.vllm.serving import api

CLOSE_SECONDS = 40.0  # longer than the replica gives vLLM
UNSTARTED_CLOSE_SECONDS = 3.0  # an actor in the midst of starting cannot answer
START_ATTEMPTS = 3  # of a replica that is started anew


class TooFewReplicasError(RuntimeError):
    """Fewer replicas run than are needed, and no more came in time."""


@dataclass
class ReplicaActor:
    """One actor, from its launch until it is killed."""

    handle: Any
    pid: int = 0  # once it has started
    shared_memory: set[str] = field(default_factory=set)  # vLLM's, for when it is killed
    family: set[int] = field(default_factory=set)  # ids of its processes
    num_sent: int = 0  # calls to generate
    is_here: bool = False  # on this host, so that what its processes leave is ours to remove
    manifest_digest: str = ""  # of the manifest that its workers hold


class ReplicaActors:
    """`num_replicas` actors, each an AsyncLLM of `tensor_parallel` workers. Use `start`."""

    replica_class: type[Replica] = Replica
    gather = staticmethod(gather)

    def __init__(self, config: ReplicaConfig, num_replicas: int) -> None:
        self.config, self.num_replicas = config, num_replicas
        self.members: list[int] = []  # numbers of those that are asked, and brought to new weights
        self._actors: dict[int, ReplicaActor] = {}  # by number; without those that are not there
        self._fresh: dict[int, ReplicaActor] = {}  # started in the background, until they rejoin
        self._starting: dict[int, ReplicaActor] = {}
        self._restarts: dict[int, threading.Thread] = {}
        self._deferred: list[int] = []  # to be started by `rejoin`
        self._start_problems: dict[int, str] = {}  # the last one of each
        self._unreported_errors: list[str] = []
        self._is_closed = False
        self._group: Any = None  # the replicas' placement group, on several nodes

    @classmethod
    def start(cls, config: ReplicaConfig, num_replicas: int) -> Self:
        """Start all replicas at once, in the Ray that is already initialised.

        Raises:
            RuntimeError: a replica did not start, with vLLM's own error; nothing is left running.
            ValueError: the cluster has too few GPUs.
        """
        actors = cls(config, num_replicas)
        cuda, width = torch.cuda.is_available(), config.tensor_parallel
        if cuda and not config.devices and (problem := places.room_problem(places.free_gpus(), num_replicas, width)):
            raise ValueError(problem)
        if not config.devices:
            actors._group = places.reserve(num_replicas, width, cuda=cuda)
        try:
            actors._actors = actors._launch(range(num_replicas), serves_folder=True)
        except BaseException:
            actors._release()
            raise
        actors.members = list(range(num_replicas))
        return actors

    def restart(self, *replicas: int) -> None:
        """New actors in the place of those that failed or died. They generate after the next publish."""
        self._end([self._actors.pop(replica) for replica in replicas if replica in self._actors])
        self._actors |= self._launch(replicas, serves_folder=False)

    def replace(self, *replicas: int) -> None:
        """As `restart`, in the background: new actors wait for `rejoin`. Nothing where that has begun already.

        On devices that the trainer shares they start within `rejoin`, since now the trainer may have the memory.
        """
        for replica in replicas:
            former = self._actors.pop(replica, None)
            if former is not None and not self._is_closed:
                self._restarts[replica] = threading.Thread(target=self._replace, args=(replica, former), daemon=True)
                self._restarts[replica].start()

    def _replace(self, replica: int, former: ReplicaActor) -> None:
        try:
            self._end([former], seconds=UNSTARTED_CLOSE_SECONDS)  # it may be hung
        except Exception as error:  # noqa: BLE001 # Ray may be gone: starting tells
            self._unreported_errors.append(f"replica {replica} could not be ended: {error}")
        if self.config.shares_devices:
            self._deferred.append(replica)
        else:
            self._start_again(replica)

    def _start_again(self, replica: int) -> None:
        """START_ATTEMPTS times at most."""
        for attempt in range(1, START_ATTEMPTS + 1):
            if self._is_closed:
                return
            try:
                self._fresh |= self._launch([replica], serves_folder=False)
            except Exception as error:  # noqa: BLE001 # said by who misses it
                self._start_problems[replica] = str(error)
                then = "it is tried again" if attempt < START_ATTEMPTS else "the run goes on without it"
                failed = f"replica {replica} did not start, attempt {attempt} of {START_ATTEMPTS}"
                self._unreported_errors.append(f"{failed}; {then}: {error}")
            else:
                return

    def take_start_problems(self) -> list[str]:
        """What was not told yet of replicas that did not start anew."""
        told, self._unreported_errors = self._unreported_errors, []
        return told

    def rejoin(self, at_least: int, seconds: float) -> bool:
        """Let those that were started anew be members, once there are `at_least` so many in all; whether the members changed.

        Raises:
            TooFewReplicasError: there were not within `seconds`; with the errors of those that did not start.
        """
        deadline = time.monotonic() + seconds
        for thread in self._restarts.values() if self.config.shares_devices else ():
            thread.join(CLOSE_SECONDS)
        self._start_deferred()
        while True:
            is_hopeless = not any(thread.is_alive() for thread in self._restarts.values())  # before the count, which they raise
            if len(self._actors) + len(self._fresh) >= at_least:
                break
            if is_hopeless or time.monotonic() > deadline:
                problems = [f"replica {replica}: {text}" for replica, text in self._start_problems.items()]
                there = f"{len(self._actors) + len(self._fresh)} of {self.num_replicas} replicas run, {at_least} are needed"
                late = f"the others did not start within {seconds:g} s (rollout.restart_timeout_seconds)"
                raise TooFewReplicasError("; ".join([there, *(problems or [late])]))
            time.sleep(0.1)
        for replica in list(self._fresh):
            self._actors[replica] = self._fresh.pop(replica)
        former, self.members = self.members, sorted(self._actors)
        return former != self.members

    def _start_deferred(self) -> None:
        """All at once, since the trainer has given the devices up."""
        deferred = [self._deferred.pop() for _ in list(self._deferred)]
        threads = [threading.Thread(target=self._start_again, args=(replica,), daemon=True) for replica in deferred]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def close(self) -> None:
        """Stop everything, the engines' processes too. Safe to repeat."""
        self._is_closed = True
        self._end([*self._actors.values(), *self._fresh.values(), *self._starting.values()])
        for thread in self._restarts.values():
            thread.join(CLOSE_SECONDS)
        self._end(list(self._fresh.values()))
        self._actors, self._fresh = {}, {}
        self._release()

    def _release(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            remove_placement_group(group)

    def _call(
        self, method: Callable[[Any], Any], timeout: float | None, replicas: Sequence[int] | None = None, what: str = "a call"
    ) -> list[Any]:
        chosen = self.members if replicas is None else replicas
        return self.gather([method(actor.handle) for actor in self._chosen(chosen)], timeout, chosen, what)

    def _chosen(self, replicas: Sequence[int] | None = None) -> list[ReplicaActor]:
        """The actors of these replicas, None: of all members. RuntimeError where one was not started again."""
        chosen = self.members if replicas is None else replicas
        missing = [replica for replica in chosen if replica not in self._actors]
        if missing:
            raise RuntimeError(f"replica {missing[0]} is not there: it was to be restarted and did not start")
        return [self._actors[replica] for replica in chosen]

    def _launch(self, replicas: Sequence[int], *, serves_folder: bool) -> dict[int, ReplicaActor]:
        """Started actors by number; where one does not start, none is left."""
        cuda = torch.cuda.is_available()
        actor_class: Any = ray.remote(self.replica_class)
        actors = {}
        for replica in replicas:
            options = placement_options(self.config, replica, cuda=cuda) | {"num_cpus": 0, "max_concurrency": 1000}
            if self._group is not None:
                options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(self._group, replica)
            handle = actor_class.options(**options).remote(replica, self.config, serves_folder=serves_folder)
            actors[replica] = self._starting[replica] = ReplicaActor(handle)
        try:
            pids = self._wait_for_start([actor.handle.start.remote() for actor in actors.values()])
            hosts = self.gather([actor.handle.host.remote() for actor in actors.values()])
            for actor, pid, host in zip(actors.values(), pids, hosts, strict=True):
                actor.pid, actor.is_here = pid, host == processes.host_identity()
                if actor.is_here:
                    actor.shared_memory = processes.shared_memory_below(pid)
                    actor.family = {pid, *(child.pid for child in processes.descendants(pid))}
        except BaseException:
            self._end(list(actors.values()))
            raise
        finally:
            for replica in replicas:
                self._starting.pop(replica, None)
        return actors

    def _wait_for_start(self, refs: list[Any]) -> list[int]:
        """The actors' process ids. The first error ends the wait for the others."""
        deadline = time.monotonic() + self.config.start_timeout_seconds
        waiting = refs
        while waiting and time.monotonic() < deadline and not self._is_closed:
            finished, waiting = ray.wait(waiting, timeout=min(1.0, max(0.0, deadline - time.monotonic())))
            self.gather(finished)
        if waiting:
            raise RuntimeError(
                f"{len(waiting)} of {len(refs)} replicas did not start within {self.config.start_timeout_seconds:g} "
                "seconds (rollout.start_timeout_seconds)"
            )
        return self.gather(refs)

    def _end(self, actors: list[ReplicaActor], seconds: float = CLOSE_SECONDS) -> None:
        """Ask nicely, for so long, then kill, then wait until the processes are gone; their children end with them (api.py)."""
        if not actors:
            return
        seconds = seconds if all(actor.pid for actor in actors) else UNSTARTED_CLOSE_SECONDS
        ray.wait([actor.handle.close.remote() for actor in actors], num_returns=len(actors), timeout=seconds)
        for actor in actors:
            ray.kill(actor.handle)
        deadline = time.monotonic() + CLOSE_SECONDS
        while any(psutil.pid_exists(actor.pid) for actor in actors if actor.is_here) and time.monotonic() < deadline:
            time.sleep(0.02)
        for actor in (each for each in actors if each.is_here):
            # left when Ray killed the processes before they could remove it
            for path in actor.shared_memory | processes.cuda_memory(actor.family):
                Path(path).unlink(missing_ok=True)
            processes.remove_sockets(actor.pid)


def placement_options(config: ReplicaConfig, replica: int, *, cuda: bool) -> dict[str, Any]:
    """Ray's options for a replica's actor: on this node and the GPUs that `config.devices` names, or on GPUs of its own."""
    variables = api.environment(cuda=cuda)
    if not config.devices:
        return {"num_gpus": config.tensor_parallel if cuda else 0, "runtime_env": {"env_vars": variables}}
    return {
        "num_gpus": 0,
        "runtime_env": {"env_vars": variables | {"CUDA_VISIBLE_DEVICES": config.devices[replica]}},
        "scheduling_strategy": NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False),
    }
