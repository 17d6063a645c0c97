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
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from bridge.export.source import WeightSource
from bridge.layout.manifest import Manifest
from bridge.send.publish import Publisher
from bridge.transport.channel import Channel
from bridge.transport.open import own_device
from engine.engine import Engine
from megasync.bench.common.random_engine import FrozenEngine, RandomEngine, negate
from megasync.bench.common.rank import BenchRank, Measured
from megasync.bench.config import BenchRoot
from megasync.bench.nodes.pool import ReceiverPool, connect
from megasync.bench.replicas.nccl import SECONDS, broadcast_all
from megasync.bench.sync.methods import seconds_by_name
from megasync.launch.devices import visible_devices
from megasync.launch.ray_cluster import free_port
from megasync.launch.scope import LOOPBACK
from megasync.run.rank_zero import control_group
from megasync.run.weights import build_exporter

FLOOR = "floor"
END_SECONDS = 10.0


class Way(NamedTuple):
    """`source`: what is sent, and must be held afterwards; `pool`: rank 0's."""

    source: WeightSource
    pool: ReceiverPool | None
    publisher: Publisher


class LanesBench(BenchRank):
    """The rounds. Calls are collective; rank 0 alone has pools and results."""

    def __init__(self, config: BenchRoot, results_path: Path, ends: ExitStack) -> None:
        super().__init__(config, results_path, ends, shares_memory=True)
        self.engine = self._build()
        sender, everywhere = build_exporter(self.engine), build_exporter(self.engine, on_all_ranks=True)
        stages = dict(self.from_all((sender.stage, sender.manifest())))
        self.manifest = Manifest.concatenate(stages[stage] for stage in sorted(stages))
        self._floor: Channel | None = None
        apart = [r for r in range(config.rollout.replicas) if self._place(r)]  # from rank 0's GPU
        self.ways: dict[str, Way] = {}
        ports = self._start_receivers()
        connections = [connect(LOOPBACK, port) for port in ports] if self.layout.rank == 0 else []
        for connection in connections:
            ends.callback(_let_go, connection)
        if apart:
            self.ways["one group"] = self._way(sender, [connections[r] for r in apart if connections], lanes=False)
        self.ways["lanes"] = self._way(everywhere, connections, lanes=True)

    def _build(self) -> Engine:
        """Without an optimizer where no step changes the weights."""
        config = self.config
        if config.bench.shapes == "none":
            return self.build_engine(config.engine)
        kind = FrozenEngine if config.bench.update == "negate" else RandomEngine
        return kind(config.model, config.engine, config.algorithm, num_steps=config.run.steps)

    def _way(self, source: WeightSource, connections: list[Any], *, lanes: bool) -> Way:
        pool = _Elsewhere(connections) if self.layout.rank == 0 else None
        config = self.config.sync.model_copy(update={"transport": "nccl", "lanes": lanes})
        publisher = Publisher(source, pool, config, control_group())
        self.ends.callback(publisher.close)
        return Way(source, pool, publisher)

    def _place(self, receiver: int) -> int:
        """The GPU that it is on, which is that of the rank of this number, if there is one."""
        return (receiver + 1) % max(self.layout.world_size, len(visible_devices()))

    def _start_receivers(self) -> list[int]:
        """By rank 0; each sees its GPU alone. Their ports."""
        ports = []
        for receiver in range(self.config.rollout.replicas) if self.layout.rank == 0 else ():
            ports.append(free_port())
            names = visible_devices()
            own = {"CUDA_VISIBLE_DEVICES": names[self._place(receiver)]} if names else {}
            command = [sys.executable, "-m", "megasync.bench.nodes.receiver", LOOPBACK, str(ports[-1])]
            process = subprocess.Popen(command, env=os.environ | own)
            self.ends.callback(process.wait, END_SECONDS)
            self.ends.callback(process.kill)
        return ports

    def run(self) -> Measured:
        """All rounds; on rank 0 what report.py takes."""
        size = {"bytes": self.manifest.total_bytes, "tensors": len(self.manifest.tensors)}
        results: Measured = {"warm_up": [], "rounds": [], "model": size}
        num_rounds, version = self.config.bench.rounds, 0
        for index in range(-1, num_rounds):  # -1 warms up
            if self.layout.world_size > 1:
                results["warm_up" if index < 0 else "rounds"].append({"round": index, "method": FLOOR, **self._broadcast()})
            for name, way in self.ways.items():
                version += 1
                self._change()
                measured = {"round": index, "method": name, **self._publish(way, version)}
                self.say(f"round {index + 1} of {num_rounds}  {name:<22}{measured['seconds']:.4f} s")
                if index in (-1, num_rounds - 1):
                    measured["same_weights"] = self.compare(name, way.source, way.pool)  # type: ignore[arg-type]
                results["warm_up" if index < 0 else "rounds"].append(measured)
            if results["rounds"]:
                self.keep(results, is_complete=False)
        return results

    def _change(self) -> None:
        if self.config.bench.update == "negate":
            negate(self.engine)
        else:
            self.change(self.engine)
        dist.barrier()

    def _publish(self, way: Way, version: int) -> Measured:
        report = way.publisher.publish(version)
        connection = way.publisher._connection
        assert connection is not None
        lanes = len(connection.lanes.lanes) if connection.lanes is not None else 1
        counts = {"lanes": lanes, "receivers": len(connection.routes), "buckets": report.num_buckets}
        return {"seconds": report.seconds, **counts, "stages": seconds_by_name(report.stages)}

    def _broadcast(self) -> Measured:
        """From rank 0 to rank 1 what a sync sends, in buckets as large; the others wait."""
        bucket_bytes, total = self.config.sync.bucket_bytes, self.manifest.total_bytes
        sizes = [min(bucket_bytes, total - begin) for begin in range(0, total, bucket_bytes)]
        if self._floor is None:
            channel, endpoint = Channel.listen(2, own_device()) if self.layout.rank == 0 else (None, "")
            endpoint = self.from_all(endpoint)[0]
            if self.layout.rank == 1:
                channel = Channel.connect(endpoint, 1, 2, own_device(), time.monotonic() + SECONDS)
            self._floor = channel
        seconds = broadcast_all(self._floor, sizes) if self._floor is not None else 0.0
        dist.barrier()
        return {"seconds": seconds, "lanes": 1, "receivers": 1, "buckets": len(sizes)}


class _Elsewhere(ReceiverPool):
    """Receivers that are taken to be on a host of their own."""

    def reader_hosts(self) -> list[str]:
        return ["another host"] * len(self.reader_names)


def _let_go(connection: Connection[Any, Any]) -> None:
    """A receiver, which may be gone."""
    with suppress(OSError), connection:
        connection.send(None)
