"""`python -m megasync.bench sync` on one trainer rank: the methods of methods.py take turns, round by round.

Before each, the trainer's weights change and all processes give freed memory back. Warm-up and last round end with a
comparison of all that vLLM holds with what the trainer has. Leaves out tables (report.py).
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch
import torch.distributed as dist

from bridge.layout.bucket import plan_buckets
from bridge.send.publish import Publisher
from bridge.transport.segment import FOLDER as SHARED_MEMORY
from bridge.transport.segment import PREFIX
from megasync.bench.common.memory import PeakMeter, device_bytes, give_back_free_memory, mapped_files
from megasync.bench.common.rank import Measured
from megasync.bench.config import BenchRoot
from megasync.bench.sync.methods import SyncMethod, SyncMethods


class SyncBench(SyncMethods):
    """The rounds. Methods are collective; rank 0 alone has results."""

    def __init__(self, config: BenchRoot, results_path: Path, ends: ExitStack) -> None:
        super().__init__(config, results_path, ends)
        self.trainer_pids = {f"trainer rank {rank}": pid for rank, pid in enumerate(self.from_all(os.getpid()))}
        # What stays mapped between two syncs: a publisher's own shared memory, once it has some; else the tensor buffer.
        self._kept: dict[Publisher | None, str] = {None: str(self.buffer_path)}
        self._makers: dict[Publisher | str, str] = {}  # by publisher, else by itself, the method that synced first
        self._stays: dict[str, dict[str, int]] = {}  # of GPUs' memory, what a method's first sync left taken, by process

    def run(self) -> Measured:
        """All rounds; on rank 0 what report.py takes."""
        results: Measured = {"warm_up": [], "rounds": [], **self._describe()}
        num_rounds, version = self.config.bench.rounds, 0
        pids = {  # of the processes that take part, by what they are; rank 0 alone looks at them
            name: self.trainer_pids | method.pool.call("pids")[0] if method.pool is not None else {}
            for name, method in self.methods.items()
        }
        for index in range(-1, num_rounds):  # -1 warms up
            for name, method in self.methods.items():
                version += 1
                measured = {"round": index, "method": name, **self._measure(name, method, version, pids[name])}
                self.say(f"round {index + 1} of {num_rounds}  {name:<16}{measured.get('seconds', 0.0):.4f} s")
                if method.source is not None and index in (-1, num_rounds - 1):
                    measured["same_weights"] = self.compare(name, method.source, method.pool)
                results["warm_up" if index < 0 else "rounds"].append(measured)
            if results["rounds"]:
                self.keep(results, is_complete=False)
        return results

    def _measure(self, name: str, method: SyncMethod, version: int, pids: dict[str, int]) -> Measured:
        self.change(method.engine)
        give_back_free_memory()
        meter = self._device_meter(name, method) if self.has_gpus else self._process_meter(method, pids)
        measured = method.sync(version)
        dist.barrier()
        measured["extra_bytes"] = meter()
        if self.layout.rank == 0:
            shutil.rmtree(self.disk_folder, ignore_errors=True)
        for path in mapped_files(f"{SHARED_MEMORY}/{PREFIX}{os.getpid()}-") - set(self._kept.values()):
            self._kept[method.publisher] = path  # has come with the publisher's first sync
        dist.barrier()
        return measured

    def _process_meter(self, method: SyncMethod, pids: dict[str, int]) -> Callable[[], dict[str, int]]:
        """From now on; what is returned says how much more memory processes took."""
        meter = PeakMeter(pids, kept=self._kept.get(method.publisher, ""))
        if method.pool is not None:
            method.pool.call("give_back_free_memory")
        dist.barrier()
        meter.start()
        dist.barrier()
        return meter.extra_bytes

    def _device_meter(self, name: str, method: SyncMethod) -> Callable[[], dict[str, int]]:
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

    def _device_bytes(self, method: SyncMethod, *, begin: bool) -> dict[str, int]:
        torch.cuda.synchronize()
        found = {f"trainer rank {rank}": size for rank, size in enumerate(self.from_all(device_bytes(begin=begin)))}
        workers = method.pool.call("workers", "bench_device_bytes", begin) if method.pool is not None else []
        return found | {f"vLLM worker {i}": size for i, size in enumerate(size for sizes in workers for size in sizes)}

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
