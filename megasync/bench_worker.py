"""One trainer rank of `python -m megasync.bench sync`, which starts it: three ways to bring new weights into vLLM, in turns.

stream      ours: bridge.Publisher over bridge.Exporter, as a training run does it
per_tensor  mbridge's export_weights, each tensor put into shared memory and loaded by a message of its own
disk        the weights saved as safetensors and flushed to the disk, then vLLM's own reload_weights

All go to one replica, through the same pause and resume and vLLM's layer-wise reload. Before each, the trainer takes an
optimizer step and all processes give freed memory back. Warm-up and last round end with a comparison of all that vLLM
holds with what the trainer has. Leaves out tables and the model (bench.py).

    python -m torch.distributed.run --standalone --nproc-per-node 2 -m megasync.bench_worker runs/bench/config.yaml OUT.json
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import ray
import torch
import torch.distributed as dist

from bridge.config import ReplicaConfig
from bridge.manifest import Manifest
from bridge.publish import Publisher
from bridge.transport.shm import FOLDER as SHARED_MEMORY
from bridge.transport.shm import PREFIX
from bridge.verify import digest_value
from engine import checkpoint, parallel
from engine.engine import Engine
from engine.sample import Sample
from megasync.bench_memory import PeakMeter, give_back_free_memory
from megasync.bench_replica import WORKER_EXTENSION, BenchPool
from megasync.config import Config
from megasync.config_load import load_config
from megasync.files import write_atomically
from megasync.weights import build_exporter

SAMPLES = [Sample((3 + index, 5, 7), (11, 13, 17), (0.0, 0.0, 0.0)) for index in range(8)]
DISK_STAGES = ("save", "flush", "reload")
Measured = dict[str, Any]


class SyncBench:
    """Everything of one rank. Methods are collective; rank 0 alone has a pool and results."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.layout = parallel.initialize(config.engine.parallel, config.run.seed)
        self.engine = Engine(config.model, config.engine, config.algorithm, num_steps=config.run.steps)
        self.exporter = build_exporter(self.engine)
        stages = dict(self._from_all((self.exporter.stage, self.exporter.manifest())))
        self.manifest = Manifest.concatenate(stages[stage] for stage in sorted(stages))
        self.pids = {f"trainer rank {rank}": pid for rank, pid in enumerate(self._from_all(os.getpid()))}
        self.pool: BenchPool | None = None
        self.buffer = torch.empty(0, dtype=torch.uint8)
        if self.layout.rank == 0:
            self.pool = self._start_pool()
            self.pids |= self.pool.call("pids")[0]
            self.buffer = self._open_buffer(max(spec.num_bytes for spec in self.manifest.tensors))
        self.publisher = Publisher(self.exporter, self.pool, config.sync)

    # The ways. Each brings the trainer's weights to every replica as `version`, and says what it sent.

    def stream(self, version: int) -> Measured:
        report = self.publisher.publish(version)
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

    @property
    def ways(self) -> dict[str, Callable[[int], Measured]]:
        ways: dict[str, Callable[[int], Measured]] = {"stream": self.stream, "per_tensor": self.per_tensor, "disk": self.disk}
        if self.config.engine.wrap != "ddp":
            del ways["per_tensor"]  # mbridge does not export what Megatron-FSDP has wrapped
        return ways

    # Rounds.

    def run(self) -> Measured:
        """All rounds; on rank 0 what bench.py shows."""
        rounds: list[Measured] = []
        num_rounds, version = self.config.bench.rounds, 0
        for index in range(-1, num_rounds):  # -1 warms up
            for name, way in self.ways.items():
                version += 1
                measured = {"round": index, "way": name, **self._measure(way, version)}
                if index in (-1, num_rounds - 1):
                    measured["same_weights"] = self._compare(name)
                rounds.append(measured)
        return {"warm_up": rounds[: len(self.ways)], "rounds": rounds[len(self.ways) :], **self._describe()}

    def _measure(self, way: Callable[[int], Measured], version: int) -> Measured:
        self.engine.update(self.engine.prepare(SAMPLES))
        give_back_free_memory()
        meter = PeakMeter(self.pids, kept=self._kept_by(way))
        if self.pool is not None:
            self.pool.call("give_back_free_memory")
        dist.barrier()
        if self.pool is not None:
            meter.start()
        dist.barrier()
        begin = time.perf_counter()
        measured = way(version)
        dist.barrier()
        seconds = time.perf_counter() - begin
        if self.layout.rank == 0:
            shutil.rmtree(self.disk_folder, ignore_errors=True)
            measured |= {"seconds": seconds, "extra_bytes": meter.extra_bytes()}
        dist.barrier()
        return measured

    def _kept_by(self, way: Callable[[int], Measured]) -> str:
        """What shared memory stays mapped between two syncs of this way."""
        if way == self.stream:
            return f"{SHARED_MEMORY / PREFIX}{os.getpid()}-"
        return str(self._buffer_path)

    def _compare(self, name: str) -> bool:
        """Whether every replica computes with exactly the trainer's weights.

        Raises:
            RuntimeError: it does not; names tensors that differ.
        """
        own = {tensor: digest_value(value) for tensor, value in self.exporter}
        digests = {key: digest for part in self._from_all(own) for key, digest in part.items()}
        for held in self.pool.read_digests(list(digests), 600.0) if self.pool is not None else []:
            wrong = [key for key, digest in digests.items() if held.get(key) != digest]
            if wrong:
                raise RuntimeError(f"{name}: vLLM holds other values than the trainer in {', '.join(wrong[:5])}")
        return True

    # Set-up.

    def _start_pool(self) -> BenchPool:
        rollout = self.config.rollout
        ray.init(
            num_cpus=max(os.cpu_count() or 1, 4),
            include_dashboard=False,
            object_store_memory=100 * 2**20,  # weights never travel through Ray
            log_to_driver=False,
            logging_level="ERROR",
        )
        replica = ReplicaConfig(
            model_path=str(Path(self.config.model.path).resolve()),
            dtype=self.config.model.dtype,
            tensor_parallel=rollout.tensor_parallel,
            max_model_len=rollout.max_model_len,
            max_num_seqs=rollout.max_num_seqs,
            kv_cache_bytes=rollout.kv_cache_bytes,
            gpu_memory_utilization=rollout.gpu_memory_utilization,
            seed=self.config.run.seed,
            engine_arguments={"worker_extension_cls": WORKER_EXTENSION},
        )
        return BenchPool.start(replica, rollout.replicas)

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
        return {
            "model": {
                "parameters": sum(math.prod(spec.shape) for spec in self.manifest.tensors),
                "bytes": self.manifest.total_bytes,
                "tensors": len(self.manifest.tensors),
                "largest_tensor": {"name": largest.name, "bytes": largest.num_bytes},
            },
            "bucket_bytes": self.config.sync.bucket_bytes,
        }

    def _from_all(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.layout.world_size
        dist.all_gather_object(values, value)
        return values

    def close(self) -> None:
        """Take everything down. Not collective; safe after any failure."""
        self.publisher.close()
        if self.pool is not None:
            self.pool.close()


def main(arguments: Sequence[str]) -> int:
    """Measure by a config file and write the results as JSON."""
    config_path, results_path = arguments
    signal.signal(signal.SIGTERM, _stop)
    bench = None
    try:
        bench = SyncBench(load_config(config_path))
        results = bench.run()
        if bench.layout.rank == 0:
            write_atomically(Path(results_path), json.dumps(results))
    finally:
        if bench is not None:
            bench.close()
        ray.shutdown()
        parallel.shutdown()
    return 0


def _flush(path: Path) -> None:
    """Onto the disk, past the page cache."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _stop(_signal: int, _frame: FrameType | None) -> None:
    """SIGTERM ends the program the ordinary way, so that Ray and vLLM are taken down with it."""
    raise SystemExit(143)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
