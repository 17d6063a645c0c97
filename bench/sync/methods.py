"""The methods to bring new weights into vLLM that `python -m bench sync` compares, on one trainer rank.

stream          ours: bridge.Publisher over bridge.Exporter, as a training run does it
lora merged     ours with engine.lora.sync=merged: the whole model of an engine that trains adapters
lora adapter    ours with engine.lora.sync=adapter, into a replica that serves adapters
per_tensor      mbridge's export_weights, each tensor put into shared memory and loaded by a message of its own
disk            the weights saved as safetensors and flushed to the disk, then vLLM's own reload_weights
and on GPUs, where `all` leaves the last two out:
floor           the same number of bytes broadcast in buckets between the same devices, and nothing else
unverified      ours with sync.verify=none
packed          vLLM's own packed broadcast over NCCL, from Hugging Face tensors that are ready
mbridge packed  the same from mbridge's export_weights

Each is timed from where running requests have ended to where vLLM can go on. All but `lora adapter` use the same pool. They take
turns, round by round; before each, the trainer's weights change and all processes give freed memory back. Leaves out tables
(report.py).
"""

from __future__ import annotations

import math
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from bench.common.memory import PeakMeter, device_bytes, give_back_free_memory, mapped_files
from bench.common.program import Measured
from bench.common.rank import BenchRank, LoraSide, ServedLora, Way, seconds_by_name
from bench.config import CPU_METHODS, GPU_METHODS, METHODS
from bench.replicas.nccl import NcclBaselines
from bench.replicas.replica import BenchPool
from bridge.config import Verify
from bridge.export.source import WeightSource, whole_tensors
from bridge.messages import Spans
from bridge.send.publish import Publisher
from bridge.transport.segment import FOLDER as SHARED_MEMORY
from bridge.transport.segment import PREFIX
from engine.checkpoint import hf_folder
from engine.engine import Engine
from engine.model.build import gpt_model
from engine.moe.experts import split_experts
from megasync.config.files import flush
from megasync.run.weights import build_exporter, uses_ipc


class SwappableSource:
    """A weight source that forwards to `source`, which may be replaced by one of the same tensors between syncs.

    Full weights and merged ones go through one publisher's buckets by it.
    """

    def __init__(self, source: WeightSource) -> None:
        self.source = source

    def __getattr__(self, name: str) -> Any:
        return getattr(self.source, name)


