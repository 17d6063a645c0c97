"""Buckets become tensors: the pieces that a plan knows go straight into parameters, the others come out as tensors.

Works on every transport. Leaves out what happens to the tensors (receiver.py) and where pieces go (plan.py).
"""

from __future__ import annotations

import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from bridge.bucket import Bucket, Piece, buffer_bytes, plan_buckets
from bridge.manifest import Manifest, TensorSpec
from bridge.transport.ipc import IpcReader, is_ipc_endpoint
from bridge.transport.nccl import GroupReader, is_group_endpoint
from bridge.transport.shm import DamagedError, ShmReader, TransportError
from bridge.vllm_experts import KEPT_IN_VIEWS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bridge.messages import BeginSync
    from bridge.plan import Plan

Reader = ShmReader | GroupReader


def open_reader(message: BeginSync, worker: int, device: torch.device) -> Reader:
    """A worker's side of the transport that the endpoints belong to."""
    reader = message.first_reader + worker
    if message.endpoints and is_group_endpoint(message.endpoints[0]):
        return GroupReader(message.endpoints, reader, message.num_readers, device)
    if message.endpoints and is_ipc_endpoint(message.endpoints[0]):
        return IpcReader(message.endpoints, reader, device)
    return ShmReader(message.endpoints, reader)


class Unpacking:
    """One pass over all stages of a sync. Iterate it to the end; it gives the tensors that are not planned.

    `arrived` holds the indices of all tensors that came, planned ones too.
    """

    def __init__(self, sync: BeginSync, manifest: Manifest, reader: Reader, device: torch.device, plan: Plan | None) -> None:
        self._sync, self._manifest, self._reader = sync, manifest, reader
        self._device, self._plan = device, plan
        self.arrived: set[int] = set()

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        first = 0
        for stage, size in enumerate(self._sync.stage_sizes):
            part = Manifest(self._manifest.tensors[first : first + size])
            yield from self._unpack_stage(stage, first, part)
            first += size

    def _unpack_stage(self, stage: int, first: int, part: Manifest) -> Iterator[tuple[str, torch.Tensor]]:
        """A tensor that lies in one bucket of shared memory is lent: a view, which moves when the bucket is given back.

        Not an expert's, since views of it would not move.
        """
        lends = isinstance(self._reader, ShmReader) and self._device.type == "cpu"
        tensor = torch.empty(0)
        for bucket, data in self._buckets(stage, part):
            lent: list[_Lent] = []
            if self._plan is not None:
                self._plan.scatter(bucket, first, data)
            for piece in bucket.pieces:
                spec = part.tensors[piece.tensor]
                if _is_complete(spec, piece):
                    self.arrived.add(first + piece.tensor)
                if self._plan is not None and self._plan.is_planned(first + piece.tensor):
                    continue
                if lends and 0 < piece.num_bytes == spec.num_bytes and KEPT_IN_VIEWS not in spec.name:
                    tensor = _lend(data, spec, piece, lent)
                else:
                    if piece.tensor_offset == 0:
                        tensor = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device=self._device)
                    _copy_piece(tensor, data, piece)
                if _is_complete(spec, piece):
                    yield spec.name, tensor
            _take_back(lent)

    def _buckets(self, stage: int, part: Manifest) -> Iterator[tuple[Bucket, torch.Tensor]]:
        """The stage's buckets in order, each good until the next is asked for."""
        buckets = plan_buckets(part, self._sync.bucket_bytes)
        shares_memory = isinstance(self._reader, ShmReader)
        stream = self._read_shared(stage, part, buckets) if shares_memory else self._read_broadcast(stage, part, buckets)
        try:
            yield from stream
        except DamagedError as error:
            told = [describe_bucket(buckets[index], len(buckets), stage, part) for index in error.buckets]
            raise TransportError(f"{', '.join(told)} arrived damaged: its digest differs from the sender's") from error

    def _read_shared(
        self, stage: int, part: Manifest, buckets: tuple[Bucket, ...]
    ) -> Iterator[tuple[Bucket, torch.Tensor]]:
        sync, reader = self._sync, self._reader
        assert isinstance(reader, ShmReader)
        if buffer_bytes(part, sync.bucket_bytes) != reader.buffer_bytes(stage):
            raise TransportError(f"stage {stage}: buffers and bucket size do not fit together")
        for bucket, data in _read_ahead(sync, stage, part, reader, buckets):
            yield bucket, data
            reader.release(stage)
        if sync.verify:
            reader.finish(stage, (sync.sync_index + 1) * len(buckets), sync.deadline)

    def _read_broadcast(
        self, stage: int, part: Manifest, buckets: tuple[Bucket, ...]
    ) -> Iterator[tuple[Bucket, torch.Tensor]]:
        sync, reader = self._sync, self._reader
        assert isinstance(reader, GroupReader)
        sizes = [bucket.num_bytes for bucket in buckets]
        data = reader.read(stage, sizes, buffer_bytes(part, sync.bucket_bytes), sync.deadline, verify=sync.verify)
        yield from zip(buckets, data, strict=True)


