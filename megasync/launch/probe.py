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
BANDWIDTH_ROUNDS = 3
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
        """Seconds that the head's clock is ahead, whether an all-reduce is right, GB/s to the next node by seat."""
        self.exchange("before clocks")  # all leave it within some milliseconds
        clocks = self.exchange("clock", time.time())
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        backends, limit = "cpu:gloo,cuda:nccl" if self.backend == "nccl" else "gloo", timedelta(seconds=SECONDS)
        dist.init_process_group(backends, store=self.store, rank=self.seat, world_size=self.num_nodes, timeout=limit)
        values = torch.full((NUM_BYTES[self.backend] // 4,), float(self.seat + 1), device=self.device)
        dist.all_reduce(values)
        is_right = bool((values == sum(range(1, self.num_nodes + 1))).all())
        seconds = min(self._to_next(values) for _ in range(1 + BANDWIDTH_ROUNDS))  # the first one connects
        dist.destroy_process_group()
        ahead, rate = clocks[0] - clocks[self.seat], values.nbytes / seconds / 1e9
        return {"ahead": ahead, "is_right": is_right, "gb_per_second": rate}

    def _to_next(self, values: torch.Tensor) -> float:
        """Seconds in which all nodes send to the next one, in a ring."""
        dist.barrier()
        begin, received = time.monotonic(), torch.empty_like(values)
        sending = dist.P2POp(dist.isend, values, (self.seat + 1) % self.num_nodes)
        receiving = dist.P2POp(dist.irecv, received, (self.seat - 1) % self.num_nodes)
        for work in dist.batch_isend_irecv([sending, receiving]):
            work.wait()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.monotonic() - begin


def _accept(server: socket.socket) -> None:
    with suppress(OSError):  # closed
        while True:
            server.accept()[0].close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
