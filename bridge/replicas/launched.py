"""Actors of replicas: launched all at once, ended with all of their processes, and waited for.

A wait has a limit, or lasts as long as they give signs of life; its error names the replicas that did not answer. Leaves out
which replicas are wanted (actors.py) and on which nodes they are (places.py).
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import ray
import torch
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.placement_group import remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from bridge import processes
from bridge.config import ReplicaConfig
from bridge.messages import name_replicas
from bridge.replicas import places
from bridge.replicas.replica import Replica
from bridge.vllm.serving import api

CLOSE_SECONDS = 40.0  # longer than the replica gives vLLM
SIGN_SECONDS = 5.0  # for an actor that is to close to give a sign of life
RAY_SECONDS = 5.0  # for Ray to kill one
PING_SECONDS = 1.0
# vLLM's text where a signal has ended an engine while it started (vllm/v1/engine/utils.py:wait_for_engine_startup). Without a
# process where its exit code could not be read yet: its pipe closes a moment before.
KILLED = re.compile(r"Failed core proc\(s\): \{(\}|.*: -\d+)")
MAX_CALLS = 100_000  # that an actor runs at a time; Ray queues any more, also a `resume` that all of these wait for
UNSTARTED_CLOSE_SECONDS = 3.0  # an actor in the midst of starting cannot answer


class ReplicaDiedError(RuntimeError):
    """The actor of a replica, or its engine, was killed, or hangs: another start may be well."""


def no_answer(replicas: Sequence[int], what: str, seconds: float) -> str:
    """The error of a wait."""
    return f"{name_replicas(replicas)} gave no answer for {seconds:g} s to {what}"


def gather(refs: list[Any], timeout: float | None = None, replicas: Sequence[int] = (), what: str = "a call") -> list[Any]:
    """Wait for all, then ray.get with the actor's own error, without Ray's wrapping.

    `replicas`, as many as `refs`, and `what` they were asked for are named in errors.

    Raises:
        ReplicaDiedError: an actor died, or the engine that it was starting was killed.
        RuntimeError: an actor raised, or did not answer in time, or Ray has lost its answer.
    """
    finished, waiting = ray.wait(refs, num_returns=len(refs), timeout=timeout) if refs else ([], [])
    try:
        values = dict(zip(finished, ray.get(finished), strict=True))
    except RayTaskError as error:
        kind = ReplicaDiedError if KILLED.search(str(error.cause)) else RuntimeError
        raise kind(str(error.cause)) from None
    except RayActorError as error:
        raise ReplicaDiedError(f"a replica's actor died: {error}") from None
    except RayError as error:  # of a node that is lost with the answer, of memory, of an actor's environment ...
        raise RuntimeError(f"Ray has no answer of a replica: {type(error).__name__}: {error}") from None
    if waiting:
        late = [replica for replica, ref in zip(replicas, refs, strict=False) if ref in waiting]
        raise RuntimeError(no_answer(late, what, timeout or 0.0))
    return [values[ref] for ref in refs]


def wait_while_alive(calls: Mapping[int, Any], ask: Callable[[int], Any], limit_seconds: float, what: str) -> None:
    """Until all `calls`, references by replica, are done, however long that takes, for as long as vLLM gives signs of life.

    `ask`: a reference to how long the replica's vLLM has owed an answer.

    Raises:
        ReplicaDiedError: one gave none for so long, or died.
        RuntimeError: one failed.
    """
    pings: dict[int, tuple[Any, float]] = {}  # those on their way, each with when it was sent
    waiting = list(calls.values())
    while waiting:
        finished, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=PING_SECONDS)
        gather(finished)
        late = [replica for replica, ref in calls.items() if ref in waiting]
        silent = [replica for replica in late if replica in pings and _is_silent(*pings[replica], limit_seconds)]
        if silent:
            raise ReplicaDiedError(no_answer(silent, what, limit_seconds))
        for replica in late:
            if replica not in pings or ray.wait([pings[replica][0]], timeout=0)[0]:
                pings[replica] = ask(replica), time.monotonic()


def _is_silent(ping: Any, sent_seconds: float, limit_seconds: float) -> bool:
    """For too long: the actor, or, by its answer, its vLLM."""
    if ray.wait([ping], timeout=0)[0]:
        return bool(gather([ping])[0] > limit_seconds)
    return time.monotonic() - sent_seconds > limit_seconds


@dataclass
class ReplicaActor:
    """One actor, from its launch until it is killed."""

    handle: Any
    started: Any = None  # Ray's reference to the answer of its start, once that has begun
    pid: int = 0  # once it has started
    shared_memory: set[str] = field(default_factory=set)  # vLLM's, for when it is killed
    family: set[int] = field(default_factory=set)  # ids of its processes
    num_sent: int = 0  # calls to generate
    num_collects: int = 0  # calls to collect
    is_here: bool = False  # on this host, so that what its processes leave is ours to remove
    host: str = ""  # its name
    manifest_digest: str = ""  # of the manifest that its workers hold


class ActorLauncher:
    """Launches actors, each an AsyncLLM of `tensor_parallel` workers, and ends them; several threads may."""

    replica_class: type[Replica] = Replica
    gather = staticmethod(gather)

    def __init__(self, config: ReplicaConfig) -> None:
        self.config = config
        self._is_closed = False
        self._notes: list[str] = []  # notes and errors of replicas
        self._groups: dict[int, Any] = {}  # the placement group of each replica, on several nodes

    def _release(self, *replicas: int) -> None:
        """Their places are free for others."""
        for replica in replicas:
            if (group := self._groups.pop(replica, None)) is not None:
                remove_placement_group(group)

    def _begin_launch(self, replicas: Sequence[int], *, serves_folder: bool) -> dict[int, ReplicaActor]:
        """Actors by number, that start by themselves. On devices that they share with the trainer, if there is no room for both,
        they only import, since it may still have the memory. Does not wait.
        """
        cuda = torch.cuda.is_available()
        if not self.config.devices and (new := [replica for replica in replicas if replica not in self._groups]):
            self._groups |= places.reserve(new, self.config.tensor_parallel, cuda=cuda)
        actor_class: Any = ray.remote(self.replica_class)
        actors = {}
        for replica in replicas:
            options = placement_options(self.config, replica, cuda=cuda) | {"num_cpus": 0, "max_concurrency": MAX_CALLS}
            if replica in self._groups:
                options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(self._groups[replica], 0)
            handle = actor_class.options(**options).remote(replica, self.config, serves_folder=serves_folder)
            actors[replica] = ReplicaActor(handle)
            if self.config.shares_devices and not self.config.has_room:
                handle.load.remote()
            else:
                actors[replica].started = handle.start.remote()
        return actors

    def _finish_launch(self, actors: dict[int, ReplicaActor]) -> None:
        """Wait until all have started; where one does not start, none is left."""
        try:
            pids = self._wait_for_start([actor.started or actor.handle.start.remote() for actor in actors.values()])
            hosts = self.gather([actor.handle.host.remote() for actor in actors.values()])
            names = self.gather([actor.handle.host_name.remote() for actor in actors.values()])
            notes = self.gather([actor.handle.notes.remote() for actor in actors.values()])
            self._notes += [f"replica {replica}: {note}" for replica, of_it in zip(actors, notes, strict=True) for note in of_it]
            for actor, pid, host, name in zip(actors.values(), pids, hosts, names, strict=True):
                actor.pid, actor.is_here, actor.host = pid, host == processes.host_identity(), name
                if actor.is_here:
                    actor.shared_memory = processes.shared_memory_below(pid)
                    actor.family = {pid, *(child.pid for child in processes.descendants(pid))}
        except BaseException:
            self._end(list(actors.values()))
            raise

    def _wait_for_start(self, refs: list[Any]) -> list[int]:
        """The actors' process ids. The first error ends the wait for the others."""
        deadline = time.monotonic() + self.config.start_timeout_seconds
        waiting = refs
        while waiting and time.monotonic() < deadline and not self._is_closed:
            finished, waiting = ray.wait(waiting, timeout=min(1.0, max(0.0, deadline - time.monotonic())))
            self.gather(finished)
            if waiting and (lost := places.lost_ray()):
                raise RuntimeError(lost)
        if waiting:
            raise RuntimeError(
                f"{len(waiting)} of {len(refs)} replicas did not start within {self.config.start_timeout_seconds:g} "
                "seconds (rollout.start_timeout_seconds)"
            )
        return self.gather(refs)

    def _end(self, actors: list[ReplicaActor], seconds: float = CLOSE_SECONDS) -> None:
        """Ask to close, wait `seconds`, kill, then wait until the processes are gone; their children end with them (api.py).

        Actors without a sign of life, such as on a node that is cut off, are not waited for. Ray may be gone before: torchrun
        sends SIGTERM to the process group of a rank, and its Ray is in it. Then nobody else kills an actor.
        """
        if not actors:
            return
        seconds = seconds if all(actor.pid for actor in actors) else UNSTARTED_CLOSE_SECONDS
        signs = [actor.handle.host_name.remote() for actor in actors]
        calls = {sign: actor.handle.close.remote() for sign, actor in zip(signs, actors, strict=True)}
        alive, _ = ray.wait(signs, num_returns=len(signs), timeout=min(seconds, SIGN_SECONDS))
        closing = [calls[sign] for sign in alive]
        if closing:
            ray.wait(closing, num_returns=len(closing), timeout=seconds)
        for actor in actors:
            ray.kill(actor.handle)
        begin, here = time.monotonic(), [actor.pid for actor in actors if actor.is_here]
        while (left := list(filter(psutil.pid_exists, here))) and time.monotonic() < begin + CLOSE_SECONDS:
            if time.monotonic() > begin + RAY_SECONDS:
                if not (alive := list(filter(processes.is_alive, left))):
                    break  # zombies, of a parent that is gone
                for pid in alive:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
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
