"""Transfers compared with our stream on GPUs: the wire alone, and vLLM's own transfer over NCCL. On trainer rank 0.

floor   buckets of nothing in particular, broadcast one after another: what the wire takes
packed  vLLM's NCCLWeightTransferEngine with packed tensors, from an iterator of Hugging Face tensors

Leaves out the workers' side (vllm_worker.py).
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from bridge.transport.channel import Channel
from bridge.transport.store import own_address
from megasync.launch.ray_cluster import free_port

if TYPE_CHECKING:
    from bench.replicas.replica import BenchPool
    from bridge.layout.manifest import Manifest

SECONDS = 60.0


def broadcast_all(channel: Channel, sizes: list[int]) -> float:
    """Broadcast buckets of these sizes from two buffers in turns; the seconds that it took, once all members were there."""
    deadline = time.monotonic() + SECONDS
    channel.meet(deadline)
    buffers = [torch.zeros(max(sizes), dtype=torch.uint8, device=channel.device) for _ in range(2)]
    channel.wait(channel.mark(), deadline, "the buffers")
    channel.wait(channel.broadcast(buffers[0][:8], deadline), deadline, "all members to be there")
    begin = time.perf_counter()
    sent = [channel.broadcast(buffers[index % 2][:size], deadline) for index, size in enumerate(sizes)]
    for done in sent:
        channel.wait(done, deadline, "the wire")
    return time.perf_counter() - begin


def bucket_sizes(manifest: Manifest, bucket_bytes: int) -> list[int]:
    """Sizes in bytes of the buckets that hold all bytes, in order."""
    total = manifest.total_bytes
    return [min(bucket_bytes, total - begin) for begin in range(0, total, bucket_bytes)]


class NcclBaselines:
    """The sender's side of both. `device` is the trainer's."""

    def __init__(self, pool: BenchPool, manifest: Manifest, bucket_bytes: int, device: torch.device) -> None:
        self._pool, self._manifest, self._device = pool, manifest, device
        self.sizes = bucket_sizes(manifest, bucket_bytes)
        self._channel: Channel | None = None
        self._endpoint = ""
        self._group: Any = None

    def floor(self) -> float:
        """Seconds that the model's bytes take."""
        if self._channel is None:
            self._channel, self._endpoint = Channel.listen(1 + len(self._pool.reader_names), self._device)
        taking = self._pool.send("readers", "bench_floor", self._endpoint, len(self._pool.reader_names), self.sizes)
        seconds = broadcast_all(self._channel, self.sizes)
        self._pool.gather(taking)
        return seconds

    def packed(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Send them all; vLLM has taken them over when this comes back."""
        from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

        if self._group is None:
            address, port, size = own_address(), free_port(), 1 + len(self._pool.reader_names)
            joining = self._pool.send("readers", "bench_join_packed", address, port, size)
            info = {"master_address": address, "master_port": port, "world_size": size}
            self._group = NCCLWeightTransferEngine.trainer_init(info)
            self._pool.gather(joining)
        self._pool.call("workers", "bench_packed_start")
        specs = self._manifest.tensors
        update = [spec.name for spec in specs], [spec.dtype for spec in specs], [list(spec.shape) for spec in specs]
        taking = self._pool.send("workers", "bench_packed_take", *update)
        NCCLWeightTransferEngine.trainer_send_weights(iter(tensors), {"group": self._group, "packed": True})
        torch.cuda.synchronize()
        self._pool.gather(taking)
        self._pool.call("finish_packed")
