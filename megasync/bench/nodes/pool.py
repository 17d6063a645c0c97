"""Receivers on other nodes, as a Publisher sees replicas of one worker each. Leaves out what they do (receiver.py)."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from multiprocessing.connection import Client, Connection, wait
from typing import Any

from bridge.messages import BeginSync
from bridge.send.publish import Publisher
from megasync.bench.nodes.receiver import KEY

CONNECT_SECONDS = 120.0
CALL_SECONDS = 60.0


def connect(address: str, port: int) -> Connection[Any, Any]:
    """To a receiver that may still be starting."""
    deadline = time.monotonic() + CONNECT_SECONDS
    while True:
        try:
            return Client((address, port), authkey=KEY)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


class ReceiverPool:
    """Some of the receivers; the Replicas of bridge/messages.py."""

    def __init__(self, connections: Sequence[Connection[Any, Any]]) -> None:
        self._connections = list(connections)

    @property
    def reader_names(self) -> list[str]:
        return [f"replica {replica} worker 0" for replica in range(len(self._connections))]

    @property
    def reader_numbers(self) -> list[int]:
        return list(range(len(self._connections)))

    def reader_hosts(self) -> list[str]:
        return self.call("host")

    def call(self, name: str, *arguments: Any) -> list[Any]:
        """Of all of them at once."""
        for connection in self._connections:
            connection.send((name, arguments))
        return [self._answer(connection) for connection in self._connections]

    def _answer(self, connection: Connection[Any, Any]) -> Any:
        if not connection.poll(CALL_SECONDS):
            raise RuntimeError(f"replica {self._connections.index(connection)} gives no answer")
        problem, value = connection.recv()
        if problem:
            raise RuntimeError(f"replica {self._connections.index(connection)}: {problem}")
        return value

    def pause(self) -> None:
        """Nothing generates."""

    def begin(self, message: BeginSync) -> list[str]:
        self._send_each("begin", message)
        for connection in self._connections:
            self._answer(connection)
        return []

    def receive(self, message: BeginSync) -> list[Any]:
        self._send_each("receive", dataclasses.replace(message, manifest_json=None))
        return list(self._connections)

    def _send_each(self, name: str, message: BeginSync) -> None:
        for replica, connection in enumerate(self._connections):
            endpoints = message.endpoints[replica : replica + 1]
            own = dataclasses.replace(message, replica=replica, endpoints=endpoints, first_reader=replica)
            connection.send((name, (own,)))

    def raise_if_failed(self, refs: list[Any], seconds: float = 0.0) -> list[int]:
        """`refs` are the connections whose answer is due."""
        if refs:
            for ready in wait(refs, seconds):
                refs.remove(ready)
                self._answer(ready)  # type: ignore[arg-type]
        return [self._connections.index(each) for each in refs]

    def commit(self, version: int, timeout: float) -> None:
        """All is in place."""

    def loader_fallback(self) -> dict[str, str]:
        return {}

    def read_digests(self, timeout: float, replicas: Sequence[int] | None = None) -> dict[int, dict[str, int]]:
        chosen = range(len(self._connections)) if replicas is None else replicas
        for replica in chosen:
            self._connections[replica].send(("read_digests", ()))
        return {replica: self._answer(self._connections[replica]) for replica in chosen}

    def resume(self) -> None:
        """Nothing generates."""

    def abort(self, *, timeout: float) -> tuple[list[int], list[int]]:
        return [], list(range(len(self._connections)))


class ElsewhereReceiverPool(ReceiverPool):
    """Of receivers that are taken to be on a host of their own."""

    def reader_hosts(self) -> list[str]:
        return ["another host"] * len(self.reader_names)


def num_lanes(publisher: Publisher) -> int:
    """Of its connection, which is there after a sync; 1: one sender for all."""
    assert publisher._connection is not None
    lanes = publisher._connection.lanes
    return len(lanes.lanes) if lanes is not None else 1
