"""The program that tries, on every node of a round, what takes two: ports, clocks, a shared folder, an all-reduce, bandwidth.

Each node writes its results as JSON to the store at key `wire/SEAT`, whatever it met; compare.py says what they mean. Over NCCL
where every node has a GPU, else over gloo. Leaves out vLLM's and Ray's own ports.

    python -m megasync.nodes.wire HOST PORT SEAT NUM_NODES gloo|nccl FOLDER
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from bridge.transport.store import own_address

dist: Any = distributed  # its stores are not typed

SECONDS = 60
CONNECT_SECONDS = 5.0
FOLDER_SECONDS = 10.0  # in which a file must be seen on the other nodes
CLOCK_ROUNDS, BANDWIDTH_ROUNDS = 5, 3
NUM_BYTES = {"gloo": 4 * 2**20, "nccl": 256 * 2**20}


def main(arguments: Sequence[str]) -> int:
    """Exit code 0: the results are in the store."""
    host, port, place, size, backend, folder = arguments
    seat, num_nodes = int(place), int(size)
    store = dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=timedelta(seconds=SECONDS))
    found: dict[str, Any] = {}
    try:
        wire = Wire(store, seat, num_nodes, backend)
        found["unreachable"] = wire.unreachable()
        found["unseen"] = wire.unseen(Path(folder))
        if not any(wire.told("ports", found["unreachable"])):
            found |= wire.measure()
    except (RuntimeError, OSError) as error:
        found["error"] = (str(error).splitlines() or [type(error).__name__])[0]
    store.set(f"wire/{seat}", json.dumps(found))
    return 0


class Wire:
    """The node of this seat, and its way to the others."""

    def __init__(self, store: Any, seat: int, num_nodes: int, backend: str) -> None:
        self.store, self.seat, self.num_nodes, self.backend = store, seat, num_nodes, backend
        self.others = [other for other in range(num_nodes) if other != seat]

    def told(self, topic: str, value: Any) -> list[Any]:
        """What each node tells, by seat; waits for all.

        Raises:
            RuntimeError: one told nothing within SECONDS.
        """
        self.store.set(f"{topic}/{self.seat}", json.dumps(value))
        keys = [f"{topic}/{seat}" for seat in range(self.num_nodes)]
        self.store.wait(keys, timedelta(seconds=SECONDS))
        return [json.loads(self.store.get(key)) for key in keys]

    def unreachable(self) -> list[int]:
        """The nodes that refuse a connection to a port which they have opened."""
        with closing(socket.create_server(("", 0))) as server:
            threading.Thread(target=_answer, args=(server,), daemon=True).start()
            places = self.told("place", [own_address(), server.getsockname()[1]])
            found = []
            for other in self.others:
                try:
                    socket.create_connection(tuple(places[other]), timeout=CONNECT_SECONDS).close()
                except OSError:
                    found.append(other)
            self.told("connected", None)
        return found

    def unseen(self, folder: Path) -> list[int]:
        """The nodes whose file in the folder is not seen here; this node's own where it cannot write there."""
        name = f".node-{os.getpid()}-{self.seat}-{time.time_ns()}"
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(str(self.seat), encoding="ascii")
        names, deadline = self.told("file", name), time.monotonic() + FOLDER_SECONDS
        missing = list(range(self.num_nodes))
        while missing and time.monotonic() < deadline:
            missing = [seat for seat in missing if not (folder / names[seat]).exists()]
            if missing:
                time.sleep(0.2)
        self.told("looked", None)
        (folder / name).unlink(missing_ok=True)
        return missing

    def measure(self) -> dict[str, Any]:
        """Seconds that the head's clock is ahead, whether an all-reduce is right and its seconds, GB/s to each other node."""
        limit = timedelta(seconds=SECONDS)
        device = torch.device("cuda", 0) if self.backend == "nccl" else torch.device("cpu")
        if device.type == "cuda":
            torch.cuda.set_device(device)
        both = "cpu:gloo,cuda:nccl" if self.backend == "nccl" else "gloo"
        dist.init_process_group(both, store=self.store, rank=self.seat, world_size=self.num_nodes, timeout=limit)
        found: dict[str, Any] = {"ahead": self._clock()}
        values = torch.full((NUM_BYTES[self.backend] // 4,), float(self.seat + 1), device=device)
        dist.all_reduce(values)
        found["is_right"] = bool((values == sum(range(1, self.num_nodes + 1))).all())
        dist.barrier()
        begin = time.monotonic()
        dist.all_reduce(values)
        _finish(device)
        found["all_reduce_seconds"] = time.monotonic() - begin
        found["gb_per_second"] = self._bandwidths(values)
        dist.destroy_process_group()
        return found

    def _clock(self) -> float:
        """By the round trip that took the least time, as NTP does."""
        stamp, best, least = torch.zeros(1, dtype=torch.float64), 0.0, float("inf")
        for other in range(1, self.num_nodes):
            for _ in range(CLOCK_ROUNDS):
                if self.seat == 0:
                    dist.recv(stamp, other)
                    dist.send(torch.tensor([time.time()], dtype=torch.float64), other)
                elif self.seat == other:
                    begin, tick = time.time(), time.monotonic()
                    dist.send(stamp, 0)
                    dist.recv(stamp, 0)
                    took = time.monotonic() - tick
                    if took < least:
                        best, least = float(stamp[0]) - (begin + took / 2), took
        return best

    def _bandwidths(self, values: torch.Tensor) -> dict[str, float]:
        """To each other node; in each turn every node talks to one other at most."""
        found = {}
        for pairs in tournament(self.num_nodes):
            for turn in (0, 1):
                for source, target in ((pair[turn], pair[1 - turn]) for pair in pairs if self.seat in pair):
                    self._send(values[:1], source, target)  # connects
                    seconds = min(self._send(values, source, target) for _ in range(BANDWIDTH_ROUNDS))
                    if self.seat == source:
                        found[str(target)] = values.nbytes / seconds / 1e9
            dist.barrier()
        return found

    def _send(self, values: torch.Tensor, source: int, target: int) -> float:
        """Seconds until the target has them, and has said so."""
        begin = time.monotonic()
        if self.seat == source:
            dist.send(values, target)
            dist.recv(values[:1], target)
        else:
            dist.recv(values, source)
            dist.send(values[:1], source)
        _finish(values.device)
        return time.monotonic() - begin


def tournament(num_nodes: int) -> list[list[tuple[int, int]]]:
    """Turns in which each pair of nodes meets once and no node is in two pairs (the circle method)."""
    places = list(range(num_nodes)) + ([-1] if num_nodes % 2 else [])
    turns = []
    for _ in range(len(places) - 1):
        pairs = zip(places[: len(places) // 2], reversed(places[len(places) // 2 :]), strict=True)
        turns.append([(min(pair), max(pair)) for pair in pairs if -1 not in pair])
        places = [places[0], places[-1], *places[1:-1]]
    return turns


def _answer(server: socket.socket) -> None:
    with suppress(OSError):  # closed
        while True:
            server.accept()[0].close()


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
