"""The vLLM replicas of the bench: those of bridge/, with the baselines' ways beside our own. Leaves out the timing."""

from __future__ import annotations

import os
from typing import Any

import psutil

from bridge.replicas.pool import ReplicaPool
from bridge.replicas.replica import Replica
from megasync.bench.memory import give_back_free_memory

WORKER_EXTENSION = "megasync.bench.vllm_worker.BenchWorkerExtension"


class BenchReplica(Replica):
    """Methods are called through Ray, between `pause` and `resume`."""

    async def open_buffer(self, path: str, num_bytes: int) -> None:
        await self._engine.collective_rpc("bench_open", args=(path, num_bytes))

    async def start_update(self) -> None:
        await self._engine.start_weight_update()

    async def load_tensor(self, name: str, dtype: str, shape: tuple[int, ...]) -> None:
        """One message, the way of AsyncLLM.update_weights, which is a collective_rpc too."""
        await self._engine.collective_rpc("bench_load_tensor", args=(name, dtype, list(shape)))

    async def finish_update(self, version: int) -> None:
        await self._engine.finish_weight_update(str(version))
        await self._engine.reset_prefix_cache()

    async def reload(self, folder: str, version: int) -> None:
        await self._engine.collective_rpc("bench_reload", args=(folder,))
        await self._engine.update_weight_version(str(version))
        await self._engine.reset_prefix_cache()

    async def give_back_free_memory(self) -> None:
        give_back_free_memory()
        await self._engine.collective_rpc("bench_give_back_free_memory")

    async def take_floor(self, endpoint: str, num_readers: int, sizes: list[int]) -> None:
        """The other side of wire.Wire.floor."""
        first = self.index * self.config.tensor_parallel
        await self._engine.collective_rpc("bench_floor", args=(endpoint, first, num_readers, sizes))

    async def join_packed(self, address: str, port: int, world_size: int) -> None:
        """Into the group of vLLM's own weight transfer."""
        first = 1 + self.index * self.config.tensor_parallel
        await self._engine.collective_rpc("bench_join_packed", args=(address, port, first, world_size))

    async def packed(self, step: str, *arguments: Any) -> None:
        """One of the three steps of vLLM's own weight transfer: start, take, finish."""
        await self._engine.collective_rpc(f"bench_packed_{step}", args=arguments)
        if step == "finish":
            await self._engine.reset_prefix_cache()

    async def device_bytes(self, *, begin: bool) -> list[int]:
        """Of each worker: what it has allocated, from when on its peak counts, or with `begin` false that peak."""
        return list(await self._engine.collective_rpc("bench_device_bytes", args=(begin,)))

    async def pids(self) -> dict[str, int]:
        """The processes of this replica by what they are."""
        workers = await self._engine.collective_rpc("bench_pid")
        names = {f"vLLM worker {rank}": pid for rank, pid in enumerate(workers)}
        for child in psutil.Process().children(recursive=True):
            if child.pid not in workers and "resource_tracker" not in " ".join(child.cmdline()):
                names["vLLM engine core"] = child.pid
        return {"vLLM actor": os.getpid(), **names}


class BenchPool(ReplicaPool):
    """A pool of BenchReplicas."""

    replica_class = BenchReplica

    def call(self, method: str, *arguments: Any, **options: Any) -> list[Any]:
        """Call a method of every replica and wait for all."""
        return self.gather(self.send(method, *arguments, **options))

    def send(self, method: str, *arguments: Any, **options: Any) -> list[Any]:
        """The same without waiting; what `gather` takes."""
        return [getattr(actor.handle, method).remote(*arguments, **options) for actor in self._chosen()]
