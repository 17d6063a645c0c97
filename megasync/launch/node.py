"""One node's part in a run on several: it finds the head, is compared with the others, starts its Ray and its ranks.

    MEET -all nodes are here-> CHECK -all are fit-> RUN, until the ranks end and no restart is left
    a node that comes later is compared with the others alone, and joins torch's rendezvous as a spare

Keys of the store: of a node K node/K {node, facts}, beat/K, ready/K {problem, code, warning}, left/K; of the head waiting TEXT,
members [K, ...], fit, started, over {code, text}; result [code, text]. Membership while ranks run is torch's (elastic.py). Leaves
out the command (megasync/nodes.py).
"""

from __future__ import annotations

import argparse
import math
import os
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousTimeoutError

from engine.rules import ranks_problem
from megasync.config.errors import ConfigError
from megasync.config.files import is_asked_to_stop
from megasync.config.load import load_config, save_config
from megasync.config.schema import Config
from megasync.launch.devices import visible_devices
from megasync.launch.elastic import Limits, NodesRendezvous, RunOverError
from megasync.launch.exit_summary import exit_summary
from megasync.launch.head_store import (
    GLOO,
    SAY_SECONDS,
    HeadLostError,
    HeadStore,
    LeaveError,
    find_head,
    interface_of,
    reachable_address,
)
from megasync.launch.launcher import forget
from megasync.launch.members import Node, first_members, replica_room, roll_call, room_problem
from megasync.launch.node_ray import PLACE_KEY, NodeRay
from megasync.launch.num_ranks import pools
from megasync.launch.preflight import differences, judge, node_facts, shared_memory_finding
from megasync.launch.processes import REFUSED, STOPPED, end_with_parent
from megasync.launch.scope import HOSTS
from megasync.launch.stop_request import forget_former_stop, launched
from megasync.launch.torchrun import TRAINER, run_ranks

LOOK_SECONDS = 0.3
FRESH_SECONDS = 10.0
CHECK_SECONDS = 180.0
RESULT_SECONDS = 30.0  # for the cause, once another node has ended the run
LEAVE_SECONDS = 5.0  # for the others to read the end
HEAD_LOST = "the run ends here; the same command on all nodes resumes from its newest checkpoint"


def take_part(given: argparse.Namespace, config: Config, num_ranks: int, check: Callable[[Config, int], object]) -> int:
    """The exit code. `given`: the command's flags; `check`: ValueError where the config cannot run with so many ranks here."""
    code, problem, launcher = 1, "", None
    try:
        store = find_head(given)
        launcher = NodeLauncher(store, given, config, num_ranks, check)
        code, problem = launcher.run()
    except LeaveError as leaving:
        code, problem = leaving.code, str(leaving)
    except HeadLostError as error:
        problem = f"{error}: {HEAD_LOST}"
        if launcher is not None:
            launcher.is_cut_off = True
    except SystemExit as leaving:  # a signal
        code = int(leaving.code or 0)
        if launcher is not None and launcher.rendezvous is not None and launcher.rendezvous.is_stopped:
            code = STOPPED
    finally:
        if launcher is not None:
            launcher.close(code, problem)
    if problem:
        print(problem, file=sys.stderr)
    is_last = launcher is not None and launcher.has_begun and (launcher.node.is_head or HEAD_LOST in problem)
    if code not in (0, REFUSED, STOPPED) and is_last:
        print(exit_summary(config, shlex.join(["launch/torchrun_nodes.sh", *sys.argv[1:]]), code), file=sys.stderr)
    return code


