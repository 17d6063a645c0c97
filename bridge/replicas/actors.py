"""The Ray actors behind a pool of replicas: which are wanted, asked, started anew, and let go.

Numbers are the replicas'. Wanted: those that there are to be. Members: those that are asked, and brought to new weights; which
they are changes in `rejoin` alone, between two syncs. A member that is wanted no more stays one until `dismiss`.
Leaves out ray.init (the caller's), how actors start, end and are waited for (launched.py), what is asked of them (pool.py) and
what they do (replica.py).
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Self

import torch

from bridge.config import ReplicaConfig
from bridge.replicas import places
from bridge.replicas.launched import CLOSE_SECONDS, UNSTARTED_CLOSE_SECONDS, ActorLauncher, ReplicaActor, ReplicaDiedError

START_ATTEMPTS = 3  # of a replica


class TooFewReplicasError(RuntimeError):
    """Fewer replicas run than are needed, and no more came in time."""


def choose_wanted(count: int, there: Collection[int], starting: Collection[int], taken: Collection[int]) -> set[int]:
    """Which `count` replicas there are to be. Pure.

    Those that are `there` first, then those that are `starting`, each the lowest first; then new ones by the lowest numbers that
    are free. `taken`: numbers of others that are still ending.
    """
    known = [*sorted(there), *sorted(set(starting) - set(there))]
    free = (number for number in itertools.count() if number not in known and number not in taken)
    return set(itertools.islice(itertools.chain(known, free), count))


class ReplicaActors(ActorLauncher):
    """Actors of replicas. Use `start`."""

    def __init__(self, config: ReplicaConfig, num_replicas: int) -> None:
        super().__init__(config)
        self.wanted: set[int] = set(range(num_replicas))
        self.members: list[int] = []
        self._actors: dict[int, ReplicaActor] = {}  # without those that are not there
        self._fresh: dict[int, ReplicaActor] = {}  # started in the background, until they rejoin
        self._restarts: dict[int, threading.Thread] = {}
        self._endings: dict[int, threading.Thread] = {}  # of those that are let go
        self._deferred: list[int] = []  # to be started by `rejoin`
        self._start_problems: dict[int, str] = {}  # the last one of each
        self._changes = threading.Lock()  # of what is wanted, beside threads that start replicas

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
        """As `start`, without waiting: `finish_start` does, and tells what went wrong meanwhile. `close` ends it before.

        Raises:
            RuntimeError: others have the room of a node.
            ValueError: the cluster has too few GPUs.
        """
        actors = cls(config, num_replicas)
        if torch.cuda.is_available() and not config.devices and (problem := actors.room_problem(num_replicas)):
            raise ValueError(problem)
        try:
            actors._begin_launch(range(num_replicas), serves_folder=True)
        except BaseException:
            actors.close()
            raise
        return actors

    def finish_start(self) -> None:
        """Wait for those of `begin_start`. Raises as `start`.

        Where one is killed meanwhile, all start again, START_ATTEMPTS times at most. On devices that the trainer shares vLLM
        starts only now, without room for both, or once more, where it was not enough.
        """
        starting = dict(self._starting)
        try:
            for attempt in range(1, START_ATTEMPTS + 1):
                try:
                    self._actors = self._finish_launch(starting)
                    break
                except RuntimeError as error:
                    is_short = attempt == 1 and self.config.has_room and "memory" in str(error).lower()
                    is_tried_again = is_short or (isinstance(error, ReplicaDiedError) and not places.lost_ray())
                    if self._is_closed or attempt == START_ATTEMPTS or not is_tried_again:
                        raise
                    failed = f"the replicas did not start, attempt {attempt} of {START_ATTEMPTS}"
                    self._untold.append(f"{failed}; it is tried again: {str(error).splitlines()[0]}")
                starting = self._begin_launch(list(starting), serves_folder=True)
        except BaseException:
            self._release(*self._groups)
            raise
        self.members = sorted(self._actors)

    def room_problem(self, num_replicas: int) -> str:
        """Why Ray has no room for so many replicas in all, of GPUs, or without any of CPUs; empty where it has."""
        kind = "GPU" if torch.cuda.is_available() else "CPU"
        free = places.free_resources(kind, besides=[group.id.hex() for group in self._groups.values()])
        return places.room_problem(free, num_replicas, self.config.tensor_parallel, kind)

    # ------------------------------------------------------------------------------------------------ how many there are to be

    def scale(self, num_replicas: int, without: Iterable[int] = ()) -> None:
        """So many are wanted from now on, none of `without` among them.

        Those that are missing start in the background and come with a `rejoin`; members that are wanted no more go on until they
        are dismissed.
        """
        with self._changes:
            alive = {replica for replica, thread in self._restarts.items() if thread.is_alive()}
            starting = alive | self._fresh.keys() | set(self._deferred)
            keep, taken = self._actors.keys() - set(without), {*self._endings, *without}
            self.wanted = choose_wanted(num_replicas, keep, starting - set(without), taken)
            unwanted = self._fresh.keys() - self.wanted
            gone = {replica: self._fresh.pop(replica) for replica in unwanted}
            for replica in self.wanted - self._actors.keys() - starting:
                self._start_problems.pop(replica, None)
                self._restarts[replica] = threading.Thread(target=self._start_again, args=(replica,), daemon=True)
                self._restarts[replica].start()
            used = self.wanted | self._actors.keys() | self._endings.keys() | self._starting.keys()
            self._release(*(self._groups.keys() - used - unwanted))  # of those that never started
            for replica, actor in gone.items():
                self._let_go(replica, actor)

    @property
    def leaving(self) -> set[int]:
        """Those that are there and wanted no more."""
        return self._actors.keys() - self.wanted

    @property
    def given_up(self) -> dict[int, str]:
        """Why replicas that are wanted did not start, of those that nobody starts any more."""
        waiting = {replica for replica, thread in self._restarts.items() if thread.is_alive()} | self._fresh.keys()
        problems = list(self._start_problems.items())
        return {replica: told for replica, told in problems if replica in self.wanted - waiting - self._actors.keys()}

    def hosts(self) -> dict[int, str]:
        """The host name of each replica that is there."""
        return {replica: actor.host for replica, actor in self._actors.items()}

    def dismiss(self, *replicas: int, seconds: float = CLOSE_SECONDS) -> None:
        """Let these go, in the background; `rejoin` takes them out of the members."""
        with self._changes:
            for replica in replicas:
                if (former := self._actors.pop(replica, None)) is not None:
                    self._let_go(replica, former, seconds)

    def _let_go(self, replica: int, former: ReplicaActor, seconds: float = CLOSE_SECONDS) -> None:
        """In the background. The caller has the lock: its number is not given out before it has ended."""

        def end() -> None:
            try:
                self._end([former], seconds)
                self._release(replica)
            except Exception as error:  # noqa: BLE001 # said by who asks for problems
                self._untold.append(f"replica {replica} could not be ended: {error}")
            finally:
                self._endings.pop(replica, None)

        self._endings[replica] = threading.Thread(target=end, daemon=True)
        self._endings[replica].start()

    # ------------------------------------------------------------------------------------------------ started anew

    def replace(self, *replicas: int) -> None:
        """New actors in the place of those that failed or died, in the background: they wait for `rejoin`, and generate after the
        next publish. Nothing where that has begun already.

        One that is wanted no more is only ended. On devices that the trainer shares they start within `rejoin`, since now the
        trainer may have the memory.
        """
        for replica in replicas:
            if replica not in self.wanted:
                self.dismiss(replica, seconds=UNSTARTED_CLOSE_SECONDS)
                continue
            with self._changes:
                former = self._actors.pop(replica, None)
                if former is not None and not self._is_closed:
                    self._restarts[replica] = threading.Thread(target=self._replace, args=(replica, former), daemon=True)
                    self._restarts[replica].start()

    def _replace(self, replica: int, former: ReplicaActor) -> None:
        try:
            self._end([former], seconds=UNSTARTED_CLOSE_SECONDS)  # it may be hung
        except Exception as error:  # noqa: BLE001 # Ray may be gone: starting tells
            self._untold.append(f"replica {replica} could not be ended: {error}")
        if self.config.shares_devices:
            self._deferred.append(replica)
        else:
            self._start_again(replica)

    def _start_again(self, replica: int) -> None:
        """START_ATTEMPTS times at most, for as long as it is wanted and Ray is there."""
        for attempt in range(1, START_ATTEMPTS + 1):
            if self._is_closed or not self._is_still_wanted(replica):
                return
            if lost := places.lost_ray():
                self._start_problems[replica] = lost
                return
            try:
                started = self._launch([replica], serves_folder=False)
            except Exception as error:  # noqa: BLE001 # said by who misses it
                self._start_problems[replica] = str(error)
                then = "it is tried again" if attempt < START_ATTEMPTS else "the run goes on without it"
                failed = f"replica {replica} did not start, attempt {attempt} of {START_ATTEMPTS}"
                self._untold.append(f"{failed}; {then}: {error}")
            else:
                self._is_still_wanted(replica, started[replica])
                return
        self._is_still_wanted(replica)

    def _is_still_wanted(self, replica: int, started: ReplicaActor | None = None) -> bool:
        """Else its thread ends, and who wants it again starts another one. `started`: waits for `rejoin`, or is ended."""
        with self._changes:
            if replica not in self.wanted:
                self._restarts.pop(replica, None)
                if started is None:
                    self._release(replica)
                else:
                    self._let_go(replica, started)
                return False
            if started is not None:
                self._fresh[replica] = started
            return True

    def take_untold(self) -> list[str]:
        """What was not told yet: notes of replicas that started, errors of those that did not start anew."""
        told, self._untold = self._untold, []
        return told

    def rejoin(self, at_least: int, seconds: float) -> bool:
        """Let those that were started anew be members, once `at_least` so many of those wanted are there; whether any came or
        went. One that was lost and is there again is another process under the same number: it has come.

        Raises:
            TooFewReplicasError: there were not within `seconds`, with the errors of those that did not start; or Ray is lost.
        """
        deadline = time.monotonic() + seconds
        self.wait_for_ends()
        self._start_deferred()
        while True:
            if lost := places.lost_ray():
                raise TooFewReplicasError(lost)
            threads = list(self._restarts.values())
            is_hopeless = not any(thread.is_alive() for thread in threads)  # before the count, which they raise
            num_there = len(self.wanted & (self._actors.keys() | self._fresh.keys()))
            if num_there >= at_least:
                break
            if is_hopeless or time.monotonic() > deadline:
                problems = [f"replica {replica}: {text}" for replica, text in self._start_problems.items()]
                there = f"{num_there} of {len(self.wanted)} replicas run, {at_least} are needed"
                late = f"the others did not start within {seconds:g} s (rollout.restart_timeout_seconds)"
                raise TooFewReplicasError("; ".join([there, *(problems or [late])]))
            time.sleep(0.1)
        come = list(self._fresh)
        for replica in come:
            self._actors[replica] = self._fresh.pop(replica)
        former, self.members = self.members, sorted(self._actors)
        return bool(come) or former != self.members

    def wait_for_ends(self) -> None:
        """On devices that the trainer shares: of those that are to be replaced, which have memory there until then."""
        for thread in list(self._restarts.values()) if self.config.shares_devices else ():
            thread.join(CLOSE_SECONDS)

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
        for thread in (*list(self._restarts.values()), *list(self._endings.values())):
            thread.join(CLOSE_SECONDS)
        self._end(list(self._fresh.values()))
        self._actors, self._fresh = {}, {}
        self._release(*self._groups)

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