class SyncBench(BenchRank):
    """Everything that the methods need, and their rounds. Calls are collective; rank 0 alone has pools and results."""

    def start(self) -> None:
        config = self.config
        self.has_gpus = torch.cuda.is_available()
        self.engine = self.build_engine(config.engine)
        self.exporter = build_exporter(self.engine)
        self.manifest = self.whole_manifest(self.exporter)
        self.pool = self.start_pool()
        self.nccl = NcclBaselines(self.pool, self.manifest, config.sync.bucket_bytes, self.engine.device) if self.pool else None
        self.sync_exporter = build_exporter(self.engine, on_all_ranks=uses_ipc(config))
        self.swappable = SwappableSource(self.sync_exporter)
        self.whole = self.publisher(cast("WeightSource", self.swappable), self.pool)
        usual = GPU_METHODS if self.has_gpus else CPU_METHODS
        wanted = {"stream", *config.bench.methods, *(usual if "all" in config.bench.methods else ())}
        self.lora: LoraSide | None = None
        if config.bench.lora_rank and any(name.startswith("lora") for name in wanted):
            self.lora = ServedLora(self) if "lora adapter" in wanted else LoraSide(self)
        self.disk_folder = config.run.folder / "disk"
        self.buffer, self.buffer_path = torch.empty(0, dtype=torch.uint8), SHARED_MEMORY / f"{PREFIX}bench-{os.getpid()}"
        possible = self._possible()
        self.methods: dict[str, Way] = {name: possible[name] for name in METHODS if name in wanted and name in possible}
        if self.pool is not None and "per_tensor" in self.methods:
            self._open_buffer(self.pool, max(spec.num_bytes for spec in self.manifest.tensors))
        self.trainer_pids = {f"trainer rank {rank}": pid for rank, pid in enumerate(self.from_all(os.getpid()))}
        # What stays mapped between two syncs: a publisher's own shared memory, once it has some; else the tensor buffer.
        self._kept: dict[Publisher | None, str] = {None: str(self.buffer_path)}
        self._makers: dict[Publisher | str, str] = {}  # by publisher, else by itself, the method that synced first
        self._stays: dict[str, dict[str, int]] = {}  # of GPUs' memory, what a method's first sync left taken, by process

    def _possible(self) -> dict[str, Way]:
        """All that this config allows."""
        whole = (self.engine, self.exporter, self.pool)
        methods = {
            "stream": Way(partial(self._stream, self.sync_exporter, None), *whole, self.whole),
            "unverified": Way(partial(self._stream, self.sync_exporter, "none"), *whole, self.whole),
            "disk": Way(self.disk, *whole),
        }
        mbridge_exports = self.engine.wrapped.is_in_place  # it takes parameters as they lie
        if mbridge_exports:
            methods["per_tensor"] = Way(self.per_tensor, *whole)
        if self.config.rollout.placement == "separate":
            methods |= {"floor": Way(self.floor, self.engine, None, self.pool), "packed": Way(self.packed, *whole)}
            if mbridge_exports:
                methods["mbridge packed"] = Way(self.mbridge_packed, *whole)
        if (lora := self.lora) is not None:
            merged = partial(self._stream, lora.merged, None)
            methods["lora merged"] = Way(merged, lora.engine, lora.merged, self.pool, self.whole)
        if isinstance(lora, ServedLora):
            adapter = partial(self._publish, lora.publisher, None)
            methods["lora adapter"] = Way(adapter, lora.engine, lora.adapter, lora.pool, lora.publisher)
        return methods

    def _stream(self, source: WeightSource, verify: Verify | None, version: int) -> Measured:
        self.swappable.source = source
        return self._publish(self.whole, verify, version)

    def _publish(self, publisher: Publisher, verify: Verify | None, version: int) -> Measured:
        report = publisher.publish(version, verify)
        sent = {"messages": report.num_buckets, "bytes": report.num_bytes, "fallback_layers": len(report.loader_fallback)}
        return {**sent, "seconds": report.seconds, "stages": seconds_by_name(report.stages)}

    def floor(self, version: int) -> Measured:
        if self.nccl is None:
            return {}
        return {"messages": len(self.nccl.sizes), "bytes": self.manifest.total_bytes, "seconds": self.nccl.floor()}

    def packed(self, version: int) -> Measured:
        return self._packed([(name, tensor.clone()) for name, tensor in whole_tensors(self.exporter)])

    def mbridge_packed(self, version: int) -> Measured:
        return self._packed((name, tensor.detach()) for name, tensor in mbridge_export(self.engine))

    def _packed(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Measured:
        if self.nccl is None or self.pool is None:
            return drain(tensors)
        self.pool.pause()
        begin = time.perf_counter()
        self.nccl.packed(tensors)
        seconds = time.perf_counter() - begin
        self.pool.resume()
        return {"messages": len(self.manifest.tensors), "bytes": self.manifest.total_bytes, "seconds": seconds}

    def per_tensor(self, version: int) -> Measured:
        if self.pool is None:
            return drain(mbridge_export(self.engine))
        messages = num_bytes = 0
        self.pool.pause()
        begin = time.perf_counter()
        self.pool.call("start_update")
        for name, parameter in mbridge_export(self.engine):
            tensor = parameter.detach()
            messages, num_bytes = messages + 1, num_bytes + tensor.nbytes
            self.buffer[: tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
            dtype = str(tensor.dtype).removeprefix("torch.")
            self.pool.call("workers", "bench_load_tensor", name, dtype, list(tensor.shape))
        self.pool.call("finish_update", version)
        seconds = time.perf_counter() - begin
        self.pool.resume()
        return {"messages": messages, "bytes": num_bytes, "seconds": seconds}

    def disk(self, version: int) -> Measured:
        folder, spans = self.disk_folder, Spans()
        if self.pool is not None:
            self.pool.pause()
            folder.mkdir(parents=True)
        with spans.measure("save"):
            dist.barrier()
            hf_folder.save_weights(folder, whole_tensors(self.exporter), hf_folder.Share(self.layout.pipeline_rank))
            dist.barrier()
            if self.pool is None:
                return {}
            hf_folder.finish_folder(folder, Path(self.config.model.path))
        with spans.measure("flush"):
            files = list(folder.glob("*.safetensors"))
            for path in files:
                flush(path)
        with spans.measure("reload"):
            self.pool.call("reload", str(folder.resolve()), version)
        self.pool.resume()
        stages = seconds_by_name(spans.taken)
        num_bytes = sum(path.stat().st_size for path in files)
        return {"messages": len(files), "bytes": num_bytes, "seconds": sum(stages.values()), "stages": stages}

    def _open_buffer(self, pool: BenchPool, num_bytes: int) -> None:
        """Shared memory for one tensor, which the replicas map too; its file is removed at once."""
        path = str(self.buffer_path)
        try:
            self.buffer = torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8)
            pool.call("workers", "bench_open", path, num_bytes)
        finally:
            self.buffer_path.unlink(missing_ok=True)

    def run(self) -> Measured:
        """All rounds; on rank 0 what report.py takes."""
        pids = {  # of the processes that take part, by their kind; only rank 0 looks at them
            name: self.trainer_pids | method.pool.call("pids")[0] if method.pool is not None else {}
            for name, method in self.methods.items()
        }
        return self.take_turns(self.methods, self._describe(), lambda name, version: self._measure(name, version, pids[name]))

    def _measure(self, name: str, version: int, pids: dict[str, int]) -> Measured:
        method = self.methods[name]
        self.change(method.engine)
        give_back_free_memory()
        meter = self._device_meter(name, method) if self.has_gpus else self._process_meter(method, pids)
        measured = method.sync(version)
        dist.barrier()
        measured["extra_bytes"] = meter()
        if self.is_first:
            shutil.rmtree(self.disk_folder, ignore_errors=True)
        for path in mapped_files(f"{SHARED_MEMORY}/{PREFIX}{os.getpid()}-") - set(self._kept.values()):
            self._kept[method.publisher] = path  # has come with the publisher's first sync
        dist.barrier()
        return measured

    def _process_meter(self, method: Way, pids: dict[str, int]) -> Callable[[], dict[str, int]]:
        """From now on; the result gives the memory that processes took since."""
        meter = PeakMeter(pids, kept=self._kept.get(method.publisher, ""))
        if method.pool is not None:
            method.pool.call("give_back_free_memory")
        dist.barrier()
        meter.start()
        dist.barrier()
        return meter.extra_bytes

    def _device_meter(self, name: str, method: Way) -> Callable[[], dict[str, int]]:
        """The same of GPUs' memory, with what stays from one sync to the next; without NCCL's own.

        Methods of one publisher share its buffers, which stay from the first one's first sync on.
        """
        before = self._device_bytes(method, begin=True)
        maker = self._makers.setdefault(method.publisher or name, name)
        held = [self._stays[other] for other in {maker, name} if other in self._stays]

        def extra_bytes() -> dict[str, int]:
            peaks, now = (self._device_bytes(method, begin=begin) for begin in (False, True))
            self._stays.setdefault(name, {process: now[process] - before[process] for process in now})
            more = {process: peak - before[process] + sum(stays[process] for stays in held) for process, peak in peaks.items()}
            return {process: max(0, size) for process, size in more.items()}  # a step may leave what the sync gives back

        return extra_bytes

    def _device_bytes(self, method: Way, *, begin: bool) -> dict[str, int]:
        torch.cuda.synchronize()
        found = {f"trainer rank {rank}": size for rank, size in enumerate(self.from_all(device_bytes(begin=begin)))}
        workers = method.pool.call("workers", "bench_device_bytes", begin) if method.pool is not None else []
        return found | {f"vLLM worker {i}": size for i, size in enumerate(size for sizes in workers for size in sizes)}

    def _describe(self) -> Measured:
        largest = max(self.manifest.tensors, key=lambda spec: spec.num_bytes)
        return {
            "model": {
                "parameters": sum(math.prod(spec.shape) for spec in self.manifest.tensors),
                "bytes": self.manifest.total_bytes,
                "tensors": len(self.manifest.tensors),
                "largest_tensor": {"name": largest.name, "bytes": largest.num_bytes},
            },
            "bucket_bytes": self.config.sync.bucket_bytes,
        }


class PerExpertModel:
    """A model chunk as mbridge's export takes it, where a mixture's experts are parameters of their own."""

    def __init__(self, chunk: torch.nn.Module) -> None:
        self._model: Any = gpt_model(chunk)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self._model.named_parameters():
            if not hasattr(parameter, "num_local_experts"):
                yield name, parameter
                continue
            for index, expert in enumerate(split_experts(parameter, parameter.num_local_experts)):
                vars(expert).update(tensor_model_parallel=True, partition_dim=parameter.partition_dim)
                yield f"{name}{index}", expert


def mbridge_export(engine: Engine) -> Iterable[tuple[str, torch.Tensor]]:
    """(Hugging Face name, tensor) by mbridge's own export; collective. For DDP."""
    chunks = [PerExpertModel(chunk) for chunk in engine.chunks]
    return cast("Iterable[tuple[str, torch.Tensor]]", engine.mbridge.export_weights(chunks))


def drain(tensors: Iterable[object]) -> Measured:
    """Run the collectives of an export on a rank that sends nothing, and measures nothing."""
    for _ in tensors:
        pass
    return {}
