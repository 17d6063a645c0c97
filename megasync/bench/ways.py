"""The ways to bring new weights into vLLM that `python -m megasync.bench sync` compares, on one trainer rank.

stream          ours: bridge.Publisher over bridge.Exporter, as a training run does it
lora merged     ours with engine.lora.sync=merged: the whole model of an engine that trains adapters
lora adapter    ours with engine.lora.sync=adapter, into a replica that serves adapters
per_tensor      mbridge's export_weights, each tensor put into shared memory and loaded by a message of its own
disk            the weights saved as safetensors and flushed to the disk, then vLLM's own reload_weights
and on GPUs, where the last two are not among all:
floor           the same number of bytes broadcast in buckets between the same devices, and nothing else
unverified      ours with sync.verify=none
packed          vLLM's own packed broadcast over NCCL, from Hugging Face tensors that are ready
mbridge packed  the same from mbridge's export_weights

Each says how long it took from where running requests had ended to where vLLM could go on. All but `lora adapter` go to one
pool. Leaves out rounds and memory (sync.py).
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from bridge.export.source import whole_tensors
from bridge.layout.manifest import Manifest
from bridge.transport.segment import FOLDER as SHARED_MEMORY
from bridge.transport.segment import PREFIX
from engine import checkpoint
from megasync.bench.config import CPU_WAYS, GPU_WAYS, WAYS
from megasync.bench.lora import LoraSide
from megasync.bench.rank import BenchRank, Measured
from megasync.bench.wire import Wire
from megasync.files import flush
from megasync.weights import build_exporter, transport

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from bridge.config import Verify
    from bridge.export.source import Part, WeightSource
    from bridge.send.publish import Publisher
    from engine.engine import Engine
    from megasync.bench.config import BenchRoot
    from megasync.bench.replica import BenchPool

DISK_STAGES = ("save", "flush", "reload")


class Switch:
    """A weight source that hands out `source`, which may be exchanged for one of the same tensors between syncs.

    So that full weights and merged ones go through the same buckets.
    """

    def __init__(self, source: WeightSource) -> None:
        self.source = source
        self.stage, self.num_stages = source.stage, source.num_stages
        self.is_sender, self.has_tensors = source.is_sender, source.has_tensors

    def manifest(self) -> Manifest:
        return self.source.manifest()

    def parts(self) -> Iterator[Part]:
        return self.source.parts()


@dataclass(frozen=True)
class Way:
    """`sync` brings the trainer's weights to every replica of `pool` as a version, and says on rank 0 what it took."""

    sync: Callable[[int], Measured]
    engine: Engine
    source: WeightSource | None  # what vLLM must hold afterwards
    pool: BenchPool | None
    publisher: Publisher | None = None  # of our ways