def _read_ahead(
    sync: BeginSync, stage: int, manifest: Manifest, reader: ShmReader, buckets: tuple[Bucket, ...]
) -> Iterator[tuple[Bucket, torch.Tensor]]:
    """The stage's buckets in order. A thread waits for the next one and checks its digest while this one is loaded."""

    def read(bucket: Bucket) -> torch.Tensor:
        sequence = sync.sync_index * len(buckets) + bucket.index
        try:
            return reader.read(stage, sequence, bucket.num_bytes, sync.deadline, verify=sync.verify)
        except TransportError as error:
            raise TransportError(f"{describe_bucket(bucket, len(buckets), stage, manifest)} {error}") from error

    thread = ThreadPoolExecutor(1, thread_name_prefix="megasync-read")
    try:
        coming = [thread.submit(read, bucket) for bucket in buckets[:1]]
        for bucket in buckets:
            data = coming.pop().result()
            coming = [thread.submit(read, following) for following in buckets[bucket.index + 1 : bucket.index + 2]]
            yield bucket, data
    finally:
        thread.shutdown(wait=False, cancel_futures=True)


class _Lent(NamedTuple):
    """A tensor that was given to the loader as a view of a bucket; `memory` lives as long as any view of it does."""

    name: str
    tensor: weakref.ref[torch.Tensor]
    memory: weakref.ref[Any]


def _lend(data: torch.Tensor, spec: TensorSpec, piece: Piece, lent: list[_Lent]) -> torch.Tensor:
    memory = data[piece.bucket_offset : piece.bucket_offset + piece.num_bytes].numpy()
    tensor = torch.frombuffer(memory, dtype=getattr(torch, spec.dtype))
    tensor.resize_(spec.shape)  # and no view, which would keep its base, and so the memory, alive
    lent.append(_Lent(spec.name, weakref.ref(tensor), weakref.ref(memory)))
    return tensor


def _take_back(lent: list[_Lent]) -> None:
    """Before a bucket's memory is used again: what is still held, by a layer that is not complete, moves out of it."""
    for name, held, memory in lent:
        tensor = held()
        if tensor is not None:
            tensor.data = tensor.clone()
        del tensor
        if memory() is not None:
            raise TransportError(f"vLLM's loader keeps a part of {name}, whose memory is needed for the next bucket")


def _copy_piece(tensor: torch.Tensor, data: torch.Tensor, piece: Piece) -> None:
    target = tensor.view(-1).view(torch.uint8)
    source = data[piece.bucket_offset : piece.bucket_offset + piece.num_bytes]
    target[piece.tensor_offset : piece.tensor_offset + piece.num_bytes].copy_(source)


def _is_complete(spec: TensorSpec, piece: Piece) -> bool:
    return piece.tensor_offset + piece.num_bytes == spec.num_bytes


def describe_bucket(bucket: Bucket, num_buckets: int, stage: int, manifest: Manifest) -> str:
    """For people: which bucket, and the tensors in it."""
    first, last = (manifest.tensors[bucket.pieces[end].tensor].name for end in (0, -1))
    tensors = first if first == last else f"{first} to {last}"
    return f"bucket {bucket.index} of {num_buckets} of stage {stage} ({tensors})"
