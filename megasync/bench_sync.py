"""`python -m megasync.bench sync` on one trainer rank: the ways to bring new weights into vLLM, in turns.

stream        ours: bridge.Publisher over bridge.Exporter, as a training run does it
per_tensor    mbridge's export_weights, each tensor put into shared memory and loaded by a message of its own
disk          the weights saved as safetensors and flushed to the disk, then vLLM's own reload_weights
lora merged   ours with engine.lora.sync=merged: the whole model of an engine that trains adapters
lora adapter  ours with engine.lora.sync=adapter, into a replica that serves adapters

All but the last go to one replica, through the same pause and resume and vLLM's layer-wise reload. Before each, the trainer
takes an optimizer step and all processes give freed memory back. Warm-up and last round end with a comparison of all that
vLLM holds with what the trainer has. Leaves out tables (bench_tables.py) and the model (bench.py).
"""

from __future__ import annotations

import math
import os
import shutil
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from bridge.bucket import plan_buckets
from bridge.manifest import Manifest
from bridge.transport.shm import FOLDER as SHARED_MEMORY
from bridge.transport.shm import PREFIX
from engine import checkpoint
from megasync.bench_lora import LoraSide
from megasync.bench_memory import PeakMeter, give_back_free_memory
from megasync.bench_rank import BenchRank, Measured
from megasync.weights import build_exporter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from bridge.publish import Publisher
    from bridge.sender import WeightSource
    from engine.engine import Engine
    from megasync.bench_replica import BenchPool
    from megasync.config import Config

DISK_STAGES = ("save", "flush", "reload")


class Switch:
    """A weight source that hands out `source`, which may be exchanged for one of the same tensors between syncs.

    So that full weights and merged ones go through the same buckets.
    """

    def __init__(self, source: WeightSource) -> None:
        self.source = source

    @property
    def stage(self) -> int:
        return self.source.stage

    @property
    def num_stages(self) -> int:
        return self.source.num_stages

    @property
    def is_sender(self) -> bool:
        return self.source.is_sender

    def manifest(self) -> Manifest:
        return self.source.manifest()

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self.source)


@dataclass(frozen=True)
class Way:
    """`sync` brings the trainer's weights to every replica of `pool` as a version, and says what it sent."""

    sync: Callable[[int], Measured]
    engine: Engine
    source: WeightSource
    pool: BenchPool | None
    publisher: Publisher | None = None  # of our ways


