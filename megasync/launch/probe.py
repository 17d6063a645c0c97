"""The program that measures between the nodes of a run: open ports, a shared folder, clocks, an all-reduce, bandwidth.

Each node writes its results as JSON to the store at key `probe/SEAT`, whatever happened; preflight.py judges them. NCCL where
every node has a GPU, else gloo. Leaves out vLLM's and Ray's own ports.

    python -m megasync.launch.probe HOST PORT SEAT NUM_NODES gloo|nccl FOLDER
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
FOLDER_SECONDS = 10.0  # within which a file must be visible on the other nodes
CLOCK_ROUNDS, BANDWIDTH_ROUNDS = 5, 3
NUM_BYTES = {"gloo": 4 * 2**20, "nccl": 256 * 2**20}


def main(arguments: Sequence[str]) -> int:
    """Exit code 0: the results are in the store."""
    host, port, seat, num_nodes, backend, folder = arguments
    store = dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=timedelta(seconds=SECONDS))
    result: dict[str, Any] = {}
    try:
        probe = Probe(store, int(seat), int(num_nodes), backend)
        result["unreachable"] = probe.unreachable()
        result["unseen"] = probe.unseen(Path(folder))
        if not any(probe.exchange("ports", result["unreachable"])):
            result |= probe.measure()
    except (RuntimeError, OSError) as error:
        result["error"] = (str(error).splitlines() or [type(error).__name__])[0]
    store.set(f"probe/{seat}", json.dumps(result))
    return 0


class Probe:
    """One node's, by its seat from 0, the head's, on."""

    def __init__(self, store: Any, seat: int, num_nodes: int, backend: str) -> None:
        self.store, self.seat, self.num_nodes, self.backend = store, seat, num_nodes, backend
        self.device = torch.device("cuda", 0) if backend == "nccl" else torch.device("cpu")

    def exchange(self, topic: str, value: Any = None) -> list[Any]:
        """The values of all nodes by seat, once all are there; RuntimeError after SECONDS."""
        self.store.set(f"{topic}/{self.seat}", json.dumps(value))
        keys = [f"{topic}/{seat}" for seat in range(self.num_nodes)]
        self.store.wait(keys, timedelta(seconds=SECONDS))
        return [json.loads(self.store.get(key)) for key in keys]

    def unreachable(self) -> list[int]:
        """The nodes that refuse a connection to a port which they have opened."""
        found = []
        with closing(socket.create_server(("", 0))) as server:
            threading.Thread(target=_accept, args=(server,), daemon=True).start()
            for other, place in enumerate(self.exchange("place", [own_address(), server.getsockname()[1]])):
                try:
                    socket.create_connection(tuple(place), timeout=CONNECT_SECONDS).close()
                except OSError:
                    found.append(other)
            self.exchange("connected")
        return found

    def unseen(self, folder: Path) -> list[int]:
        """The nodes whose file in the folder is not visible here; this node's own where it cannot write there."""
        name = f".node-{os.getpid()}-{self.seat}-{time.time_ns()}"
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name).touch()
        missing = dict(enumerate(self.exchange("file", name)))
        deadline = time.monotonic() + FOLDER_SECONDS
        while missing and time.monotonic() < deadline:
            missing = {seat: other for seat, other in missing.items() if not (folder / other).exists()}
            time.sleep(0.2 if missing else 0.0)
        self.exchange("looked")
        (folder / name).unlink(missing_ok=True)
        return list(missing)

    def measure(self) -> dict[str, Any]:
        """Seconds that the head's clock is ahead, whether an all-reduce is right, GB/s to each other node."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        backends, limit = "cpu:gloo,cuda:nccl" if self.backend == "nccl" else "gloo", timedelta(seconds=SECONDS)
        dist.init_process_group(backends, store=self.store, rank=self.seat, world_size=self.num_nodes, timeout=limit)
        ahead = self._seconds_ahead()
        values = torch.full((NUM_BYTES[self.backend] // 4,), float(self.seat + 1), device=self.device)
        dist.all_reduce(values)
        is_right = bool((values == sum(range(1, self.num_nodes + 1))).all())
        rates = self._bandwidths(values)
        dist.destroy_process_group()
        return {"ahead": ahead, "is_right": is_right, "gb_per_second": rates}

    def _seconds_ahead(self) -> float:
        """Of the head's clock, by the shortest of several round trips, as NTP does."""
        stamp, trips = torch.zeros(1, dtype=torch.float64), []
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
                    trips.append((took, float(stamp[0]) - (begin + took / 2)))
        return min(trips)[1] if trips else 0.0

    def _bandwidths(self, values: torch.Tensor) -> dict[str, float]:
        """To each other node; at any time a node talks to at most one other."""
        found = {}
        for pairs in tournament(self.num_nodes):
            for source, target in [way for pair in pairs if self.seat in pair for way in (pair, pair[::-1])]:
                self._send(values[:1], source, target)  # connects
                seconds = min(self._send(values, source, target) for _ in range(BANDWIDTH_ROUNDS))
                if self.seat == source:
                    found[str(target)] = values.nbytes / seconds / 1e9
            dist.barrier()
        return found

    def _send(self, values: torch.Tensor, source: int, target: int) -> float:
        """Seconds until the target has acknowledged them."""
        begin = time.monotonic()
        if self.seat == source:
            dist.send(values, target)
            dist.recv(values[:1], target)
        else:
            dist.recv(values, source)
            dist.send(values[:1], source)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.monotonic() - begin


def tournament(num_nodes: int) -> list[list[tuple[int, int]]]:
    """Rounds in which each pair of nodes meets once and no node is in two pairs (the circle method)."""
    places = list(range(num_nodes)) + ([-1] if num_nodes % 2 else [])
    rounds = []
    for _ in range(len(places) - 1):
        pairs = zip(places[: len(places) // 2], reversed(places[len(places) // 2 :]), strict=True)
        rounds.append([(min(pair), max(pair)) for pair in pairs if -1 not in pair])
        places = [places[0], places[-1], *places[1:-1]]
    return rounds


def _accept(server: socket.socket) -> None:
    with suppress(OSError):  # closed
        while True:
            server.accept()[0].close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