class Ways(BenchRank):
    """Everything that the ways need. Methods are collective; rank 0 alone has pools and results."""

    def __init__(self, config: BenchRoot) -> None:
        super().__init__(config)
        self.has_gpus = torch.cuda.is_available()
        self.engine = self.build_engine(config.engine)
        self.exporter = build_exporter(self.engine)
        stages = dict(self.from_all((self.exporter.stage, self.exporter.manifest())))
        self.manifest = Manifest.concatenate(stages[stage] for stage in sorted(stages))
        self.pool = self.start_pool()
        self.wire = Wire(self.pool, self.manifest, config.sync.bucket_bytes, self.engine.device) if self.pool else None
        self.sync_exporter = build_exporter(self.engine, on_all_ranks=transport(config) == "ipc")
        self.switch = Switch(self.sync_exporter)
        self.whole = self.publisher(self.switch, self.pool)
        usual = GPU_WAYS if self.has_gpus else CPU_WAYS
        wanted = {"stream", *config.bench.ways, *(usual if "all" in config.bench.ways else ())}
        self.lora = LoraSide(self) if config.bench.lora_rank and any(way.startswith("lora") for way in wanted) else None
        self.buffer = torch.empty(0, dtype=torch.uint8)
        possible = self._ways()
        self.ways = {name: possible[name] for name in WAYS if name in wanted and name in possible}
        if self.pool is not None and "per_tensor" in self.ways:
            self.buffer = self._open_buffer(max(spec.num_bytes for spec in self.manifest.tensors))

    # The ways.

    def _ways(self) -> dict[str, Way]:
        """All that this config allows for."""
        whole = (self.engine, self.exporter, self.pool)
        ways = {
            "stream": Way(self.stream, *whole, self.whole),
            "unverified": Way(self.unverified, *whole, self.whole),
            "disk": Way(self.disk, *whole),
        }
        mbridge_exports = self.engine.wrapped.is_in_place  # it takes parameters as they lie
        if mbridge_exports:
            ways["per_tensor"] = Way(self.per_tensor, *whole)
        if self.config.rollout.placement == "separate":
            ways |= {"floor": Way(self.floor, self.engine, None, self.pool), "packed": Way(self.packed, *whole)}
            if mbridge_exports:
                ways["mbridge packed"] = Way(self.mbridge_packed, *whole)
        if self.lora is not None:
            lora = self.lora
            ways["lora merged"] = Way(self.lora_merged, lora.engine, lora.merged, self.pool, self.whole)
            ways["lora adapter"] = Way(self.lora_adapter, lora.engine, lora.adapter, lora.pool, lora.publisher)
        return ways

    def stream(self, version: int) -> Measured:
        self.switch.source = self.sync_exporter
        return self._publish(self.whole, self.pool, version)

    def unverified(self, version: int) -> Measured:
        self.switch.source = self.sync_exporter
        return self._publish(self.whole, self.pool, version, "none")

    def lora_merged(self, version: int) -> Measured:
        assert self.lora is not None
        self.switch.source = self.lora.merged
        return self._publish(self.whole, self.pool, version)

    def lora_adapter(self, version: int) -> Measured:
        assert self.lora is not None
        return self._publish(self.lora.publisher, self.lora.pool, version)

    def _publish(self, publisher: Publisher, pool: BenchPool | None, version: int, verify: Verify | None = None) -> Measured:
        report = publisher.publish(version, verify)
        stages: dict[str, float] = defaultdict(float)
        for span in report.stages:
            stages[span.name] += span.end - span.start
        sent = {"messages": report.num_buckets, "bytes": report.num_bytes, "fallback_layers": len(report.loader_fallback)}
        inside = [{span.name: span.end - span.start for span in spans} for spans in pool.sync_spans()] if pool is not None else []
        return {**sent, "seconds": report.seconds, "stages": dict(stages), "replica_stages": inside}

    def floor(self, version: int) -> Measured:
        if self.wire is None:
            return {}
        return {"messages": self.wire.num_messages, "bytes": self.manifest.total_bytes, "seconds": self.wire.floor()}

    def packed(self, version: int) -> Measured:
        return self._packed([(name, tensor.clone()) for name, tensor in whole_tensors(self.exporter)])

    def mbridge_packed(self, version: int) -> Measured:
        exported = self.engine.hf_bridge.export_weights(self.engine.chunks)
        return self._packed((name, tensor.detach()) for name, tensor in exported)

    def _packed(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Measured:
        if self.wire is None or self.pool is None:
            for _ in tensors:  # collectives
                pass
            return {}
        self.pool.pause()
        begin = time.perf_counter()
        self.wire.packed(tensors)
        seconds = time.perf_counter() - begin
        self.pool.resume()
        return {"messages": len(self.manifest.tensors), "bytes": self.manifest.total_bytes, "seconds": seconds}

    def per_tensor(self, version: int) -> Measured:
        messages = num_bytes = 0
        if self.pool is not None:
            self.pool.pause()
        begin = time.perf_counter()
        if self.pool is not None:
            self.pool.call("start_update")
        for name, tensor in self.engine.hf_bridge.export_weights(self.engine.chunks):
            messages, num_bytes = messages + 1, num_bytes + tensor.nbytes
            if self.pool is not None:
                tensor = tensor.detach()
                self.buffer[: tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
                self.pool.call("load_tensor", name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        if self.pool is not None:
            self.pool.call("finish_update", version)
        seconds = time.perf_counter() - begin
        if self.pool is not None:
            self.pool.resume()
        return {"messages": messages, "bytes": num_bytes, "seconds": seconds}

    def disk(self, version: int) -> Measured:
        folder = self.disk_folder
        if self.pool is not None:
            self.pool.pause()
        clock = [time.perf_counter()]
        if self.layout.rank == 0:
            folder.mkdir(parents=True)
        dist.barrier()
        checkpoint.save_weights(folder, self.layout.pipeline_rank, whole_tensors(self.exporter))
        dist.barrier()
        if self.pool is None:
            return {}
        checkpoint.finish_folder(folder, Path(self.config.model.path))
        clock.append(time.perf_counter())
        files = list(folder.glob("*.safetensors"))
        for path in files:
            flush(path)
        clock.append(time.perf_counter())
        self.pool.call("reload", str(folder.resolve()), version)
        clock.append(time.perf_counter())
        self.pool.resume()
        stages = {name: end - begin for name, begin, end in zip(DISK_STAGES, clock, clock[1:], strict=False)}
        sent = {"messages": len(files), "bytes": sum(path.stat().st_size for path in files)}
        return {**sent, "seconds": clock[-1] - clock[0], "stages": stages}

    @property
    def disk_folder(self) -> Path:
        return self.config.run.folder / "disk"

    def _open_buffer(self, num_bytes: int) -> torch.Tensor:
        """Shared memory for one tensor, which the replicas have mapped too; nothing is left to be cleaned up."""
        assert self.pool is not None
        path = self.buffer_path
        try:
            buffer = torch.from_file(str(path), shared=True, size=num_bytes, dtype=torch.uint8)
            self.pool.call("open_buffer", str(path), num_bytes)
        finally:
            path.unlink(missing_ok=True)
        return buffer

    @property
    def buffer_path(self) -> Path:
        return SHARED_MEMORY / f"{PREFIX}bench-{os.getpid()}"
