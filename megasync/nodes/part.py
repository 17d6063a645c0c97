"""This node's part in a run: it finds the head's store or opens it, says that it has come, and stays until the run is over.

Leaves out the command (command.py), and what a node does in a round (member.py).
"""

from __future__ import annotations

import argparse
import os
import shlex
import socket
import sys
import time
from contextlib import suppress
from dataclasses import asdict

import psutil

from bridge.transport.store import own_address
from megasync.config.errors import ConfigError
from megasync.config.schema import Config
from megasync.launch.devices import visible_devices
from megasync.launch.last_words import last_words
from megasync.launch.num_ranks import num_replica_gpus
from megasync.launch.processes import REFUSED
from megasync.launch.stop_request import forget_former_stop
from megasync.nodes.facts import node_facts
from megasync.nodes.head import FINAL, Head, Terms
from megasync.nodes.member import SAY_SECONDS, Member
from megasync.nodes.roll_call import Arrival
from megasync.nodes.store import Beats, HeadGoneError, NodeStore, silence

ACKNOWLEDGED_SECONDS = 10.0
RETRY_SECONDS = 1.0
HEAD_GONE = "the run ends here"
GLOO = "GLOO_SOCKET_IFNAME"


def take_part(given: argparse.Namespace, config: Config, num_ranks: int) -> int:
    """The exit code."""
    try:
        return _take_part(given, config, num_ranks)
    except HeadGoneError as error:
        print(error, file=sys.stderr)
        return 1


def _take_part(given: argparse.Namespace, config: Config, num_ranks: int) -> int:
    facts = node_facts(config)
    terms = Terms(
        num_nodes=given.num_nodes, expected=given.expected, wait_seconds=given.wait_seconds, max_restarts=given.max_restarts,
        limit_seconds=config.run.hung_rank_timeout_seconds, replicas=config.rollout.replicas if num_replica_gpus(config) else 0,
        tensor_parallel=config.rollout.tensor_parallel, min_nodes=given.min_nodes, parallel=config.engine.parallel,
        min_replicas=config.rollout.min_replicas, run_folder=config.run.folder,
    )  # fmt: skip
    try:
        store = meet(given)
    except OSError as error:
        told = f"--head {given.host}:{given.port}: this node cannot listen there: {error.strerror}"
        print(f"{told}; write another port on all nodes", file=sys.stderr)
        return REFUSED
    if store is None:
        why = silence(given.host, given.port)
        print(f"gave up after {given.wait_seconds:g} s: nobody answers at {given.host}:{given.port}: {why}", file=sys.stderr)
        return 1
    if store.of_head and store.add("heads") > 1:
        remedy = "write --node-rank 0 on that node alone"
        told = f"--node-rank 0: {socket.gethostname()} is not the head node {given.host}, which is here already; {remedy}"
        print(told, file=sys.stderr)
        return REFUSED
    if store.of_head:
        with suppress(ConfigError):  # its `stop` is that of a run which is going on; rank 0 refuses this one, on all nodes
            forget_former_stop(config.run.folder)
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
    head = Head(store, address, terms) if store.of_head else None
    member = Member(store, arrival, head, config, starts_ray=starts_ray)
    code, told = live(member, head)
    beats.close()
    if told:
        print(told, file=sys.stderr)
    if code not in (0, *FINAL) and (arrival.is_head or HEAD_GONE in told):
        print(last_words(config, shlex.join(["launch/torchrun_nodes.sh", *sys.argv[1:]]), code), file=sys.stderr)
    return code


def live(member: Member, head: Head | None) -> tuple[int, str]:
    """The node's exit code and last words; the others hear of it where it leaves before them."""
    try:
        code, told = member.live()
    except HeadGoneError as error:
        return 1, f"{error}: {HEAD_GONE}; the same command on all nodes goes on from its newest checkpoint"
    except SystemExit as leaving:  # a signal
        code, told = int(leaving.code or 0), ""
    with suppress(HeadGoneError):  # which may have ended a moment ago
        member.store.set(f"acknowledged/{member.arrival.number}", {})
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
            print(f"waiting: the head node {given.host}:{given.port} is not here: {silence(given.host, given.port)}", flush=True)
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
