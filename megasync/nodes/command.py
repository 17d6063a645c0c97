"""The same command on every node of a run: it finds the others, checks them, and starts Ray and this node's ranks.

    ./launch/torchrun_nodes.sh CONFIG.yaml [key=value ...] --nodes N --head HOST[:PORT] [--node-rank R] [--nproc P]

The head is the node with --node-rank 0, else the one that has the address of HOST. Exit codes: 0 done; 1 failed, or a node was
missing; 2 config, command or a node is not fit, nothing was started; 75 the run was asked to stop, and goes on when it is started
again.
Leaves out what a round is (head.py).
"""

from __future__ import annotations

import argparse
import os
import shlex
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict

import psutil

from bridge.transport.channel import own_address
from megasync.config.errors import main_errors, refuse_if
from megasync.config.load import load_config
from megasync.config.schema import Config
from megasync.launch.devices import visible_devices
from megasync.launch.last_words import last_words
from megasync.launch.num_ranks import num_replica_gpus
from megasync.launch.processes import end_on_sigterm
from megasync.launch.scope import run_scope
from megasync.nodes.facts import node_facts
from megasync.nodes.head import FINAL, Head, Terms
from megasync.nodes.member import SAY_SECONDS, Member
from megasync.nodes.roll_call import Arrival
from megasync.nodes.store import Beats, HeadGoneError, NodeStore
from megasync.train import why_done

