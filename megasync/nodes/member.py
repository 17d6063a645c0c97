"""What each node does in a round, the head's own node too: the check, its Ray, its ranks, and what came of them.

    node = Member(store, number, ...)
    code, told = node.live()

Leaves out who decides (head.py).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megasync.config.load import save_config
from megasync.config.schema import Config
from megasync.diagnosis.storage import free_bytes
from megasync.launch.devices import devices_for_ray, visible_devices
from megasync.launch.processes import REFUSED, end_group, end_with_parent
from megasync.launch.scope import HOSTS, RAY_ADDRESS
from megasync.launch.stop_request import launched
from megasync.launch.torchrun import ENDPOINT, NODE, TOLD, TRAINER
from megasync.nodes.facts import problem_here, warning_here
from megasync.nodes.head import Head
from megasync.nodes.ray_node import RayNode, authentication
from megasync.nodes.roll_call import Arrival
from megasync.nodes.store import HeadGoneError, NodeStore

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108
LOOK_SECONDS = 0.3
SAY_SECONDS = 10.0  # between two lines on who is missing
END_SECONDS = 60.0  # for torchrun to end its ranks, and these their replicas


class Over(Exception):  # noqa: N818 # no error: the head's last word
    """The run is over on all nodes."""

    def __init__(self, code: int, told: str) -> None:
        super().__init__(told)
        self.code, self.told = code, told


class Member:
    """This node, from its arrival to the end of the run."""

    def __init__(self, store: NodeStore, arrival: Arrival, head: Head | None, config: Config, *, starts_ray: bool) -> None:
        """`starts_ray`: whether the run's Ray is ours to start."""
        self.store, self.arrival, self.head, self.config = store, arrival, head, config
        self.starts_ray = starts_ray
        self.overrides: list[str] = []  # of the round
        self.ray: RayNode | None = None
        self._authentication: dict[str, str] = {}  # of a Ray whose head is here
        self.torchrun: subprocess.Popen[bytes] | None = None
        self.folder = Path(tempfile.mkdtemp(prefix="node-"))
        self.told_file, self.config_file = self.folder / "cause", self.folder / "config.yaml"
        save_config(config, self.config_file)  # of all rounds, whatever the user writes into his meanwhile
        self._said_at, self._said = time.monotonic(), ""

    def live(self) -> tuple[int, str]:
        """Round after round; the exit code, and what to say last."""
        number = -1
        try:
            while True:
                told = self._until(lambda after=number: self._next_round(after))  # type: ignore[misc]
                number = told["round"]
                if self.arrival.number in told["members"]:
                    self._take_part(told, told["members"].index(self.arrival.number))
                else:
                    self._help(number)
        except Over as over:
            return over.code, over.told
        except SystemExit:
            self._tell_leaving()
            raise
        finally:
            self.end_ranks()
            if self.ray is not None:
                self.ray.close()
            shutil.rmtree(self.folder, ignore_errors=True)

    def _tell_leaving(self) -> None:
        """Before this node's ranks are ended, which others would miss without knowing why."""
        if self.head is not None:
            self.head.end(1, f"node {self.arrival.host}, the head: its launcher was ended")
        else:
            self.store.set(f"left/{self.arrival.number}", {})

    def _next_round(self, after: int) -> dict[str, Any] | None:
        """One with a seat for this node, or that lets it help."""
        told: dict[str, Any] | None = self.store.get("round")
        if told is None or told["round"] <= after or self.store.get(f"outcome/{told['round']}") is not None:
            return None
        is_in = self.arrival.number in told["members"] or self.store.get(f"admitted/{self.arrival.number}") is not None
        return told if is_in else None

    def _help(self, number: int) -> None:
        """Without ranks, in a round that has begun: replicas may start here. Where Ray does not start it leaves."""
        try:
            self._join_ray()
        except HeadGoneError:
            raise
        except RuntimeError as error:
            self._tell_leaving()
            raise Over(1, f"{self.arrival.host}: {error}") from error
        self.say(self._until(lambda: self.store.get(f"outcome/{number}"), says=False)["told"])

    def _take_part(self, told: Mapping[str, Any], seat: int) -> None:
        number, (host, port) = told["round"], told["store"]
        code, problem, free = 1, "", free_bytes(SHARED_MEMORY)
        self.say(told["said"])
        try:
            probe = self._start_wire(told, seat)
            self._begin_ray()  # beside the rest of the check, which takes as long; ended with this node where it is refused
            if problem := problem_here(self.config, told["num_ranks"], free):
                code = REFUSED
            else:
                self._join_ray()
            if probe is not None:
                self._until(probe.poll, says=False)
        except RuntimeError as error:
            problem = str(error)
        warning = warning_here(self.config, self.arrival.host, free)
        self.store.set(f"ready/{number}/{seat}", {"problem": problem, "code": code, "warning": warning})
        fit = self._until(lambda: self.store.get(f"fit/{number}") or self.store.get(f"outcome/{number}"), says=False)
        if "warnings" not in fit:  # a node was lost before
            self.say(fit["told"])
            return
        for warning in fit["warnings"] if seat == 0 else ():
            self.say(warning)
        trainers, place = told["trainers"], -1
        if self.arrival.num_ranks:
            place = trainers.index(self.arrival.number)
            self.overrides = told["overrides"]
            self.torchrun = self._start_ranks(f"{host}:{port}", place, len(trainers), len(told["members"]))
        outcome = self._until(lambda: self._outcome(number, place), says=False)
        self.end_ranks()
        self.say(outcome["told"])

    def _outcome(self, number: int, seat: int) -> dict[str, Any] | None:
        """Of the round; says before how this node's ranks have ended."""
        process = self.torchrun
        if process is not None and (code := process.poll()) is not None:
            cause = self.told_file.read_text(encoding="utf-8") if self.told_file.exists() else ""
            code = 1 if code < 0 else code
            self.torchrun = None
            self.store.set(f"ended/{number}/{seat}", {"code": code, "told": cause})
        if self.ray is not None and self.torchrun is not None and (problem := self.ray.problem()):
            self.end_ranks()
            self.store.set(f"ended/{number}/{seat}", {"code": 1, "told": problem})
        told: dict[str, Any] | None = self.store.get(f"outcome/{number}")
        return told

    def _until(self, look: Callable[[], Any], *, says: bool = True) -> Any:
        """What `look` finds, asked again and again.

        Raises:
            Over: the run is over, or this node is refused.
            HeadGoneError: see store.py.
        """
        while True:
            if self.head is not None:
                self.head.tick()
            if over := self.store.get("over"):
                raise Over(over["code"], over["told"])
            if refused := self.store.get(f"refused/{self.arrival.number}"):
                raise Over(REFUSED, refused)
            if (found := look()) is not None:
                return found
            if says:
                self._say_who_waits()
            time.sleep(LOOK_SECONDS)

    def _say_who_waits(self) -> None:
        """Every SAY_SECONDS, and whenever somebody has come."""
        told, now = self.store.get("waiting") or "", time.monotonic()
        if told and (told != self._said or now - self._said_at >= SAY_SECONDS):
            self.say(f"waiting: {told}")
            self._said, self._said_at = told, now

    def say(self, text: str) -> None:
        if text:
            print(text, flush=True)

    # ------------------------------------------------------------------------------------------------ processes

    def _start_wire(self, told: Mapping[str, Any], seat: int) -> subprocess.Popen[bytes] | None:
        if len(told["members"]) == 1:
            return None
        host, port = told["store"]
        arguments = [host, str(port), str(seat), str(len(told["members"])), told["backend"], self.config.run.dir]
        command = [sys.executable, "-m", "megasync.nodes.wire", *arguments]
        own = os.environ | {"MASTER_ADDR": host, "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(command, env=own, preexec_fn=end_with_parent)  # noqa: PLW1509  (it calls the kernel alone)

    def _begin_ray(self) -> None:
        """The run's Ray, once, where it can be started: the head's, or by a node that knows already where the head has it.

        Once more on a node that the head's Ray took for lost, for a link that was cut longer than Ray waits.
        """
        if self.ray is not None and not self.arrival.is_head and self.ray.problem():
            self.ray.close()
            self.ray = None
        if not self.starts_ray or self.ray is not None:
            return
        gpus = devices_for_ray(visible_devices(), self.arrival.num_ranks, is_colocated=False) or ()
        if self.arrival.is_head:
            self._authentication = authentication(os.environ)
            os.environ |= self._authentication
            self.ray = RayNode(self.arrival.address, gpus)
        elif (told := self.store.get("ray")) is not None:
            os.environ |= told["environment"]
            self.ray = RayNode(self.arrival.address, gpus, told["address"])

    def _join_ray(self) -> None:
        """Wait until it runs here: the head says where it is, and how nodes are let in."""
        if not self.starts_ray:
            return
        if self.ray is None and not self.arrival.is_head:
            self._until(lambda: self.store.get("ray"), says=False)
        self._begin_ray()
        assert self.ray is not None
        self.ray.wait()
        if self.arrival.is_head and self.store.get("ray") is None:
            self.store.set("ray", {"address": self.ray.address, "environment": self._authentication})
        os.environ[RAY_ADDRESS] = self.ray.address

    def _start_ranks(self, endpoint: str, place: int, num_nodes: int, num_hosts: int) -> subprocess.Popen[bytes]:
        self.told_file.unlink(missing_ok=True)
        nodes = ["--nnodes", str(num_nodes), ENDPOINT, endpoint, "--rdzv-conf", f"{NODE}={place}"]
        ranks = ["--nproc-per-node", str(self.arrival.num_ranks), "-m", TRAINER, str(self.config_file), *self.overrides]
        return subprocess.Popen(
            [sys.executable, "-m", "megasync.launch.torchrun", *nodes, *ranks],
            env=os.environ | {TOLD: str(self.told_file), HOSTS: str(num_hosts)} | launched(self.config.run.folder),
            start_new_session=True,
            preexec_fn=end_with_parent,  # noqa: PLW1509  (it calls the kernel alone)
        )

    def end_ranks(self) -> None:
        """Those of this node, with all that they have started."""
        process, self.torchrun = self.torchrun, None
        if process is None or process.poll() is not None:
            return
        end_group(process, END_SECONDS)
