"""The head's decisions: who takes part in the next round, whether these nodes are fit for it, and what follows from its end.

A state machine that looks at the store and writes to it; `tick` is called again and again and never waits.

    GATHER -enough nodes are here-> CHECK -they are fit-> RUN -a node or rank is lost, and there are restarts left-> GATHER
    the end from anywhere: `over` in the store, which every node reads; from GATHER and CHECK also when the run is asked to stop

Keys: those of presence.py; round {round, members, store}; wire results in the round's own store; fit/R;
ended/R/SEAT {code, told}; outcome/R; over {code, told}; acknowledged/K; waiting TEXT. Leaves out what a node does (member.py).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bridge.transport.store import open_store
from engine.config import ParallelConfig
from engine.rules import ranks_problem
from megasync.config.files import is_asked_to_stop
from megasync.launch.processes import REFUSED, STOPPED
from megasync.nodes.compare import judge
from megasync.nodes.presence import Presence
from megasync.nodes.roll_call import Arrival, fewer_seats, replica_room, roll_call, room_problem, seats
from megasync.nodes.store import NodeStore
from megasync.run.heartbeat import LastSeen

CHECK_SECONDS = 180.0
QUIET_SECONDS = 4.0  # after a failure elsewhere
CAUSE_SECONDS = 5.0  # after the first failure, for others: that of a node which is gone is the likelier cause
CLEAN = (0, STOPPED)  # exit codes of ranks that have come to an end
FINAL = (REFUSED, STOPPED)  # after which no round follows


@dataclass(frozen=True)
class Terms:
    """What the command says of the whole run."""

    num_nodes: int
    expected: tuple[str, ...]  # host names, where they are known
    wait_seconds: float
    max_restarts: int
    limit_seconds: float  # run.hung_rank_timeout_seconds
    replicas: int  # that need GPUs of their own
    tensor_parallel: int
    min_nodes: int = 0  # after a loss a round may have as few, 0: as many as ever
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    min_replicas: int = 1
    run_folder: Path | None = None  # where the run is asked to stop

    @property
    def may_shrink(self) -> bool:
        return 0 < self.min_nodes < self.num_nodes


@dataclass
class Round:
    """The one that is gathered, checked or run."""

    number: int
    members: list[Arrival] = field(default_factory=list)
    store: Any = None
    seen: LastSeen | None = None
    failed_at: float | None = None
    missed: list[int] = field(default_factory=list)  # members without ranks that are gone

    @property
    def trainers(self) -> list[Arrival]:
        return [member for member in self.members if member.num_ranks]


class Head:
    """`tick` it while this node waits for anything."""

    def __init__(self, store: NodeStore, address: str, terms: Terms) -> None:
        self.store, self.address, self.terms = store, address, terms
        self.nodes = Presence(store)
        self._compared: set[int] = set()  # while a round was run
        self._to_read: set[int] = set()  # who was here when it was over
        self._work: Callable[[], None] = self._gather
        self._begin_round(0)

    def tick(self) -> None:
        self.nodes.look()
        self._work()

    def end(self, code: int, told: str) -> None:
        """For all nodes; the first word stays."""
        if self.store.get("over") is None:
            self.store.set("over", {"code": code, "told": told})
        self.nodes.present()
        self._to_read = self.nodes.recent()
        self._work = lambda: None

    def _begin_round(self, number: int) -> None:
        self.round = Round(number)
        self.store.set("waiting", None)
        self._begun = time.monotonic()
        self.nodes.forget(was_lost=number > 0)
        self._work = self._gather

    def has_acknowledged(self) -> bool:
        """Whether all nodes that were here then have read the last word, or are gone."""
        self.nodes.look()
        return all(self.store.get(f"acknowledged/{number}") is not None for number in self._to_read - self.nodes.gone)

    # ------------------------------------------------------------------------------------------------ gather

    def _stop_if_asked(self) -> bool:
        """While no ranks run: these would end their step and write a checkpoint, and now there is nothing to write."""
        folder = self.terms.run_folder
        if folder is None or not is_asked_to_stop(folder):
            return False
        self.end(STOPPED, f"stopped while no ranks ran, as asked ({folder}/stop); the same command on all nodes goes on")
        return True

    def _gather(self) -> None:
        if self._stop_if_asked():
            return
        present = self.nodes.present()
        if self._refuse(present):
            return
        members = seats(present, self.terms.num_nodes)
        expected = self.terms.expected or tuple(dict.fromkeys(arrival.host for arrival in self.nodes.arrivals.values()))
        told = roll_call(present, self.terms.num_nodes, expected)
        if members is not None:
            self._announce(members)
        elif time.monotonic() - self._begun > self.terms.wait_seconds:
            self._shrink(present, f"after {self.terms.wait_seconds:g} s: {told}")
        elif present:
            self.store.set("waiting", told)

    def _shrink(self, present: Sequence[Arrival], told: str) -> None:
        """With fewer nodes, after a loss and where data parallelism can shrink; else it is over."""
        own, members = self.terms, None
        if own.may_shrink and self.round.number:
            members = fewer_seats(present, own.num_nodes, own.min_nodes, lambda ranks: not ranks_problem(own.parallel, ranks))
            told += f"; --min-nodes {own.min_nodes}" + ("" if members else " is not met by ranks that engine.parallel divides")
        if members is None:
            self.end(1, f"gave up {told}")
            return
        number = sum(member.num_ranks for member in members)
        hosts = ", ".join(member.host for member in members)
        same = "the batch of a step is the same"
        self._announce(members, f"{told}: the run goes on with {len(members)} nodes, {hosts}, and {number} trainer ranks; {same}")

    def _refuse(self, present: Sequence[Arrival]) -> bool:
        """Nodes that are not fit for any round: before the first one the whole run ends, later they alone do."""
        is_early = len(present) < self.terms.num_nodes and self.round.number == 0  # nobody to compare with, yet
        told = {} if is_early else self.nodes.differing(present)
        if told and self.round.number == 0:
            self.end(REFUSED, "\n".join(told.values()))
        elif told:
            self.nodes.send_away(told)
        return bool(told)

    def _announce(self, members: list[Arrival], said: str = "") -> None:
        """`said`: why there are fewer than ever; then there may be fewer replicas, too."""
        replicas, width, overrides = self.terms.replicas, self.terms.tensor_parallel, []
        if said and any(member.num_gpus for member in members):
            replicas = min(replicas, max(replica_room(members, width), self.terms.min_replicas))
        if replicas < self.terms.replicas:
            overrides, said = [f"rollout.replicas={replicas}"], f"{said}; rollout.replicas={replicas}"
        problem = room_problem(members, replicas, width)
        if problem:
            self.end(REFUSED, problem)
            return
        store = open_store(self.address)
        self.round.members, self.round.store = members, store
        backend = "nccl" if all(member.num_gpus for member in members) else "gloo"
        numbers, trainers = [member.number for member in members], self.round.trainers
        told = {"round": self.round.number, "members": numbers, "trainers": [member.number for member in trainers]}
        told |= {"num_ranks": sum(member.num_ranks for member in trainers), "said": said, "overrides": overrides}
        self.store.set("round", told | {"store": [self.address, store.port], "backend": backend})
        self.round.seen = LastSeen(numbers, self.terms.limit_seconds, time.monotonic())
        self._begun = time.monotonic()
        self._work = self._check

    # ------------------------------------------------------------------------------------------------ check

    def _check(self) -> None:
        """Of what takes two nodes; each is ready then, its Ray started."""
        if self._stop_if_asked():
            return
        members, number = self.round.members, self.round.number
        ready = [self.store.get(f"ready/{number}/{seat}") for seat in range(len(members))]
        is_late = time.monotonic() - self._begun > CHECK_SECONDS
        hosts = [member.host for member in members]
        problems = [f"{host}: {told['problem']}" for host, told in zip(hosts, ready, strict=True) if told and told["problem"]]
        if lost := self._lost(members):
            self._follow(1, f"{lost} during the check")
        elif problems:
            self.end(max(told["code"] for told in ready if told), "\n".join(problems))
        elif all(ready) or is_late:
            errors, warnings = self._judged(members)
            late = [host for host, told in zip(hosts, ready, strict=True) if not told]
            errors += [f"{host}: not ready after {CHECK_SECONDS:g} s" for host in late]
            if errors:
                self.end(REFUSED, "\n".join(errors))
                return
            warnings += [told["warning"] for told in ready if told and told["warning"]]
            self.store.set(f"fit/{number}", {"warnings": warnings})
            self.store.set("waiting", self._told_to_spares())
            self._work = self._run

    def _judged(self, members: Sequence[Arrival]) -> tuple[list[str], list[str]]:
        keys = [f"wire/{seat}" for seat in range(len(members))]
        results = [json.loads(self.round.store.get(key)) if self.round.store.check([key]) else {} for key in keys]
        return judge([member.host for member in members], results) if len(members) > 1 else ([], [])

    # ------------------------------------------------------------------------------------------------ run

    def _told_to_spares(self) -> str:
        here = f"the run goes on with {', '.join(member.host for member in self.round.members)}"
        if self.terms.max_restarts > self.round.number:
            return f"{here}; this node is a spare, and takes the place of one that is lost"
        return f"{here}; this node is not needed: no restart is left (--max-restarts {self.terms.max_restarts})"

    def _refuse_spares(self) -> None:
        """Those that have come while the run goes on and could not take part in it, such as of another run."""
        for number in [number for number in self.nodes.arrivals if number not in self._compared]:
            self._compared.add(number)
            arrival = self.nodes.arrivals[number]
            if arrival not in self.round.members and number not in self.nodes.gone:
                told = self.nodes.differing([*self.round.members, arrival])
                self.nodes.send_away({number: told[number]} if number in told else {})

    def _run(self) -> None:
        self._refuse_spares()
        self._replace_helpers()
        members, number = self.round.trainers, self.round.number
        ended = [self.store.get(f"ended/{number}/{seat}") for seat in range(len(members))]
        if all(told and told["code"] in CLEAN for told in ended):
            self.end(max(told["code"] for told in ended), "")
            return
        lost, present = self._lost(members), self.nodes.present(QUIET_SECONDS)
        failed = [(seat, told) for seat, told in enumerate(ended) if told and told["code"] not in CLEAN]
        if not lost and not failed:
            return
        now = time.monotonic()
        self.round.failed_at = self.round.failed_at or now
        if not lost and now - self.round.failed_at < CAUSE_SECONDS:
            return
        quiet = [member for member, told in zip(members, ended, strict=True) if not told and member not in present]
        lost = lost or "; ".join(f"node {member.host} is gone: no sign of life for {QUIET_SECONDS:g} s" for member in quiet)
        final = [told["code"] for _, told in failed if told["code"] in FINAL]
        causes = [f"{members[seat].host}: {told['told'] or 'exit code ' + str(told['code'])}" for seat, told in failed]
        self._follow(final[0] if final else failed[0][1]["code"] if failed else 1, "\n".join(filter(None, [lost, *causes])))

    def _follow(self, code: int, told: str) -> None:
        """Another round, or the end."""
        left = self.terms.max_restarts - self.round.number
        if code in FINAL or left <= 0:
            self.end(code, told)
            return
        own = self.terms
        fewer = f", or {own.min_nodes} after {own.wait_seconds:g} s" if own.may_shrink else ""
        again = (
            f"the run goes on from its newest checkpoint once {own.num_nodes} nodes are here{fewer}; restarts left: {left - 1}"
        )
        self.store.set(f"outcome/{self.round.number}", {"told": f"{told}\n{again}"})
        self._begin_round(self.round.number + 1)

    def _replace_helpers(self) -> None:
        """Nodes without ranks may go, since the replicas that are left go on; another one may come in the place of one."""
        helpers = [member for member in self.round.members if not member.num_ranks]
        for helper in helpers:
            if helper.number not in self.round.missed and (lost := self._lost([helper])):
                self.round.missed.append(helper.number)
                print(f"{lost}; the run goes on without its replicas", flush=True)
        for arrival in self.nodes.present() if self.round.missed else ():
            if not arrival.num_ranks and arrival not in self.round.members:
                self.round.members.append(arrival)
                self.round.missed.pop()
                self.store.set(f"admitted/{arrival.number}", {"round": self.round.number})
                print(f"node {arrival.host} has come; replicas can start there", flush=True)
                return

    def _lost(self, members: Sequence[Arrival]) -> str:
        """Those that have left, or give no sign of life; empty where all are here."""
        assert self.round.seen is not None
        counts = {number: count for number, count in self.nodes.beats().items() if number in self.round.seen.ranks}
        hosts = {member.number: member.host for member in members}
        silent = [number for number in self.round.seen.look(counts, time.monotonic()) if number in hosts]
        gone = self.nodes.gone
        left = [f"node {hosts[number]} is gone: its launcher ended" for number in hosts if number in gone]
        limit = f"{self.terms.limit_seconds:g} s (run.hung_rank_timeout_seconds)"
        quiet = [f"node {hosts[number]} is gone: no sign of life for {limit}" for number in silent if number not in gone]
        return "; ".join([*left, *quiet])
