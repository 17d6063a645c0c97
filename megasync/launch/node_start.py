"""A node before its ranks start: it meets the others, is compared with them and checked, starts its Ray, waits and ends.

Leaves out the ranks (node.py), whose header lists the keys of the store.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from megasync.config.files import is_asked_to_stop
from megasync.config.schema import Config
from megasync.launch.devices import visible_devices
from megasync.launch.elastic import NodesRendezvous
from megasync.launch.head_store import (
    GLOO,
    SAY_SECONDS,
    HeadLostError,
    HeadStore,
    LeaveError,
    interface_of,
    reachable_address,
)
from megasync.launch.members import Node, first_members, roll_call, room_problem
from megasync.launch.node_ray import PLACE_KEY, NodeRay
from megasync.launch.num_ranks import pools
from megasync.launch.preflight import differences, judge, shared_memory_finding
from megasync.launch.processes import REFUSED, STOPPED, end_with_parent

LOOK_SECONDS = 0.3
FRESH_SECONDS = 10.0
CHECK_SECONDS = 180.0
LEAVE_SECONDS = 5.0  # for the others to read the end


class NodeStart:
    """The start of a run on several nodes: from the first contact with the head until ranks may start, and the end."""

    def __init__(
        self, store: HeadStore, given: argparse.Namespace, config: Config, num_ranks: int, check: Callable[[Config, int], object]
    ) -> None:
        self.store, self.given, self.config, self._check_config = store, given, config, check
        address = reachable_address(given.host)
        os.environ.setdefault(GLOO, interface_of(address))
        self.node = Node(
            store.add("arrivals"),
            socket.gethostname(),
            address,
            given.node_rank,
            num_ranks,
            len(visible_devices()),
            store.of_head,
        )
        self.members: list[Node] = []  # of the start, in their order
        is_ours = config.algorithm.name == "grpo" and config.rollout.ray_address == "local"
        self.ray = NodeRay(store, self.node) if is_ours else None
        self.rendezvous: NodesRendezvous | None = None
        self.has_begun = False  # ranks have
        self.is_cut_off = False
        self.folder = Path(tempfile.mkdtemp(prefix="node-"))
        self._config_file = self.folder / "config.yaml"
        self._said, self._said_at = "", -math.inf
        self._beats: dict[int, tuple[int, float]] = {}  # by node: signs of life, and when the last one was seen
        self._pools = pools(config)

    # ------------------------------------------------------------------------------------------------ meet

    def _meet(self) -> None:
        """Wait for the nodes that the run starts with."""
        if self.node.is_head:
            numbers = [node.number for node in self._gather()]
            self.store.set("members", numbers)
        numbers = self._wait(lambda: self.store.get("members"), says=True)
        self.members = [self._read(number)[0] for number in numbers]

    def _gather(self) -> list[Node]:
        """Called by the head: wait for all nodes, and refuse those that differ."""
        begun, given = time.monotonic(), self.given
        while (members := first_members(present := self._present(), given.num_nodes)) is None:
            text = roll_call(present, given.num_nodes, given.expected)
            if time.monotonic() - begun > given.wait_seconds:
                self._end(1, f"gave up after {given.wait_seconds:g} s: {text}")
            self.store.set("waiting", text)
            self._look(says=True)
        problems = list(self._differences(members).values())
        problems += filter(None, [room_problem(members, self._pools)])
        if problems:
            self._end(REFUSED, "\n".join(problems))
        return members

    def _not_left(self) -> list[Node]:
        numbers = range(1, self.store.add("arrivals", 0) + 1)
        here = [number for number in numbers if self.store.get(f"node/{number}") and not self.store.get(f"left/{number}")]
        return [self._read(number)[0] for number in here]

    def _present(self) -> list[Node]:
        """Nodes that have not left and have given a sign of life lately, while all wait for each other."""
        nodes, now = self._not_left(), time.monotonic()
        for node in nodes:
            count = self.store.add(f"beat/{node.number}", 0)
            if count != self._beats.get(node.number, (0, now))[0]:
                self._beats[node.number] = count, now
        return [node for node in nodes if now - self._beats.get(node.number, (0, -math.inf))[1] < FRESH_SECONDS]

    def _read(self, number: int) -> tuple[Node, dict[str, Any]]:
        """Node and facts."""
        entry = self.store.get(f"node/{number}")
        return Node(**entry["node"]), entry["facts"]

    def _differences(self, nodes: Sequence[Node]) -> dict[int, str]:
        """Differences of the nodes' facts, by node."""
        hosts = [node.host for node in nodes]
        names = {node.number: node.host if hosts.count(node.host) == 1 else f"{node.host} #{node.number}" for node in nodes}
        found = differences({name: self._read(number)[1] for number, name in names.items()})
        return {number: found[name] for number, name in names.items() if name in found}

    # ------------------------------------------------------------------------------------------------ check

    def _check(self) -> None:
        """All nodes of the start together; each starts its Ray meanwhile."""
        code, problem, warning = 1, "", ""
        num_ranks = sum(node.num_ranks for node in self.members)
        probe = self._start_probe() if len(self.members) > 1 else None
        try:
            if self.ray is not None:
                self.ray.begin()
            warning = self._check_here(num_ranks)
            self._start_ray()
            if probe is not None:
                self._wait(probe.poll)
        except ValueError as error:
            code, problem = REFUSED, str(error)
        except RuntimeError as error:
            problem = f"{self.node.host}: {error}"
        self.store.set(f"ready/{self.node.number}", {"problem": problem, "code": code, "warning": warning})
        if self.node.is_head:
            self._decide()
        self._wait(lambda: self.store.get("fit"))

    def _check_here(self, num_ranks: int) -> str:
        """A warning, if any. ValueError: the config cannot run on this node."""
        text, is_error = shared_memory_finding(self.node.host, has_rollouts=self.config.algorithm.name == "grpo")
        if is_error:
            raise ValueError(text)
        try:
            self._check_config(self.config, num_ranks)
        except ValueError as error:
            raise ValueError(f"{self.node.host}: {error}") from error
        return text

    def _decide(self) -> None:
        """Called by the head: decide from the results of all nodes whether ranks start."""
        deadline = time.monotonic() + CHECK_SECONDS
        while not all(ready := [self.store.get(f"ready/{node.number}") for node in self.members]):
            if time.monotonic() > deadline:
                break
            self._look()
        late = [node.host for node, answer in zip(self.members, ready, strict=True) if answer is None]
        answers = [answer for answer in ready if answer is not None]
        if problems := [answer["problem"] for answer in answers if answer["problem"]]:
            self._end(max(answer["code"] for answer in answers if answer["problem"]), "\n".join(problems))
        hosts = [node.host for node in self.members]
        results = [self.store.get(f"probe/{seat}") or {} for seat in range(len(hosts))]
        errors, warnings = judge(hosts, results) if len(hosts) > 1 else ([], [])
        if errors := [*errors, *(f"{host}: not ready after {CHECK_SECONDS:g} s" for host in late)]:
            self._end(REFUSED, "\n".join(errors))
        for warning in [*warnings, *(answer["warning"] for answer in answers if answer["warning"])]:
            print(warning, flush=True)
        self.store.set("fit", True)

    def _check_alone(self) -> None:
        """A node that has come after the start: is compared with the others, then waits for a place."""
        if problem := self._differences([*self.members, self.node]).get(self.node.number):
            raise LeaveError(REFUSED, problem)
        try:
            self._check_here(sum(node.num_ranks for node in self.members))
        except ValueError as error:
            raise LeaveError(REFUSED, str(error)) from error
        self._wait(lambda: self.store.get("started"))
        hosts = ", ".join(node.host for node in self.members)
        use = "a spare, for the place of a lost node" if self.given.max_restarts else "not needed: there is no --max-restarts"
        use = use if self.node.num_ranks else "for replicas"
        print(f"waiting: the run has started with {hosts}; this node is {use}", flush=True)

    def _start_probe(self) -> subprocess.Popen[bytes]:
        seat = self.members.index(self.node)
        backend = "nccl" if all(node.num_gpus for node in self.members) else "gloo"
        arguments = [self.given.host, self.given.port, seat, len(self.members), backend, self.config.run.dir]
        return subprocess.Popen(
            [sys.executable, "-m", "megasync.launch.probe", *map(str, arguments)],
            env=os.environ | {"MASTER_ADDR": self.given.host, "OMP_NUM_THREADS": "1"},
            preexec_fn=end_with_parent,  # noqa: PLW1509  (it calls the kernel alone)
        )

    def _start_ray(self) -> None:
        """Waits until this node's part of Ray runs. RuntimeError: it does not."""
        if self.ray is not None:
            if not self.node.is_head:
                self._wait(lambda: self.store.get(PLACE_KEY))
            self.ray.start()

    # ------------------------------------------------------------------------------------------------ wait and end

    def _wait(self, look: Callable[[], Any], *, says: bool = False) -> Any:
        """The first result of `look` that is not None. Raises LeaveError once the run is over."""
        while (found := look()) is None:
            self._look(says=says)
        return found

    def _wait_for_end(self) -> NoReturn:
        """Raises LeaveError once the head has written it."""
        while True:
            self._look()

    def _look(self, *, says: bool = False) -> None:
        """Gives a sign of life and sleeps a moment; the head ends all where the run is asked to stop."""
        self.store.add(f"beat/{self.node.number}")
        folder = self.config.run.folder
        if self.node.is_head and is_asked_to_stop(folder):
            self._end(STOPPED, f"stopped before ranks ran, as asked ({folder}/stop); the same command on all nodes resumes")
        if over := self.store.get("over"):
            raise LeaveError(over["code"], over["text"])
        if not self.node.num_ranks and self.ray is not None and (problem := self.ray.problem()):
            raise LeaveError(1, f"{self.node.host}: {problem}")
        text = (self.store.get("waiting") or "") if says else ""
        if text and (text != self._said or time.monotonic() - self._said_at >= SAY_SECONDS):
            print(f"waiting: {text}", flush=True)
            self._said, self._said_at = text, time.monotonic()
        time.sleep(LOOK_SECONDS)

    def _end(self, code: int, text: str) -> NoReturn:
        """Called by the head: end all nodes."""
        self.store.set("over", {"code": code, "text": text})
        raise LeaveError(code, text)

    def _announce_end(self, code: int, problem: str) -> None:
        """The end of a head, or before the start of a member, ends the run. The head's store lives until all have read that."""
        is_needed = self.node in self.members and self.store.get("started") is None
        if self.store.get("over") is None and (self.node.is_head or is_needed):
            was_ended = f"node {self.node.host}: its launcher was ended" if code and not self.has_begun else ""
            self.store.set("over", {"code": code, "text": problem or was_ended})
        self.store.set(f"left/{self.node.number}", True)
        deadline = time.monotonic() + LEAVE_SECONDS
        while self.node.is_head and time.monotonic() < deadline and self._not_left():
            time.sleep(0.1)

    def close(self, code: int, problem: str) -> None:
        """Announces the end and ends this node's Ray."""
        if not self.is_cut_off:
            with suppress(HeadLostError):
                self._announce_end(code, problem)
        if self.ray is not None:
            self.ray.close()
        shutil.rmtree(self.folder, ignore_errors=True)