class SyncBench(BenchRank):
    """Everything of one rank. Methods are collective; rank 0 alone has pools and results."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.engine = self.build_engine(config.engine)
        self.exporter = build_exporter(self.engine)
        stages = dict(self.from_all((self.exporter.stage, self.exporter.manifest())))
        self.manifest = Manifest.concatenate(stages[stage] for stage in sorted(stages))
        self.trainer_pids = {f"trainer rank {rank}": pid for rank, pid in enumerate(self.from_all(os.getpid()))}
        self.pool = self.start_pool()
        self.buffer = torch.empty(0, dtype=torch.uint8)
        if self.pool is not None:
            self.buffer = self._open_buffer(max(spec.num_bytes for spec in self.manifest.tensors))
        self.switch = Switch(self.exporter)
        self.whole = self.publisher(self.switch, self.pool)
        self.lora = LoraSide(self) if config.bench.lora_rank else None
        self._segments: dict[Publisher, str] = {}  # where each publisher's shared memory lies, once it has some
        self.ways = self._ways()

    # The ways.

    def _ways(self) -> dict[str, Way]:
        ways = {"stream": Way(self.stream, self.engine, self.exporter, self.pool, self.whole)}
        if self.config.engine.wrap == "ddp":  # mbridge does not export what Megatron-FSDP has wrapped
            ways["per_tensor"] = Way(self.per_tensor, self.engine, self.exporter, self.pool)
        ways["disk"] = Way(self.disk, self.engine, self.exporter, self.pool)
        if self.lora is not None:
            lora = self.lora
            ways["lora merged"] = Way(self.lora_merged, lora.engine, lora.merged, self.pool, self.whole)
            ways["lora adapter"] = Way(self.lora_adapter, lora.engine, lora.adapter, lora.pool, lora.publisher)
        return ways

    def stream(self, version: int) -> Measured:
        self.switch.source = self.exporter
        return self._publish(self.whole, version)

    def lora_merged(self, version: int) -> Measured:
        assert self.lora is not None
        self.switch.source = self.lora.merged
        return self._publish(self.whole, version)

    def lora_adapter(self, version: int) -> Measured:
        assert self.lora is not None
        return self._publish(self.lora.publisher, version)

    def _publish(self, publisher: Publisher, version: int) -> Measured:
        report = publisher.publish(version)
        stages: dict[str, float] = defaultdict(float)
        for span in report.stages:
            stages[span.name] += span.end - span.start
        return {"messages": report.num_buckets, "bytes": report.num_bytes, "stages": dict(stages)}

    def per_tensor(self, version: int) -> Measured:
        messages = num_bytes = 0
        if self.pool is not None:
            self.pool.pause()
            self.pool.call("start_update")
        for name, tensor in self.engine.hf_bridge.export_weights(self.engine.chunks):
            messages, num_bytes = messages + 1, num_bytes + tensor.nbytes
            if self.pool is not None:
                tensor = tensor.detach()
                self.buffer[: tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
                self.pool.call("load_tensor", name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        if self.pool is not None:
            self.pool.call("finish_update", version)
            self.pool.resume()
        return {"messages": messages, "bytes": num_bytes}

    def disk(self, version: int) -> Measured:
        folder, clock = self.disk_folder, [time.perf_counter()]
        if self.layout.rank == 0:
            folder.mkdir(parents=True)
        dist.barrier()
        checkpoint.save_weights(folder, self.layout.pipeline_rank, self.exporter)
        dist.barrier()
        if self.pool is None:
            return {}
        checkpoint.finish_folder(folder, Path(self.config.model.path))
        clock.append(time.perf_counter())
        files = list(folder.glob("*.safetensors"))
        for path in files:
            _flush(path)
        clock.append(time.perf_counter())
        self.pool.pause()
        self.pool.call("reload", str(folder.resolve()), version)
        self.pool.resume()
        clock.append(time.perf_counter())
        stages = {name: end - begin for name, begin, end in zip(DISK_STAGES, clock, clock[1:], strict=False)}
        return {"messages": len(files), "bytes": sum(path.stat().st_size for path in files), "stages": stages}

    @property
    def disk_folder(self) -> Path:
        return self.config.run.folder / "disk"

    # Rounds.

    def run(self) -> Measured:
        """All rounds; on rank 0 what bench.py shows."""
        rounds: list[Measured] = []
        num_rounds, version = self.config.bench.rounds, 0
        pids = {name: self._pids(way.pool) for name, way in self.ways.items()}
        for index in range(-1, num_rounds):  # -1 warms up
            for name, way in self.ways.items():
                version += 1
                measured = {"round": index, "way": name, **self._measure(way, version, pids[name])}
                self.say(f"round {index + 1} of {num_rounds}  {name:<14}{measured.get('seconds', 0.0):.3f} s")
                if index in (-1, num_rounds - 1):
                    measured["same_weights"] = self.compare(name, way.source, way.pool)
                rounds.append(measured)
        return {"warm_up": rounds[: len(self.ways)], "rounds": rounds[len(self.ways) :], **self._describe()}

    def _measure(self, way: Way, version: int, pids: dict[str, int]) -> Measured:
        self.train(way.engine)
        give_back_free_memory()
        meter = PeakMeter(pids, kept=self._kept_by(way))
        if way.pool is not None:
            way.pool.call("give_back_free_memory")
        dist.barrier()
        if way.pool is not None:
            meter.start()
        dist.barrier()
        begin = time.perf_counter()
        measured = way.sync(version)
        dist.barrier()
        seconds = time.perf_counter() - begin
        if self.layout.rank == 0:
            shutil.rmtree(self.disk_folder, ignore_errors=True)
            measured |= {"seconds": seconds, "extra_bytes": meter.extra_bytes()}
        self._find_segment(way)
        dist.barrier()
        return measured

    def _kept_by(self, way: Way) -> str:
        """What shared memory stays mapped between two syncs of this way: its publisher's own, or the tensor buffer."""
        if way.publisher is None:
            return str(self._buffer_path)
        return self._segments.get(way.publisher, "nothing yet")

    def _find_segment(self, way: Way) -> None:
        """After the way's first sync: which shared memory has come with it. Not collective."""
        if way.publisher is not None and way.publisher not in self._segments:
            ours = {str(path) for path in SHARED_MEMORY.glob(f"{PREFIX}{os.getpid()}-*")}
            new = ours - set(self._segments.values())
            if new:
                self._segments[way.publisher] = new.pop()

    def _pids(self, pool: BenchPool | None) -> dict[str, int]:
        """The processes that take part, by what they are; rank 0 alone looks at them."""
        return self.trainer_pids | pool.call("pids")[0] if pool is not None else {}

    def _open_buffer(self, num_bytes: int) -> torch.Tensor:
        """Shared memory for one tensor, which the replicas have mapped too; nothing is left to be cleaned up."""
        assert self.pool is not None
        path = self._buffer_path
        try:
            buffer = torch.from_file(str(path), shared=True, size=num_bytes, dtype=torch.uint8)
            self.pool.call("open_buffer", str(path), num_bytes)
        finally:
            path.unlink(missing_ok=True)
        return buffer

    @property
    def _buffer_path(self) -> Path:
        return SHARED_MEMORY / f"{PREFIX}bench-{os.getpid()}"

    def _describe(self) -> Measured:
        largest = max(self.manifest.tensors, key=lambda spec: spec.num_bytes)
        described: Measured = {
            "model": {
                "parameters": sum(math.prod(spec.shape) for spec in self.manifest.tensors),
                "bytes": self.manifest.total_bytes,
                "tensors": len(self.manifest.tensors),
                "largest_tensor": {"name": largest.name, "bytes": largest.num_bytes},
            },
            "bucket_bytes": self.config.sync.bucket_bytes,
        }
        if self.lora is not None:
            sync = self.lora.adapter.sync_config(self.config.sync)
            buckets = plan_buckets(self.lora.adapter.manifest(), sync.bucket_bytes)
            sent = sum(self.from_all(sum(bucket.num_bytes for bucket in buckets)))  # gaps of alignment count
            described["adapter"] = {"bytes": self.lora.adapter_bytes, "bytes_sent": sent}
        return described


def _flush(path: Path) -> None:
    """Onto the disk, past the page cache."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