PORT = 29400  # torchrun's
ACKNOWLEDGED_SECONDS = 10.0
RETRY_SECONDS = 1.0
GLOO = "GLOO_SOCKET_IFNAME"


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Flags may stand before, between and after the overrides."""
    parser = argparse.ArgumentParser(prog="launch/torchrun_nodes.sh", description="Train by a YAML config on several nodes.")
    parser.add_argument("config", help="YAML file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="such as engine.wrap=ddp")
    parser.add_argument("--nodes", required=True, metavar="N", help="how many, or their host names with commas between them")
    parser.add_argument("--head", required=True, metavar="HOST[:PORT]", help=f"the node that the others find (port: {PORT})")
    help_ = "this node's place, from 0, the head, on (default: as they come)"
    parser.add_argument("--node-rank", type=int, metavar="R", help=help_)
    help_ = "trainer ranks of this node (default: 1, or its GPUs less its replicas')"
    parser.add_argument("--nproc", type=int, metavar="P", help=help_)
    parser.add_argument("--wait-seconds", type=float, default=600.0, metavar="S", help="for nodes to come (default: 600)")
    help_ = "how often the run may go on after a node or a rank was lost, once the node or a spare is there (default: 0)"
    parser.add_argument("--max-restarts", type=int, default=0, metavar="K", help=help_)
    given = parser.parse_intermixed_args(list(arguments))
    names = given.nodes.split(",")
    given.expected = () if given.nodes.isdigit() else tuple(names)
    given.num_nodes = int(given.nodes) if given.nodes.isdigit() else len(names)
    host, _, port = given.head.partition(":")
    given.host, given.port = host, int(port) if port.isdigit() else PORT
    if given.num_nodes < 1 or (port and not port.isdigit()):
        parser.error(f"--nodes {given.nodes} --head {given.head}: at least one node, and a port that is a number")
    if given.node_rank is not None and not 0 <= given.node_rank < given.num_nodes:
        parser.error(f"--node-rank {given.node_rank}: 0 to {given.num_nodes - 1}")
    if (given.nproc is not None and given.nproc < 1) or given.max_restarts < 0:
        parser.error("--nproc: at least 1; --max-restarts: at least 0")
    return given


def main(arguments: Sequence[str]) -> int:
    """The exit code."""
    given = parse(arguments)
    with main_errors():
        config = load_config(given.config, given.overrides)
        num_ranks = given.nproc or default_nproc(config, len(visible_devices()), given.num_nodes)
        check_nodes(config, given)
    if why := why_done(config):
        print(f"{config.run.folder}: {why}")
        return 0
    end_on_sigterm(and_on_sigint=True)
    with run_scope():
        return take_part(given, config, num_ranks)


def default_nproc(config: Config, gpus: int, num_nodes: int) -> int:
    """1 without GPUs, else those that this node's share of the replicas leaves."""
    if gpus == 0:
        return 1
    workers = num_replica_gpus(config)
    share = -(-config.rollout.replicas // num_nodes) * config.rollout.tensor_parallel if workers else 0
    message = f"rollout.replicas = {config.rollout.replicas}: their share leaves no GPU of this node for the trainer"
    refuse_if(share >= gpus, message, GPUs=str(gpus), remedy="write --nproc P for ranks on this node, or lower rollout.replicas")
    return gpus - share


def check_nodes(config: Config, given: argparse.Namespace) -> None:
    """What one node does and several do not."""
    several, rollout, keeps = given.num_nodes > 1, config.rollout, config.checkpoint
    has_rollouts = config.algorithm.name == "grpo"
    message = "rollout.placement = colocated: replicas share the GPUs of one node with its ranks"
    refuse_if(several and has_rollouts and rollout.is_colocated, message, remedy="write rollout.placement=separate, or --nodes 1")
    message = "sync.transport = shm: shared memory is one node's"
    remedy = "write sync.transport=auto, which is nccl on several nodes"
    refuse_if(several and has_rollouts and config.sync.transport == "shm", message, choices="auto, nccl", remedy=remedy)
    message = f"--max-restarts {given.max_restarts}: there is nothing that a restart could go on from"
    remedy = "write checkpoint.every_steps=NUMBER and checkpoint.resume=auto, or leave --max-restarts out"
    goes_on = keeps.every_steps > 0 and keeps.resume == "auto"
    refuse_if(given.max_restarts and not goes_on, message, remedy=remedy)


def take_part(given: argparse.Namespace, config: Config, num_ranks: int) -> int:
    facts = node_facts(config, num_ranks * given.num_nodes)
    terms = Terms(
        num_nodes=given.num_nodes, expected=given.expected, wait_seconds=given.wait_seconds, max_restarts=given.max_restarts,
        limit_seconds=config.run.hung_rank_timeout_seconds, replicas=config.rollout.replicas if num_replica_gpus(config) else 0,
        tensor_parallel=config.rollout.tensor_parallel,
    )  # fmt: skip
    store = meet(given)
    if store is None:
        print(f"gave up after {given.wait_seconds:g} s: nobody answers at {given.host}:{given.port}", file=sys.stderr)
        return 1
    address = reach(given.host)
    os.environ.setdefault(GLOO, interface_of(address))
    number = store.add("arrivals")
    arrival = Arrival(
        number, socket.gethostname(), address, given.node_rank, num_ranks, len(visible_devices()), is_head=store.of_head
    )
    beat_store = store if store.of_head else NodeStore.connect(given.host, given.port)
    if beat_store is None:
        print(f"nobody answers any more at {given.host}:{given.port}", file=sys.stderr)
        return 1
    beats = Beats(beat_store, f"beat/{number}", terms.limit_seconds)
    store.set(f"arrival/{number}", {"arrival": asdict(arrival), "facts": facts})
    starts_ray = config.algorithm.name == "grpo" and config.rollout.ray_address == "local"
    run = [given.config, *given.overrides]
    head = Head(store, address, terms) if store.of_head else None
    member = Member(store, arrival, head, run, config.run.dir, starts_ray=starts_ray)
    code, told = live(member, head)
    beats.close()
    if told:
        print(told, file=sys.stderr)
    if code not in (0, *FINAL) and arrival.is_head:
        print(last_words(config, shlex.join(["launch/torchrun_nodes.sh", *sys.argv[1:]])), file=sys.stderr)
    return code


def live(member: Member, head: Head | None) -> tuple[int, str]:
    """The node's exit code and last words; the others hear of it where it leaves before them."""
    try:
        code, told = member.live()
        member.store.add("acknowledged")
    except HeadGoneError as error:
        return 1, f"{error}: the run ends here; the same command on all nodes goes on from its newest checkpoint"
    except SystemExit as leaving:  # a signal
        code, told = int(leaving.code or 0), ""
    if head is not None:
        wait_for_others(head)
    return code, told


def wait_for_others(head: Head) -> None:
    """The store lives until all have read the last word, or are gone."""
    deadline = time.monotonic() + ACKNOWLEDGED_SECONDS
    while not head.has_acknowledged() and time.monotonic() < deadline:
        time.sleep(0.1)


def meet(given: argparse.Namespace) -> NodeStore | None:
    """The head's store: opened here where this is the head, else found. None: nobody had it in time."""
    may_be_head = given.node_rank == 0 or (given.node_rank is None and is_own(given.host))
    deadline, said_at = time.monotonic() + given.wait_seconds, 0.0
    while True:
        store = NodeStore.listen(given.host, given.port) if may_be_head else None
        store = store or NodeStore.connect(given.host, given.port)
        if store is not None or time.monotonic() > deadline:
            return store
        if time.monotonic() - said_at >= SAY_SECONDS:
            print(f"waiting: the head node {given.host}:{given.port} is not here", flush=True)
            said_at = time.monotonic()
        time.sleep(RETRY_SECONDS)


def is_own(host: str) -> bool:
    """Whether a name or address is this node's."""
    try:
        address = socket.gethostbyname(host)
    except OSError:
        return False
    return address in {entry.address for entries in psutil.net_if_addrs().values() for entry in entries}


def reach(host: str) -> str:
    """The address of this node that the others reach, by the way to the head; the head's own may be that of its loopback."""
    if GLOO in os.environ or (is_own(host) and socket.gethostbyname(host).startswith("127.")):
        return own_address()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str:
    """The network interface that has it."""
    found = (name for name, entries in psutil.net_if_addrs().items() for entry in entries if entry.address == address)
    return next(found, "")
