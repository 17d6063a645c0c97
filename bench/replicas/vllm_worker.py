"""Methods that the bench adds to a vLLM worker: other ways to load weights. Imported by vLLM's processes alone.

Leaves out our own method (bridge/receive/) and who calls (replica.py).
"""

from __future__ import annotations

import math
import os
import time

import torch
from vllm.config import set_current_vllm_config

from bench.common.memory import device_bytes, give_back_free_memory
from bench.replicas.nccl import SECONDS, broadcast_all
from bridge.receive.receiver import WorkerExtension
from bridge.transport.channel import Channel
from bridge.vllm.weights import experts, reload


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
            reload.load_stream(self.weight_transfer_engine.model, [(name, tensor)])

    def bench_reload(self, folder: str) -> None:
        """vLLM's own reload from a Hugging Face folder, and its missing steps on CPUs: tied embeddings, packed experts."""
        for layer in self.weight_transfer_engine.model.modules():
            experts.forget_kernel(layer)
        self.reload_weights(weights_path=folder)  # type: ignore[attr-defined] # the worker's
        reload.repack_tied_head(self.weight_transfer_engine.model)

    def bench_floor(self, first_reader: int, endpoint: str, num_readers: int, sizes: list[int]) -> None:
        """Take buckets of these sizes and do nothing with them: the other side of nccl.NcclBaselines.floor."""
        if not hasattr(self, "bench_channel"):
            engine, deadline = self.weight_transfer_engine, time.monotonic() + SECONDS
            reader = 1 + first_reader + engine.parallel_config.rank
            self.bench_channel = Channel.connect(endpoint, reader, 1 + num_readers, engine.device, deadline)
        broadcast_all(self.bench_channel, sizes)

    def bench_join_packed(self, first_reader: int, address: str, port: int, world_size: int) -> None:
        """An engine of vLLM's own beside ours (vllm 0.26.0, distributed/weight_transfer/nccl_engine.py)."""
        from vllm.distributed.weight_transfer import nccl_engine

        own = self.weight_transfer_engine
        self.bench_packed = nccl_engine.NCCLWeightTransferEngine(own.config, own.vllm_config, own.device, own.model)
        self.bench_packed.init_transfer_engine(
            nccl_engine.NCCLWeightTransferInitInfo(address, port, rank_offset=1 + first_reader, world_size=world_size)
        )
        self.bench_update_info = nccl_engine.NCCLWeightTransferUpdateInfo

    def bench_packed_start(self) -> None:
        with set_current_vllm_config(self.vllm_config):  # type: ignore[attr-defined] # the worker's
            self.bench_packed.start_weight_update()

    def bench_packed_take(self, names: list[str], dtypes: list[str], shapes: list[list[int]]) -> None:
        with set_current_vllm_config(self.vllm_config):  # type: ignore[attr-defined] # the worker's
            self.bench_packed.receive_weights(self.bench_update_info(names, dtypes, shapes, packed=True))
        torch.cuda.synchronize()

    def bench_packed_finish(self) -> None:
        with set_current_vllm_config(self.vllm_config):  # type: ignore[attr-defined] # the worker's
            self.bench_packed.finish_weight_update()
        torch.cuda.synchronize()

    def bench_device_bytes(self, begin: bool) -> int:
        """As memory.device_bytes, of the worker's GPU."""
        return device_bytes(begin=begin)

    def bench_pid(self) -> int:
        return os.getpid()

    def bench_give_back_free_memory(self) -> None:
        give_back_free_memory()
