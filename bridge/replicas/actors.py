"""The Ray actors behind a pool of replicas: how many are wanted, and which are replaced, join and leave (states.py).

`rejoin` alone changes who the members are, between two syncs. Threads end actors and start others, one thread a number.
Leaves out ray.init (the caller's), how actors start, end and are waited for (launched.py), calls of them (pool.py) and what an
actor does (replica.py).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self

import torch

from bridge.config import ReplicaConfig
from bridge.replicas import places
from bridge.replicas.launched import CLOSE_SECONDS, UNSTARTED_CLOSE_SECONDS, ActorLauncher, ReplicaActor, ReplicaDiedError
from bridge.replicas.states import PRESENT, NumberedReplica, State, choose_wanted

START_ATTEMPTS = 3  # of a replica


class TooFewReplicasError(RuntimeError):
    """Fewer than `rollout.min_replicas` replicas run, and no more came within `rollout.restart_timeout_seconds`."""


class ReplicaActors(ActorLauncher):
    """Actors of replicas. Use `start`."""

    def __init__(self, config: ReplicaConfig, num_replicas: int) -> None:
        super().__init__(config)
        self.wanted: set[int] = set(range(num_replicas))
        self.members: list[int] = []  # since the last `rejoin`; some may be lost by now
        self._replicas: dict[int, NumberedReplica] = {}
        self._lock = threading.RLock()  # of `wanted` and all states

    @classmethod
    def start(cls, config: ReplicaConfig, num_replicas: int) -> Self:
        """Start all replicas at once, in the Ray that is already initialised.

        Raises:
            RuntimeError: a replica did not start, with vLLM's own error; nothing is left running.
            ValueError: the cluster has too few GPUs.
        """
        actors = cls.begin_start(config, num_replicas)
        actors.finish_start()
        return actors

    @classmethod
    def begin_start(cls, config: ReplicaConfig, num_replicas: int) -> Self:
        """Like `start`, without waiting: `finish_start` waits and raises errors; `close` cancels the start.

        Raises:
            RuntimeError: others have the room of a node.
            ValueError: the cluster has too few GPUs.
        """
        actors = cls(config, num_replicas)
        if torch.cuda.is_available() and not config.devices and (problem := actors.room_problem(num_replicas)):
            raise ValueError(problem)
        try:
            actors._begin_all(range(num_replicas))
        except BaseException:
            actors.close()
            raise
        return actors

    def _begin_all(self, replicas: Iterable[int]) -> dict[int, ReplicaActor]:
        launched = self._begin_launch(list(replicas), serves_folder=self.config.serves_folder)
        self._replicas = {replica: NumberedReplica(State.STARTING, actor) for replica, actor in launched.items()}
        return launched

    def finish_start(self) -> None:
        """Wait for the actors of `begin_start`. Raises as `start`.

        Where one is killed meanwhile, all start again, START_ATTEMPTS times at most. On devices that the trainer shares vLLM
        starts only now if there is no room for both, and once more if the memory was not enough.
        """
        launched = {replica: own.actor for replica, own in self._replicas.items() if own.actor is not None}
        try:
            for attempt in range(1, START_ATTEMPTS + 1):
                try:
                    self._finish_launch(launched)
                    break
                except RuntimeError as error:
                    is_short = attempt == 1 and self.config.has_room and "memory" in str(error).lower()
                    may_pass = is_short or (isinstance(error, ReplicaDiedError) and not places.lost_ray())
                    if self._is_closed or attempt == START_ATTEMPTS or not may_pass:
                        raise
                    failed = f"the replicas did not start, attempt {attempt} of {START_ATTEMPTS}"
                    self._notes.append(f"{failed}; they are started again: {str(error).splitlines()[0]}")
                launched = self._begin_all(launched)
        except BaseException:
            self._replicas.clear()
            self._release(*self._groups)
            raise
        self._take_as_members(launched)

    def _take_as_members(self, started: dict[int, ReplicaActor]) -> None:
        self._replicas = {replica: NumberedReplica(State.MEMBER, actor) for replica, actor in started.items()}
        self.members = sorted(started)

    def room_problem(self, num_replicas: int) -> str:
        """Why Ray has no room for so many replicas in all, on GPUs, or on CPUs where there are none; empty where it has."""
        kind = "GPU" if torch.cuda.is_available() else "CPU"
        free = places.free_resources(kind, besides=[group.id.hex() for group in self._groups.values()])
        if kind == "GPU" and len(free) == 1:  # on several hosts the other models' replicas have groups
            free = {host: count - self.config.gpus_beside for host, count in free.items()}
        return places.room_problem(free, num_replicas, self.config.tensor_parallel, kind, self.config.key)

    def _numbers(self, *states: State) -> set[int]:
        return {replica for replica, own in list(self._replicas.items()) if own.state in states}

    @property
    def _actors(self) -> dict[int, ReplicaActor]:
        """The actors of the present replicas."""
        known = list(self._replicas.items())
        return {replica: own.actor for replica, own in known if own.state in PRESENT and own.actor is not None}

    # ------------------------------------------------------------------------------------------------ how many are wanted

    def scale(self, num_replicas: int, without: Iterable[int] = ()) -> None:
        """Want so many replicas from now on, none of `without` among them.

        Missing ones start in the background and come with a `rejoin`; members that are not wanted stay until they are dismissed.
        """
        with self._lock:
            there, ending = self._numbers(*PRESENT), self._numbers(State.ENDING)
            starting = self._numbers(State.STARTING, State.DEFERRED, State.READY)
            excluded = set(without)
            self.wanted = choose_wanted(num_replicas, there - excluded, starting - excluded, ending | excluded)
            for replica in self.wanted - self._replicas.keys():
                self._replicas[replica] = NumberedReplica(State.LOST)
            for replica, own in list(self._replicas.items()):
                if replica not in self.wanted:
                    self._unwant(replica)
                elif own.state is State.LEAVING:
                    own.become(State.MEMBER)
                elif own.state is State.LOST:
                    own.problem = ""
                    self._begin_thread(replica, State.STARTING)

    def _unwant(self, replica: int) -> None:
        """The thread of one that is starting finds out by itself. The caller has the lock."""
        own = self._replicas[replica]
        if own.state is State.MEMBER:
            own.become(State.LEAVING)
        elif own.state is State.READY:
            self._begin_thread(replica, State.ENDING)
        elif own.state in (State.LOST, State.DEFERRED):
            self._forget(replica)

    def _forget(self, replica: int) -> None:
        del self._replicas[replica]
        self._release(replica)

    @property
    def leaving(self) -> set[int]:
        """Members that are not wanted any more."""
        return self._numbers(State.LEAVING)

    @property
    def given_up(self) -> dict[int, str]:
        """Why wanted replicas did not start, of those that are not tried again."""
        return {replica: self._replicas[replica].problem for replica in self._numbers(State.LOST)}

    def hosts(self) -> dict[int, str]:
        """The host name of each replica that is there."""
        return {replica: actor.host for replica, actor in self._actors.items()}

    def dismiss(self, *replicas: int) -> None:
        """End these replicas, which are leaving, in the background; `rejoin` takes them out of the members."""
        with self._lock:
            for replica in self._numbers(State.LEAVING) & set(replicas):
                self._begin_thread(replica, State.ENDING)

    def replace(self, *replicas: int) -> None:
        """Start new actors for replicas that failed or died, in the background: they wait for `rejoin`, and generate after the
        next publish. A replica that is being replaced already is left alone; one that is leaving is only ended.
        """
        with self._lock:
            for replica in self._numbers(*PRESENT) & set(replicas) if not self._is_closed else ():
                is_leaving = self._replicas[replica].state is State.LEAVING
                next_state = State.ENDING if is_leaving else State.STARTING
                self._begin_thread(replica, next_state, UNSTARTED_CLOSE_SECONDS)  # it may hang

    # ------------------------------------------------------------------------------------------------ the thread of a number

    def _begin_thread(self, replica: int, state: State, seconds: float = CLOSE_SECONDS) -> None:
        """STARTING or ENDING. `seconds`: for the former actor, if there is one, to end. The caller has the lock."""
        own = self._replicas[replica]
        own.become(state)
        own.thread = threading.Thread(target=self._work, args=(replica, own.take_actor(), seconds), daemon=True)
        own.thread.start()

    def _work(self, replica: int, former: ReplicaActor | None, seconds: float) -> None:
        """End the former actor; start another unless it is ENDING. A number that is not wanted any more goes."""
        own = self._replicas[replica]
        is_deferred = former is not None and self.config.shares_devices
        if former is not None:
            try:
                self._end([former], seconds)
            except Exception as error:  # noqa: BLE001 # Ray may be gone: a start says so
                self._notes.append(f"replica {replica} could not be ended: {error}")
        reached = None
        while reached is None:
            reached = State.DEFERRED if is_deferred or own.state is not State.STARTING else self._start_again(replica, own)
            with self._lock:
                if own.state is State.ENDING:
                    self._forget(replica)
                    return
                if reached is None and replica in self.wanted:
                    continue  # it became wanted again meanwhile: start it
                reached = reached or State.LOST
                own.become(reached)
                if replica not in self.wanted:
                    self._unwant(replica)

    def _start_again(self, replica: int, own: NumberedReplica) -> State | None:
        """READY, or LOST: after START_ATTEMPTS, or without Ray. None where it is not wanted any more."""
        for attempt in range(1, START_ATTEMPTS + 1):
            lost = places.lost_ray()
            if lost or self._is_closed:
                own.problem = lost or own.problem
                break
            if replica not in self.wanted:
                return None
            try:
                launched = self._begin_launch([replica], serves_folder=self.config.never_syncs)
                own.actor = launched[replica]
                self._finish_launch(launched)
            except Exception as error:  # noqa: BLE001 # raised by `rejoin` where too few are left
                own.actor, own.problem = None, str(error)
                then = "it is tried again" if attempt < START_ATTEMPTS else "the run goes on without it"
                failed = f"replica {replica} did not start, attempt {attempt} of {START_ATTEMPTS}"
                self._notes.append(f"{failed}; {then}: {error}")
            else:
                return State.READY
        return State.LOST

    # ------------------------------------------------------------------------------------------------ between two syncs

    def drain_notes(self) -> list[str]:
        """Notes since the last call: of replicas that started, and errors of those that did not."""
        drained = self._notes[:]
        del self._notes[: len(drained)]  # threads may have appended others meanwhile
        return drained

    def rejoin(self, at_least: int, seconds: float) -> bool:
        """Make replicas that are ready members, once `at_least` so many wanted ones are there; whether any came or went. A
        replica that was lost and has started again is another process under the same number: it has come.

        Raises:
            TooFewReplicasError: too few came within `seconds`, with the errors of the starts; or Ray is lost.
        """
        deadline = time.monotonic() + seconds
        self.wait_for_ends()
        self._start_deferred()
        while True:
            if lost := places.lost_ray():
                raise TooFewReplicasError(lost)
            with self._lock:
                num_there = len(self._numbers(State.READY, State.MEMBER))
                if num_there >= at_least:
                    return self._join()
                is_hopeless = not self._numbers(State.STARTING)
            if is_hopeless or time.monotonic() > deadline:
                problems = [f"replica {replica}: {own.problem}" for replica, own in self._replicas.items() if own.problem]
                there = f"{num_there} of {len(self.wanted)} replicas run, {at_least} are needed"
                late = f"the others did not start within {seconds:g} s (rollout.restart_timeout_seconds)"
                raise TooFewReplicasError("; ".join([there, *(problems or [late])]))
            time.sleep(0.1)

    def _join(self) -> bool:
        ready = self._numbers(State.READY)
        for replica in ready:
            self._replicas[replica].become(State.MEMBER)
        former, self.members = self.members, sorted(self._actors)
        return bool(ready) or former != self.members

    def wait_for_ends(self) -> None:
        """On devices that the trainer shares: until lost replicas, which have memory there, have ended."""
        if self.config.shares_devices:
            self._wait_for_threads(self._numbers(State.STARTING))

    def _wait_for_threads(self, replicas: Iterable[int], seconds: float | None = CLOSE_SECONDS) -> None:
        for replica in replicas:
            own = self._replicas.get(replica)
            if own is not None and own.thread is not None:
                own.thread.join(seconds)

    def _start_deferred(self) -> None:
        """All at once, and wait: the trainer has given the devices up."""
        with self._lock:
            deferred = self._numbers(State.DEFERRED)
            for replica in deferred:
                self._begin_thread(replica, State.STARTING)
        self._wait_for_threads(deferred, None)

    def close(self) -> None:
        """Stop everything, the engines' processes too. Safe to repeat."""
        self._is_closed = True
        self._end_all()
        self._wait_for_threads(list(self._replicas))
        self._end_all()  # started meanwhile
        self._replicas.clear()
        self._release(*self._groups)

    def _end_all(self) -> None:
        with self._lock:
            actors = [own.take_actor() for own in self._replicas.values()]
        self._end([actor for actor in actors if actor is not None])

    def _call(
        self, method: Callable[[Any], Any], timeout: float | None, replicas: Sequence[int] | None = None, what: str = "a call"
    ) -> list[Any]:
        chosen = self.members if replicas is None else replicas
        return self.gather([method(actor.handle) for actor in self._chosen(chosen)], timeout, chosen, what)

    def _chosen(self, replicas: Sequence[int] | None = None) -> list[ReplicaActor]:
        """The actors of these replicas, None: of all members. RuntimeError where one was lost and did not start again."""
        chosen, actors = self.members if replicas is None else replicas, self._actors
        missing = [replica for replica in chosen if replica not in actors]
        if missing:
            raise RuntimeError(f"replica {missing[0]} is not there: it was to be restarted and did not start")
        return [actors[replica] for replica in chosen]
