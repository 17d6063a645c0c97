"""`python -m megasync.bench lanes` on one trainer rank: lanes from all ranks to receivers on their own GPUs, beside one group.

floor      as many bytes broadcast from rank 0's GPU to rank 1's, and nothing else
one group  as on one host: rank 0 sends, to the receivers that are not on its GPU, since NCCL takes a GPU once into a group
lanes      as between hosts: all ranks send to all receivers, each lane first to one on another GPU, which passes buckets on

`rollout.replicas` receivers, processes, stand for vLLM's workers, receiver r on the GPU of rank r + 1; all are taken to be on one
other host. Where a GPU has a rank and a receiver they take turns on it, which a sync between hosts does not.
Ways take turns, round by round; before each the weights change, and the warm-up and the last round end with a comparison of all
that receivers hold with what the trainer has. Leaves out vLLM, and tables (report.py).

    python -m megasync.bench lanes --config configs/bench_gpu.yaml bench.num_ranks=2 rollout.replicas=2
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch.distributed as dist

from bridge.export.source import WeightSource
from bridge.send.publish import Publisher
from bridge.transport.channel import Channel
from bridge.transport.open import own_device
from megasync.bench.common.program import Measured
from megasync.bench.common.rank import BenchRank, Way, seconds_by_name
from megasync.bench.nodes.pool import ElsewhereReceiverPool, connect, num_lanes
from megasync.bench.replicas.nccl import SECONDS, broadcast_all, bucket_sizes
from megasync.launch.devices import visible_devices
from megasync.launch.ray_cluster import free_port
from megasync.launch.scope import LOOPBACK
from megasync.run.rank_zero import control_group
from megasync.run.weights import build_exporter

END_SECONDS = 10.0


class LanesBench(BenchRank):
    """The rounds. Calls are collective; rank 0 alone has pools and results."""

    trains = False

    def start(self) -> None:
        self.engine = self.build_engine(self.config.engine)
        sender, everywhere = build_exporter(self.engine), build_exporter(self.engine, on_all_ranks=True)
        self.manifest = self.whole_manifest(sender)
        self._floor: Channel | None = None
        self.ways = {"floor": Way(self._broadcast, self.engine, None, None)} if self.layout.world_size > 1 else {}
        ports = self._start_receivers() if self.is_first else []
        connections = [connect(LOOPBACK, port) for port in ports]
        for connection in connections:
            self.ends.callback(_let_go, connection)
        if any(map(self._place, range(self.config.rollout.replicas))):
            apart = [connection for r, connection in enumerate(connections) if self._place(r)]  # from rank 0's GPU
            self.ways["one group"] = self._way(sender, apart, lanes=False)
        self.ways["lanes"] = self._way(everywhere, connections, lanes=True)

    def _way(self, source: WeightSource, connections: list[Any], *, lanes: bool) -> Way:
        pool = ElsewhereReceiverPool(connections) if self.is_first else None
        config = self.config.sync.model_copy(update={"transport": "nccl", "lanes": lanes})
        publisher = Publisher(source, pool, config, control_group())
        self.ends.callback(publisher.close)
        return Way(partial(self._publish, publisher), self.engine, source, pool, publisher)

    def _place(self, receiver: int) -> int:
        """The GPU that it is on, which is that of the rank of this number, if there is one."""
        return (receiver + 1) % max(self.layout.world_size, len(visible_devices()))

    def _start_receivers(self) -> list[int]:
        """By rank 0; each sees its GPU alone. Their ports."""
        ports, names = list[int](), visible_devices()
        for receiver in range(self.config.rollout.replicas):
            ports.append(free_port())
            own = {"CUDA_VISIBLE_DEVICES": names[self._place(receiver)]} if names else {}
            command = [sys.executable, "-m", "megasync.bench.nodes.receiver", LOOPBACK, str(ports[-1])]
            process = subprocess.Popen(command, env=os.environ | own)
            self.ends.callback(process.wait, END_SECONDS)
            self.ends.callback(process.kill)
        return ports

    def run(self) -> Measured:
        """All rounds; on rank 0 what report.py takes."""
        size = {"bytes": self.manifest.total_bytes, "tensors": len(self.manifest.tensors)}
        return self.take_turns(self.ways, {"model": size}, self._measure)

    def _measure(self, name: str, version: int) -> Measured:
        way = self.ways[name]
        if way.source is not None:
            self.change(self.engine)
        dist.barrier()
        return way.sync(version)

    def _publish(self, publisher: Publisher, version: int) -> Measured:
        report = publisher.publish(version)
        assert publisher._connection is not None
        counts = {"lanes": num_lanes(publisher), "receivers": len(publisher._connection.routes), "buckets": report.num_buckets}
        return {"seconds": report.seconds, **counts, "stages": seconds_by_name(report.stages)}

    def _broadcast(self, version: int) -> Measured:
        """From rank 0 to rank 1 what a sync sends, in buckets as large; the others wait."""
        sizes = bucket_sizes(self.manifest, self.config.sync.bucket_bytes)
        if self._floor is None:
            channel, endpoint = Channel.listen(2, own_device()) if self.is_first else (None, "")
            endpoint = self.from_all(endpoint)[0]
            if self.layout.rank == 1:
                channel = Channel.connect(endpoint, 1, 2, own_device(), time.monotonic() + SECONDS)
            self._floor = channel
        seconds = broadcast_all(self._floor, sizes) if self._floor is not None else 0.0
        dist.barrier()
        return {"seconds": seconds, "lanes": 1, "receivers": 1, "buckets": len(sizes)}


def _let_go(connection: Connection[Any, Any]) -> None:
    """A receiver, which may be gone."""
    with suppress(OSError), connection:
        connection.send(None)
