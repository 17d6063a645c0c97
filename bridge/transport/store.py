"""The store at a sender, through which the members of its groups find each other, and where one that aborts writes why.

Its server answers from a thread of C++, whatever its process does in Python. Leaves out groups (channel.py).
"""

from __future__ import annotations

import os
import socket
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from typing import Any

import psutil
from torch import distributed

dist: Any = distributed  # its stores are not typed

STORE_TIMEOUT = timedelta(seconds=60)
SCHEME = "tcp://"
ABORT = "abort"


def connect_store(endpoint: str, timeout: timedelta) -> Any:
    """RuntimeError where nobody listens there."""
    host, _, port = endpoint.removeprefix(SCHEME).rpartition(":")
    return dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=timeout)


def abort_all(endpoints: Collection[str], reason: str) -> None:
    """Tell the members of groups that this process is not in, all at once: each may take its time, where a sender was stopped.

    Nothing where the sender is gone.
    """

    def abort_at(endpoint: str) -> None:
        with suppress(RuntimeError):
            connect_store(endpoint, timedelta(seconds=3)).compare_set(ABORT, "", reason)

    with ThreadPoolExecutor(max(1, len(endpoints)), thread_name_prefix="megasync-abort") as threads:
        list(threads.map(abort_at, endpoints))


def open_store(address: str) -> Any:
    """A store that listens on `address` alone, on any free port; torch's own listens on all of the machine's addresses."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        listener = socket.create_server((address, 0), family=family)
    except OSError:  # the address of a gateway before this machine
        listener = socket.create_server(("", 0), family=family)
    with listener:
        port = listener.getsockname()[1]
        return dist.TCPStore(
            address, port, is_master=True, wait_for_workers=False, timeout=STORE_TIMEOUT, master_listen_fd=listener.detach()
        )


def own_address() -> str:
    """The address under which the other members reach this host: that of gloo's configured interface, if any, else
    the one with the route to MASTER_ADDR; the loopback's where there is no network.
    """
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    for entry in psutil.net_if_addrs().get(interface, []):
        if entry.family == socket.AF_INET:
            return str(entry.address)
    target = os.environ.get("MASTER_ADDR", "")
    target = target if target not in ("", "localhost", "127.0.0.1", "::1") else "192.0.2.1"  # RFC 5737: never sent to
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((target, 9))
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])
