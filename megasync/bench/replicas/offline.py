"""vLLM's own offline generation for the bench: `vllm.LLM` in a process of its own, with the engine arguments of a replica.

Leaves out what is asked of it (throughput.py).
"""

from __future__ import annotations

import os
import time
from typing import Any

from bridge import processes
from bridge.generation import GenerationRequest
from bridge.replicas.pool import ReplicaPool
from bridge.replicas.replica import CLOSE_SECONDS, Replica
from bridge.vllm.serving import api
from bridge.vllm.serving import requests as vllm_requests


class OfflineReplica(Replica):
    """An actor that starts and ends as a replica does, and has an LLM in the place of the AsyncLLM. It takes part in no sync."""

    async def start(self) -> int:
        from vllm import LLM

        api.prepare_process()
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
    """Of OfflineReplicas."""

    replica_class = OfflineReplica

    def generate_offline(self, requests: list[GenerationRequest]) -> tuple[float, list[list[int]]]:
        """By the first of them."""
        (answer,) = self._call(lambda actor: actor.generate_offline.remote(requests), None, self.members[:1])
        return float(answer[0]), list(answer[1])
