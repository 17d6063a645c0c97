"""Buckets become tensors: the pieces that a plan knows go straight into parameters, the others come out as tensors.

Works on every transport. Leaves out what happens to the tensors (receiver.py) and where pieces go (plan.py).
"""

from __future__ import annotations

import itertools
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from bridge.layout.bucket import Bucket, Piece, buffer_bytes, plan_buckets
from bridge.layout.manifest import Manifest, TensorSpec
from bridge.receive.vllm_experts import KEPT_IN_VIEWS
from bridge.transport.errors import DamagedError, TransportError
from bridge.transport.ipc import IpcReader, is_ipc_endpoint
from bridge.transport.nccl import GroupReader, is_group_endpoint
from bridge.transport.shm import ShmReader

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bridge.layout.digest import BucketDigests
    from bridge.messages import BeginSync
    from bridge.receive.plan import Plan

Reader = ShmReader | GroupReader


def open_reader(message: BeginSync, worker: int, device: torch.device) -> Reader:
    """A worker's side of the transport that the endpoints belong to."""
    reader, endpoints = message.first_reader + worker, message.endpoints[worker]
    if endpoints and is_group_endpoint(endpoints[0]):
        return GroupReader(endpoints, reader, message.num_readers, device)
    if endpoints and is_ipc_endpoint(endpoints[0]):
        return IpcReader(endpoints, reader, device)
    return ShmReader(endpoints, reader)


class Stage(NamedTuple):
    """What a pipeline stage sends, the same in every sync."""

    number: int
    first: int  # its first tensor's place in the whole manifest
    manifest: Manifest
    buckets: tuple[Bucket, ...]
    buffer_bytes: int

    @classmethod
    def cut(cls, manifest: Manifest, sizes: tuple[int, ...], bucket_bytes: int) -> tuple[Stage, ...]:
        """The manifest's tensors by stage, of which each has so many."""
        ends = list(itertools.accumulate(sizes))
        parts = [Manifest(manifest.tensors[end - size : end]) for size, end in zip(sizes, ends, strict=True)]
        return tuple(
            cls(number, end - len(part.tensors), part, plan_buckets(part, bucket_bytes), buffer_bytes(part, bucket_bytes))
            for number, (part, end) in enumerate(zip(parts, ends, strict=True))
        )


class Unpacking:
    """One pass over all stages of a sync. Iterate it to the end; it gives the tensors that are not planned.

    `num_arrived` counts the tensors that came, planned ones too; they come in the manifest's order.
    """

    def __init__(
        self, sync: BeginSync, stages: tuple[Stage, ...], reader: Reader, device: torch.device, plan: Plan | None
    ) -> None:
        self._sync, self._stages, self._reader = sync, stages, reader
        self._device, self._plan = device, plan
        self.num_arrived = 0

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for stage in self._stages:
            if self._plan is not None and self._plan.is_whole:
                for bucket, data in self._buckets(stage):
                    self._plan.scatter(bucket, stage.first, data, self._digests(stage))
                self.num_arrived += len(stage.manifest.tensors)
            else:
                yield from self._unpack_stage(stage)

    def _unpack_stage(self, stage: Stage) -> Iterator[tuple[str, torch.Tensor]]:
        """A tensor that lies in one bucket of shared memory is lent: a view, which moves when the bucket is given back.

        Not an expert's, since views of it would not move.
        """
        lends = isinstance(self._reader, ShmReader) and self._device.type == "cpu"
        tensor = torch.empty(0)
        for bucket, data in self._buckets(stage):
            lent: list[_Lent] = []
            if self._plan is not None:
                self._plan.scatter(bucket, stage.first, data, self._digests(stage))
            for piece in bucket.pieces:
                spec = stage.manifest.tensors[piece.tensor]
                self.num_arrived += _is_complete(spec, piece)
                if self._plan is not None and self._plan.is_planned(stage.first + piece.tensor):
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

    def _digests(self, stage: Stage) -> BucketDigests | None:
        return self._reader.digests(stage.number) if self._sync.verify else None

    def _buckets(self, stage: Stage) -> Iterator[tuple[Bucket, torch.Tensor]]:
        """The stage's buckets in order, each good until the next is asked for."""
        stream = self._read_shared(stage) if isinstance(self._reader, ShmReader) else self._read_broadcast(stage)
        try:
            yield from stream
        except DamagedError as error:
            told = [describe_bucket(stage, stage.buckets[index]) for index in error.buckets]
            raise TransportError(f"{', '.join(told)} arrived damaged: its digest differs from the sender's") from error

    def _read_shared(self, stage: Stage) -> Iterator[tuple[Bucket, torch.Tensor]]:
        sync, reader = self._sync, self._reader
        assert isinstance(reader, ShmReader)
        if stage.buffer_bytes != reader.buffer_bytes(stage.number):
            raise TransportError(f"stage {stage.number}: buffers and bucket size do not fit together")
        for bucket, data in _read_ahead(sync, stage, reader):
            yield bucket, data
            reader.release(stage.number)
        if sync.verify:
            reader.finish(stage.number, (sync.sync_index + 1) * len(stage.buckets), sync.deadline)

    def _read_broadcast(self, stage: Stage) -> Iterator[tuple[Bucket, torch.Tensor]]:
        sync, reader = self._sync, self._reader
        assert isinstance(reader, GroupReader)
        sizes = [bucket.num_bytes for bucket in stage.buckets]
        data = reader.read(stage.number, sizes, stage.buffer_bytes, sync.deadline, verify=sync.verify)
        yield from zip(stage.buckets, data, strict=True)


def _read_ahead(sync: BeginSync, stage: Stage, reader: ShmReader) -> Iterator[tuple[Bucket, torch.Tensor]]:
    """The stage's buckets in order. A thread waits for the next one and checks its digest while this one is loaded."""

    def read(bucket: Bucket) -> torch.Tensor:
        sequence = sync.sync_index * len(stage.buckets) + bucket.index
        try:
            return reader.read(stage.number, sequence, bucket.num_bytes, sync.deadline, verify=sync.verify)
        except TransportError as error:
            raise TransportError(f"{describe_bucket(stage, bucket)} {error}") from error

    thread = ThreadPoolExecutor(1, thread_name_prefix="megasync-read")
    try:
        coming = [thread.submit(read, bucket) for bucket in stage.buckets[:1]]
        for bucket in stage.buckets:
            data = coming.pop().result()
            coming = [thread.submit(read, following) for following in stage.buckets[bucket.index + 1 : bucket.index + 2]]
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


def describe_bucket(stage: Stage, bucket: Bucket) -> str:
    """For people: which bucket, and the tensors in it."""
    first, last = (stage.manifest.tensors[bucket.pieces[end].tensor].name for end in (0, -1))
    tensors = first if first == last else f"{first} to {last}"
    return f"bucket {bucket.index} of {len(stage.buckets)} of stage {stage.number} ({tensors})"
