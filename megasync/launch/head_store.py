"""The store of a run on several nodes: JSON by key in torch's TCPStore, which the head node's launcher has.

torch's elastic rendezvous (elastic.py) uses the same server. Leaves out the keys' meaning (node.py).
"""

from __future__ import annotations

import argparse
import errno
import json
import math
import os
import socket
import struct
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

import psutil
from torch import distributed

from bridge.transport.store import own_address
from megasync.launch.connect import connection_problem
from megasync.launch.processes import REFUSED

dist: Any = distributed  # its stores are not typed

CONNECT_SECONDS = 3.0
SAY_SECONDS = 10.0  # between two lines on missing nodes
RETRY_SECONDS = 1.0
GLOO = "GLOO_SOCKET_IFNAME"


class HeadLostError(RuntimeError):
    """The head node's launcher has ended, or cannot be reached."""


class LeaveError(Exception):
    """This node ends, or all do, with an exit code and the reason."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


class HeadStore:
    """One connection; not for several threads. `of_head`: this process has the server."""

    def __init__(self, store: Any, host: str, *, of_head: bool = False) -> None:
        self._store, self.host, self.of_head = store, host, of_head

    @staticmethod
    def listen(host: str, port: int) -> HeadStore | None:
        """The head's. None where the port is taken, or `host` cannot be reached; OSError where this user may not listen there."""
        try:
            address = socket.gethostbyname(host)
            listener = socket.create_server((address if address in own_addresses() else "", port))
        except (socket.gaierror, UnicodeError):
            return None
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return None
            raise
        with listener, suppress(RuntimeError):  # `host` is another node's address, and nothing listens there
            store = _connect(host, port, CONNECT_SECONDS, is_master=True, master_listen_fd=listener.detach())
            return HeadStore(store, host, of_head=True)
        return None

    @staticmethod
    def connect(host: str, port: int) -> HeadStore | None:
        """A member's. None where nothing listens there yet."""
        if connection_problem(host, port):
            return None
        with suppress(RuntimeError):
            return HeadStore(_connect(host, port, CONNECT_SECONDS), host)
        return None

    def for_rendezvous(self, seconds: float) -> Any:
        """Another connection, whose operations wait up to `seconds`. torch.distributed.TCPStore."""
        try:
            return _connect(self._store.host, self._store.port, seconds)
        except RuntimeError as error:
            raise self.lost() from error

    def limit_response_time(self, seconds: float) -> None:
        """All connections of this process fail once the server has not answered for `seconds`.

        By default a store's client waits without end where the server was stopped, or its machine cannot be reached (torch 2.13,
        TCPStore.cpp, check and compareSet).
        """
        timeout = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
        for each in psutil.Process().net_connections("tcp"):
            if each.raddr and each.raddr.port == self._store.port:
                with socket.socket(fileno=os.dup(each.fd)) as connection:
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)

    def get(self, key: str) -> Any:
        """The value of a key; None where it was not set."""
        try:
            return json.loads(self._store.get(key)) if self._store.check([key]) else None
        except RuntimeError as error:
            raise self.lost() from error

    def set(self, key: str, value: Any) -> None:
        try:
            self._store.set(key, json.dumps(value))
        except RuntimeError as error:
            raise self.lost() from error

    def add(self, key: str, amount: int = 1) -> int:
        try:
            return int(self._store.add(key, amount))
        except RuntimeError as error:
            raise self.lost() from error

    def lost(self) -> HeadLostError:
        return HeadLostError(f"the head node {self.host} is gone, or cannot be reached any more")


def _connect(host: str, port: int, seconds: float, *, is_master: bool = False, **options: Any) -> Any:
    return dist.TCPStore(host, port, is_master=is_master, wait_for_workers=False, timeout=timedelta(seconds=seconds), **options)


def find_head(given: argparse.Namespace) -> HeadStore:
    """The head's store: opened here where this is the head.

    Raises:
        LeaveError: there was no head in time, or another node is the head.
    """
    may_be_head = given.node_rank == 0 or (given.node_rank is None and is_own(given.host))
    deadline, said_at, place = time.monotonic() + given.wait_seconds, -math.inf, f"{given.host}:{given.port}"
    while True:
        try:
            store = HeadStore.listen(given.host, given.port) if may_be_head else None
        except OSError as error:
            message = f"--head {place}: this node cannot listen there: {error.strerror}; write another port on all nodes"
            raise LeaveError(REFUSED, message) from error
        if (store := store or HeadStore.connect(given.host, given.port)) is not None:
            break
        other = "the program that listens there is no head of a run; write another port"
        problem = connection_problem(given.host, given.port) or other
        if time.monotonic() > deadline:
            raise LeaveError(1, f"gave up after {given.wait_seconds:g} s: nothing answers at {place}: {problem}")
        if time.monotonic() - said_at >= SAY_SECONDS:
            print(f"waiting: the head node {place} is not here: {problem}", flush=True)
            said_at = time.monotonic()
        time.sleep(RETRY_SECONDS)
    if store.of_head and store.add("heads") > 1:
        message = f"--node-rank 0: {socket.gethostname()} is not the head node {given.host}, which is here already"
        raise LeaveError(REFUSED, f"{message}; write --node-rank 0 on that node alone")
    return store


def own_addresses() -> set[str]:
    return {entry.address for entries in psutil.net_if_addrs().values() for entry in entries}


def is_own(host: str) -> bool:
    """Whether a name or address is this node's."""
    try:
        return socket.gethostbyname(host) in own_addresses()
    except (OSError, UnicodeError):
        return False


def reachable_address(host: str) -> str:
    """The address of this node on its route to the head, also where the head's own name is that of its loopback."""
    if GLOO in os.environ or (is_own(host) and socket.gethostbyname(host).startswith("127.")):
        return own_address()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str:
    """The network interface that has it."""
    found = (name for name, entries in psutil.net_if_addrs().items() for entry in entries if entry.address == address)
    return next(found, "")
