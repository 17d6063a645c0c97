"""The vLLM replicas of the bench: those of bridge/ with the other methods' calls beside our own, and vLLM's own `LLM.generate`.

Leaves out the timing.
"""

from __future__ import annotations

import os
import time
from typing import Any

import psutil

from bench.common.memory import give_back_free_memory
from bridge import processes
from bridge.generation import GenerationRequest
from bridge.replicas.pool import ReplicaPool
from bridge.replicas.replica import CLOSE_SECONDS, Replica
from bridge.vllm.serving import api
from bridge.vllm.serving import requests as vllm_requests

WORKER_EXTENSION = "bench.replicas.vllm_worker.BenchWorkerExtension"


class BenchReplica(Replica):
    """Methods are called through Ray, between `pause` and `resume`."""

    async def workers(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of vllm_worker.py on every worker, as AsyncLLM.update_weights does."""
        return list(await self._engine.collective_rpc(method, args=arguments))

    async def readers(self, method: str, *arguments: Any) -> None:
        """The same for methods that take first the number that this replica's first worker has among all replicas' workers."""
        await self.workers(method, self.index * self.config.tensor_parallel, *arguments)

    async def start_update(self) -> None:
        await self._engine.start_weight_update()

    async def finish_update(self, version: int) -> None:
        await self._engine.finish_weight_update(str(version))
        await self._engine.reset_prefix_cache()

    async def reload(self, folder: str, version: int) -> None:
        await self.workers("bench_reload", folder)
        await self._engine.update_weight_version(str(version))
        await self._engine.reset_prefix_cache()

    async def give_back_free_memory(self) -> None:
        give_back_free_memory()
        await self.workers("bench_give_back_free_memory")

    async def finish_packed(self) -> None:
        await self.workers("bench_packed_finish")
        await self._engine.reset_prefix_cache()

    async def pids(self) -> dict[str, int]:
        """The processes of this replica by their kind."""
        workers = await self.workers("bench_pid")
        names = {f"vLLM worker {rank}": pid for rank, pid in enumerate(workers)}
        for child in psutil.Process().children(recursive=True):
            if child.pid not in workers and "resource_tracker" not in " ".join(child.cmdline()):
                names["vLLM engine core"] = child.pid
        return {"vLLM actor": os.getpid(), **names}


class BenchPool(ReplicaPool):
    """A pool of BenchReplicas."""

    replica_class = BenchReplica

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of every replica and wait for all."""
        return self.gather(self.send(method, *arguments))

    def send(self, method: str, *arguments: Any) -> list[Any]:
        """The same without waiting; what `gather` takes."""
        return [getattr(actor.handle, method).remote(*arguments) for actor in self._chosen()]


class OfflineReplica(Replica):
    """An actor that starts and ends as a replica does, and has an LLM instead of the AsyncLLM. It takes part in no sync."""

    async def start(self) -> int:
        from vllm import LLM

        api.prepare_process()
        api.choose_layers(self.config)
        with self._output.capture(), api.noticing_failure(self._output.text):
            self._llm: Any = LLM(**api.engine_arguments(self.config))
        return os.getpid()

    async def generate_offline(self, requests: list[GenerationRequest]) -> tuple[float, list[list[int]]]:
        """Seconds of LLM.generate, and the tokens of each request's only sample."""
        self._llm.reset_prefix_cache()
        prompts = [{"prompt_token_ids": list(request.prompt_ids)} for request in requests]
        parameters = [vllm_requests.sampling_parameters(request, 0) for request in requests]
        begin = time.perf_counter()
        outputs = self._llm.generate(prompts, parameters, use_tqdm=False)
        return time.perf_counter() - begin, [list(output.outputs[0].token_ids) for output in outputs]

    async def close(self) -> None:
        if hasattr(self, "_llm"):
            api.stop_engine(self._llm.llm_engine.engine_core, CLOSE_SECONDS)
        processes.remove_sockets(os.getpid())


class OfflinePool(ReplicaPool):
    """The pool of OfflineReplicas."""

    replica_class = OfflineReplica

    def generate_offline(self, requests: list[GenerationRequest]) -> tuple[float, list[list[int]]]:
        """By the first of them."""
        (answer,) = self._call(lambda actor: actor.generate_offline.remote(requests), None, self.members[:1])
        return float(answer[0]), list(answer[1])
