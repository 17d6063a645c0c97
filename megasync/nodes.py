"""The same command on every node of a run: it finds the others, checks them, and starts Ray and this node's ranks.

    ./launch/torchrun_nodes.sh CONFIG.yaml [key=value ...] --nodes N --head HOST[:PORT] [--node-rank R] [--nproc P]

The head is the node with --node-rank 0, else the one that has the address of HOST. Exit codes: 0 done; 1 failed, or a node was
missing; 2 config, command or a node was refused, nothing was started; 75 stopped as asked, the same command resumes. Leaves out
the node's part in the run (launch/node.py). No torch in here.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence

from engine.rules import ranks_problem
from megasync.checks.check import check_config
from megasync.config.errors import ConfigError, main_errors, refuse_if
from megasync.config.load import load_config
from megasync.config.schema import Config
from megasync.launch.devices import visible_devices
from megasync.launch.num_ranks import replica_gpus_of_node
from megasync.launch.processes import end_on_sigterm, run_and_leave
from megasync.launch.scope import LAST_PORT, run_scope
from megasync.train import why_done

PORT = 29400  # torchrun's


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Flags may stand before, between and after the overrides."""
    parser = argparse.ArgumentParser(prog="launch/torchrun_nodes.sh", description="Train by a YAML config on several nodes.")
    parser.add_argument("config", help="YAML file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="such as engine.wrap=ddp")
    parser.add_argument("--nodes", required=True, metavar="N", help="how many, or their host names with commas between them")
    parser.add_argument("--head", required=True, metavar="HOST[:PORT]", help=f"the node that the others find (port: {PORT})")
    help_ = "this node's place, from 0, the head, on (default: as they come)"
    parser.add_argument("--node-rank", type=int, metavar="R", help=help_)
    help_ = "trainer ranks of this node, 0: it has replicas alone (default: 1, or its GPUs less its replicas')"
    parser.add_argument("--nproc", type=int, metavar="P", help=help_)
    parser.add_argument("--wait-seconds", type=float, default=600.0, metavar="S", help="for nodes to come (default: 600)")
    help_ = "how often the ranks start again after a node or a rank was lost, once the node or a spare is there (default: 0)"
    parser.add_argument("--max-restarts", type=int, default=0, metavar="K", help=help_)
    help_ = "with how few nodes the run continues where nobody has come within --wait-seconds (default: as many as before)"
    parser.add_argument("--min-nodes", type=int, default=0, metavar="M", help=help_)
    given = parser.parse_intermixed_args(list(arguments))
    names = [name.strip() for name in given.nodes.split(",")]
    given.expected = () if given.nodes.isdecimal() else tuple(names)
    given.num_nodes = int(given.nodes) if given.nodes.isdecimal() else len(names)
    given.host, colon, port = given.head.partition(":")
    given.port = int(port) if port.isdecimal() else 0 if colon else PORT
    if not all(re.match(r"\w", name) for name in names):
        parser.error(f"--nodes {given.nodes}: a number, or host names with commas between them")
    if given.num_nodes < 1:
        parser.error(f"--nodes {given.nodes}: at least one node")
    if not (given.host and 0 < given.port <= LAST_PORT):
        parser.error(f"--head {given.head}: HOST or HOST:PORT, with a port from 1 to {LAST_PORT}")
    if not given.wait_seconds >= 0:  # nan is not
        parser.error(f"--wait-seconds {given.wait_seconds:g}: at least 0")
    if given.node_rank is not None and not 0 <= given.node_rank < given.num_nodes:
        parser.error(f"--node-rank {given.node_rank}: 0 to {given.num_nodes - 1}")
    if (given.nproc is not None and given.nproc < 0) or given.max_restarts < 0:
        parser.error("--nproc, --max-restarts: at least 0")
    return given


def main(arguments: Sequence[str]) -> int:
    """The exit code."""
    given = parse(arguments)
    with main_errors():
        config = load_config(given.config, given.overrides)
        num_ranks = default_nproc(config, len(visible_devices()), given.num_nodes) if given.nproc is None else given.nproc
        check_nodes(config, given)
        check_min_nodes(config, given, num_ranks)
        why = why_done(config)
    if why:
        print(f"{config.run.folder}: {why}")
        return 0
    end_on_sigterm(and_on_sigint=True)
    from megasync.launch.node import take_part  # imports torch

    with run_scope():
        return take_part(given, config, num_ranks, check_config)


def default_nproc(config: Config, gpus: int, num_nodes: int) -> int:
    """1 without GPUs, else the GPUs that this node's share of the replicas leaves."""
    if gpus == 0:
        return 1
    share = replica_gpus_of_node(config, num_nodes)
    message = f"rollout.replicas = {config.rollout.replicas}: their share leaves no GPU of this node for the trainer"
    refuse_if(share >= gpus, message, GPUs=str(gpus), remedy="write --nproc P for ranks on this node, or lower rollout.replicas")
    return gpus - share


def check_min_nodes(config: Config, given: argparse.Namespace, num_ranks: int) -> None:
    """Whether a run of `num_ranks` on each node can continue with as few nodes."""
    fewest = given.min_nodes
    message = f"--min-nodes {fewest}: "
    if not fewest:
        return
    remedy = f"write 1 to {given.num_nodes}"
    refuse_if(not 0 < fewest <= given.num_nodes, f"{message}there are {given.num_nodes} nodes (--nodes)", remedy=remedy)
    remedy = "write --max-restarts K, or leave --min-nodes out"
    refuse_if(not given.max_restarts, f"{message}no run continues after a loss without --max-restarts", remedy=remedy)
    if num_ranks and fewest < given.num_nodes and (found := ranks_problem(config.engine.parallel, fewest * num_ranks)):
        why = f"{message}data parallelism cannot shrink to {fewest} nodes of {num_ranks} ranks: {found.message}"
        raise ConfigError(why, remedy=f"write a --min-nodes whose ranks are a multiple of that, up to {given.num_nodes}")


def check_nodes(config: Config, given: argparse.Namespace) -> None:
    """Refuse settings that work on one node and not on several."""
    several, rollout, keeps = given.num_nodes > 1, config.rollout, config.checkpoint
    has_rollouts = config.algorithm.name == "grpo"
    message = "rollout.placement = colocated: replicas share the GPUs of one node with its ranks"
    refuse_if(several and has_rollouts and rollout.is_colocated, message, remedy="write rollout.placement=separate, or --nodes 1")
    message = "sync.transport = shm: shared memory is one node's"
    remedy = "write sync.transport=auto, which is nccl on several nodes"
    refuse_if(several and has_rollouts and config.sync.transport == "shm", message, choices="auto, nccl, delta", remedy=remedy)
    message = f"--max-restarts {given.max_restarts}: there are no checkpoints for a restart"
    remedy = "write checkpoint.every_steps=NUMBER and checkpoint.resume=auto, or leave --max-restarts out"
    goes_on = keeps.every_steps > 0 and keeps.resumes
    refuse_if(given.max_restarts and not goes_on, message, remedy=remedy)


if __name__ == "__main__":
    run_and_leave(main)
