"""What the bench adds to a vLLM worker: the baselines' ways to load weights. Imported by vLLM's processes alone.

Leaves out our own way, which is bridge/receiver.py, and who calls (bench_replica.py).
"""

from __future__ import annotations

import math
import os

import torch
from vllm.config import set_current_vllm_config

from bridge import vllm_api
from bridge.receiver import WorkerExtension
from megasync.bench_memory import give_back_free_memory


class BenchWorkerExtension(WorkerExtension):
    """Methods that vLLM mixes into its worker class, called by name through `collective_rpc`."""

    def bench_open(self, path: str, num_bytes: int) -> None:
        """Map the shared buffer through which single tensors come."""
        self.bench_buffer = torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8)

    def bench_load_tensor(self, name: str, dtype: str, shape: list[int]) -> None:
        """Load the one tensor that lies in the buffer. vLLM keeps it until its layer is complete, so it is copied."""
        kind: torch.dtype = getattr(torch, dtype)
        num_bytes = math.prod(shape) * kind.itemsize
        tensor = self.bench_buffer[:num_bytes].view(kind).view(shape).clone()
        with set_current_vllm_config(self.vllm_config):  # type: ignore[attr-defined] # the worker's
            vllm_api.load_stream(self.weight_transfer_engine.model, [(name, tensor)])

    def bench_reload(self, folder: str) -> None:
        """vLLM's own reload from a Hugging Face folder, and what it forgets on CPUs when embeddings are tied."""
        self.reload_weights(weights_path=folder)  # type: ignore[attr-defined] # the worker's
        vllm_api.repack_tied_head(self.weight_transfer_engine.model)

    def bench_pid(self) -> int:
        return os.getpid()

    def bench_give_back_free_memory(self) -> None:
        give_back_free_memory()
