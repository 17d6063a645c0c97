"""One node's part in a run on several: it finds the head, is compared with the others, starts its Ray and its ranks.

    MEET -all nodes are here-> CHECK -all are fit-> RUN, until the ranks end and no restart is left
    a node that comes later is compared with the others alone, and joins torch's rendezvous as a spare

Keys of the store: of a node K node/K {node, facts}, beat/K, ready/K {problem, code, warning}, left/K; of the head waiting TEXT,
members [K, ...], fit, started, over {code, text}; result [code, text]. Membership while ranks run is torch's (elastic.py). Leaves
out the command (megasync/nodes.py).
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousTimeoutError

from engine.rules import ranks_problem
from megasync.config.errors import ConfigError
from megasync.config.files import is_asked_to_stop
from megasync.config.load import load_config, save_config
from megasync.config.schema import Config
from megasync.launch.elastic import Limits, NodesRendezvous, RunOverError
from megasync.launch.exit_summary import exit_summary
from megasync.launch.head_store import (
    HeadLostError,
    LeaveError,
    find_head,
)
from megasync.launch.launcher import forget
from megasync.launch.members import Node, replica_room
from megasync.launch.node_start import LOOK_SECONDS, NodeStart
from megasync.launch.preflight import node_facts
from megasync.launch.processes import REFUSED, STOPPED
from megasync.launch.scope import HOSTS
from megasync.launch.stop_request import forget_former_stop, launched
from megasync.launch.torchrun import TRAINER, run_ranks

RESULT_SECONDS = 30.0  # for the cause, once another node has ended the run
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


class NodeLauncher(NodeStart):
    """The launcher of one node, from the first contact with the head to the end; `close` in any case."""

    def run(self) -> tuple[int, str]:
        """The exit code and the reason, if any. Raises LeaveError and HeadLostError."""
        if self.node.is_head:
            try:
                forget_former_stop(self.config.run.folder)
            except ConfigError as error:
                self._end(REFUSED, str(error))
        os.environ |= launched(self.config.run.folder)
        forget(os.environ)  # torchrun takes PET_ variables for options
        self.store.limit_response_time(self.config.run.hung_rank_timeout_seconds)
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
        self.store.limit_response_time(silent / 2)  # each operation has two parts that wait
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
        try:
            self.store.set("result", [code, problem])
        except HeadLostError:
            if code != REFUSED:  # else all ranks have refused for the same reason, and the head has ended first
                raise
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