class NodeLauncher:
    """From the first contact with the head to the end; `close` in any case."""

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

    def run(self) -> tuple[int, str]:
        """The exit code and the reason, if any. Raises LeaveError and HeadLostError."""
        if self.node.is_head:
            try:
                forget_former_stop(self.config.run.folder)
            except ConfigError as error:
                self._end(REFUSED, str(error))
        os.environ |= launched(self.config.run.folder)
        forget(os.environ)  # torchrun takes PET_ variables for options
        self.store.limit_silence(self.config.run.hung_rank_timeout_seconds)
        self.store.set(f"node/{self.node.number}", {"node": asdict(self.node), "facts": node_facts(self.config)})
        self.store.add(f"beat/{self.node.number}")
        self._meet()
        if self.node in self.members:
            self._check()
        else:
            self._check_alone()
        if not self.node.num_ranks:
            self._start_ray()
            self._wait_for_end()
        return self._run_ranks()

    # ------------------------------------------------------------------------------------------------ meet

    def _meet(self) -> None:
        """Wait for the nodes that the run starts with."""
        if self.node.is_head:
            numbers = [node.number for node in self._gather()]
            self.store.set("members", numbers)
        numbers = self._wait(lambda: self.store.get("members"), says=True)
        self.members = [self._read(number)[0] for number in numbers]

    def _gather(self) -> list[Node]:
        """By the head: waits for all, and refuses nodes that differ."""
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
        """By node."""
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
        """By the head, of the results of all: whether ranks start."""
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

    # ------------------------------------------------------------------------------------------------ run

    def _run_ranks(self) -> tuple[int, str]:
        """Until they end on all nodes and no restart is left."""
        given, num_trainers = self.given, sum(node.num_ranks > 0 for node in self.members)
        min_nodes = min(given.min_nodes or num_trainers, num_trainers)
        silent = self.config.run.hung_rank_timeout_seconds
        parallel = self.config.engine.parallel
        self.rendezvous = rendezvous = NodesRendezvous(
            self.store.for_rendezvous, self.node, Limits(min_nodes, num_trainers, given.wait_seconds, silent),
            lambda ranks: not ranks_problem(parallel, ranks), self._prepare_round, self.config.run.folder,
        )  # fmt: skip
        self.store.limit_silence(silent / 2)  # each operation has two parts that wait
        nodes = ["--nnodes", f"{min_nodes}:{num_trainers}", "--max-restarts", str(given.max_restarts)]
        nodes += ["--monitor-interval", str(LOOK_SECONDS)]
        ranks = ["--local-addr", self.node.address, "--nproc-per-node", str(self.node.num_ranks), "-m", TRAINER]
        try:
            code, problem = run_ranks([*nodes, *ranks, str(self._config_file)], self.config, lambda _: rendezvous)
        except RunOverError:  # another node ended the run
            if not self.node.is_head:
                self._wait_for_end()
            code, problem = self._result()
        except RendezvousTimeoutError:
            return 1, f"gave up after {given.wait_seconds:g} s: fewer than {min_nodes} of {num_trainers} nodes are here"
        except RendezvousConnectionError as error:
            raise self.store.lost() from error
        except RuntimeError as error:
            self._look()  # raises HeadLostError where that is the cause
            return 1, f"{self.node.host}: {error}"
        self.store.set("result", [code, problem])
        if rendezvous.is_stopped or (code == 0 and is_asked_to_stop(self.config.run.folder)):
            return STOPPED, ""
        return code, f"{self.node.host}: {problem}" if problem else ""

    def _result(self) -> Sequence[Any]:
        """Exit code and cause, of the node that ended the run."""
        deadline = time.monotonic() + RESULT_SECONDS
        while (found := self.store.get("result")) is None and time.monotonic() < deadline:
            self._look()
        return found or [1, "another node ended the run, and was lost before it gave the cause"]

    def _prepare_round(self, members: Sequence[Node]) -> None:
        """Before the ranks of a round start here."""
        try:
            self._start_ray()
        except HeadLostError:
            raise
        except RuntimeError as error:
            raise LeaveError(1, f"{self.node.host}: {error}") from error
        helpers = [node for node in self.members if not node.num_ranks]
        others = [pool for pool in self._pools if pool.key != "rollout"]
        fewer = list[str]()
        for own in (pool for pool in self._pools if pool.key == "rollout" and any(node.num_gpus for node in members)):
            room = replica_room([*members, *helpers], own.tensor_parallel, others)
            replicas = min(own.replicas, max(room, self.config.rollout.min_replicas))
            fewer = [f"rollout.replicas={replicas}"] if replicas < own.replicas else []
        save_config(self.config, self._config_file)
        if fewer:
            save_config(load_config(str(self._config_file), fewer), self._config_file)
        os.environ[HOSTS] = str(len(members) + len(helpers))
        if self.has_begun or self.node not in self.members:
            hosts, number = ", ".join(node.host for node in members), sum(node.num_ranks for node in members)
            text = f"the run continues from its newest checkpoint with {len(members)} nodes, {hosts}, and {number} trainer ranks"
            print("; ".join([text, *fewer]), flush=True)
        self.has_begun = True
        if self.node.is_head:
            self.store.set("started", True)

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
        """By the head: for all nodes."""
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
