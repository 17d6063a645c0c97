"""JSON by key in the head's store, signs of life in it, and what it means when it does not answer.

The store is torch's, as torchrun's c10d rendezvous uses it. Leaves out what the keys mean (head.py, member.py).
"""

from __future__ import annotations

import json
import os
import socket
import struct
import sys
import threading
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

import psutil
from torch import distributed

dist: Any = distributed  # its stores are not typed

BEAT_SECONDS = 1.0
GRACE_SECONDS = 30.0
CONNECT_SECONDS = 3.0


class HeadGoneError(RuntimeError):
    """The head node's launcher has ended, or cannot be reached."""


class NodeStore:
    """One connection; not for several threads. `of_head`: the one that has the store itself."""

    def __init__(self, store: Any, host: str, *, of_head: bool = False) -> None:
        self._store, self.host, self.of_head = store, host, of_head

    @property
    def port(self) -> int:
        return int(self._store.port)

    @staticmethod
    def listen(host: str, port: int) -> NodeStore | None:
        """The head's. None where somebody has the port, or no way leads to the host; OSError where this user may not have it."""
        own = {entry.address for entries in psutil.net_if_addrs().values() for entry in entries}
        try:
            address = socket.gethostbyname(host)
        except OSError:
            return None
        try:
            listener = socket.create_server((address if address in own else "", port))
        except OSError as error:
            if error.errno == 98:  # EADDRINUSE
                return None
            raise
        with listener, suppress(RuntimeError):  # `host` is another's address, or name, and nobody answers there
            seconds = timedelta(seconds=CONNECT_SECONDS)
            options = {"is_master": True, "wait_for_workers": False, "timeout": seconds}
            store = dist.TCPStore(host, port, **options, master_listen_fd=listener.detach())
            return NodeStore(store, host, of_head=True)
        return None

    @staticmethod
    def connect(host: str, port: int) -> NodeStore | None:
        """A member's. None where nobody listens there, yet."""
        try:
            with socket.create_connection((host, port), timeout=CONNECT_SECONDS):
                pass
            seconds = timedelta(seconds=CONNECT_SECONDS)
            return NodeStore(dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=seconds), host)
        except (OSError, RuntimeError):
            return None

    def get(self, key: str) -> Any:
        """None where it was not set."""
        try:
            return json.loads(self._store.get(key)) if self._store.check([key]) else None
        except RuntimeError as error:
            raise self._gone() from error

    def set(self, key: str, value: Any) -> None:
        try:
            self._store.set(key, json.dumps(value))
        except RuntimeError as error:
            raise self._gone() from error

    def add(self, key: str, amount: int = 1) -> int:
        try:
            return int(self._store.add(key, amount))
        except RuntimeError as error:
            raise self._gone() from error

    def _gone(self) -> HeadGoneError:
        return HeadGoneError(f"the head node {self.host} is gone, or cannot be reached any more")


def silence(host: str, port: int) -> str:
    """Why there is no head to connect to, in words."""
    try:
        with socket.create_connection((host, port), timeout=CONNECT_SECONDS):
            remedy = "end it, or write another port in --head on all nodes"
            return f"a program listens there that is no head of a run; {remedy}"
    except OSError as error:  # its name is not known, nobody listens, there is no way, or no answer
        return str(error.strerror or error)


class Beats:
    """Signs of life of this node in the store, from a thread of its own; where the store is silent too long, all that wait for it
    in this process hear that it is gone.

    A store's client waits for ever where the machine that has it is gone without a word.
    """

    def __init__(self, store: NodeStore, key: str, limit_seconds: float) -> None:
        self._store, self._key, self._limit_seconds = store, key, limit_seconds
        self._over, self._closed = threading.Event(), threading.Event()
        self._asked = time.monotonic()
        for work in (self._beat, self._guard):
            threading.Thread(target=work, name=f"nodes-{work.__name__}", daemon=True).start()

    def close(self) -> None:
        self._over.set()
        self._closed.set()

    def _beat(self) -> None:
        try:
            while not self._over.wait(BEAT_SECONDS):
                self._store.add(self._key)
                self._asked = time.monotonic()
        except HeadGoneError:  # which the main thread meets too
            self._over.set()

    def _guard(self) -> None:
        while not self._over.wait(BEAT_SECONDS):
            if time.monotonic() - self._asked > self._limit_seconds:
                told = f"no answer from the head node {self._store.host} for {self._limit_seconds:g} s; this node ends"
                print(f"{told} (run.hung_rank_timeout_seconds)", file=sys.stderr, flush=True)
                _break_off(self._store.port)
                if not self._closed.wait(GRACE_SECONDS):
                    os._exit(1)  # the main thread waits for something else; what it started ends with it


def _break_off(port: int) -> None:
    """Every connection of this process to a store at `port`: who waits for an answer gets an error. What is not sent is dropped,
    which the head would take for signs of life once the link is there again.
    """
    for each in psutil.Process().net_connections("tcp"):
        if each.raddr and each.raddr.port == port:
            with suppress(OSError), socket.socket(fileno=os.dup(each.fd)) as own:
                own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                own.shutdown(socket.SHUT_RDWR)
