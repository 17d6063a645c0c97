"""Buckets become parameters: pieces with a load plan are scattered into them, the others are yielded as tensors.

Leaves out what happens to the tensors (receiver.py) and how buckets arrive (transport/).
"""

from __future__ import annotations

import itertools
import time
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from bridge.layout.bucket import Bucket, Piece, StagePlan, SyncPlan
from bridge.layout.copies import BucketCopies
from bridge.layout.digest import BucketDigests
from bridge.layout.manifest import TensorSpec
from bridge.layout.plan import LoadPlan
from bridge.messages import BeginSync
from bridge.transport.protocol import Reader, TransportError
from bridge.vllm.weights.experts import VIEWED_BY_VLLM


class Unpacker:
    """Unpacks pass after pass of a sync plan. Without a `load_plan` it yields all tensors."""

    def __init__(self, plan: SyncPlan, load_plan: LoadPlan | None, device: torch.device) -> None:
        self.plan, self.load_plan = plan, load_plan
        self.num_arrived = 0  # tensors in the last pass, including scattered ones; they come in the order of their stage
        self._device = device
        self._copies: dict[tuple[int, int], BucketCopies] = {}  # by stage and bucket
        self._split: dict[int, torch.Tensor] = {}  # by stage: the tensor whose pieces have not all arrived

    def tensors(self, sync: BeginSync, reader: Reader) -> Iterator[tuple[str, torch.Tensor]]:
        """One pass over all stages, to be iterated to the end: scatters planned tensors, yields the others."""
        self.num_arrived, deadline = 0, time.monotonic() + sync.timeout_seconds
        for stage, bucket, data in self._stream(sync, reader, deadline):
            if self.load_plan is not None:
                self.scatter(stage, bucket, data, reader.digests(stage.index) if sync.verify else None)
            if self.load_plan is None or not self.load_plan.is_whole:
                yield from self._unplanned(stage, bucket, data, lends=reader.lends_memory)
        if self.load_plan is not None and self.load_plan.is_whole:
            self.num_arrived = len(self.plan.manifest.tensors)

    def _stream(self, sync: BeginSync, reader: Reader, deadline: float) -> Iterator[tuple[StagePlan, Bucket, torch.Tensor]]:
        """Stage after stage, or a bucket of each in turn; each bucket is valid until the next of its stage is requested."""

        def read(stage: StagePlan) -> Iterator[tuple[StagePlan, Bucket, torch.Tensor]]:
            for bucket, data in reader.buckets(stage, sync.sync_index, deadline, verify=sync.verify):
                yield stage, bucket, data

        streams = [read(stage) for stage in self.plan.stages]
        if not reader.interleaves:
            yield from itertools.chain.from_iterable(streams)
        while reader.interleaves and streams:
            for stream in list(streams):
                if (each := next(stream, None)) is None:
                    streams.remove(stream)
                else:
                    yield each

    def scatter(self, stage: StagePlan, bucket: Bucket, data: torch.Tensor, digests: BucketDigests | None = None) -> None:
        """Copy a bucket's planned pieces into the parameters, adding to `digests` where that reads all bytes once."""
        assert self.load_plan is not None
        copies = self._copies.get((stage.index, bucket.index))
        if copies is None:
            dtypes = {piece.tensor: stage.manifest.tensors[piece.tensor].dtype for piece in bucket.pieces}
            planned = {piece.tensor: self.load_plan.copies[stage.first_tensor + piece.tensor] for piece in bucket.pieces}
            copies = BucketCopies(bucket.pieces, bucket.num_bytes, dtypes, planned, into_bucket=False)
            self._copies[stage.index, bucket.index] = copies
        copies.run(self.load_plan.memory, data, digests)

    def _unplanned(
        self, stage: StagePlan, bucket: Bucket, data: torch.Tensor, *, lends: bool
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors that are not planned. With `lends` a tensor in one bucket is lent: a view, copied out before the bucket is
        reused if vLLM still holds it. Not for experts: vLLM keeps views of theirs, which would not be copied.
        """
        lent: list[_Lent] = []
        for piece in bucket.pieces:
            spec = stage.manifest.tensors[piece.tensor]
            is_complete = piece.tensor_offset + piece.num_bytes == spec.num_bytes
            self.num_arrived += is_complete
            if self.load_plan is not None and self.load_plan.copies[stage.first_tensor + piece.tensor] is not None:
                continue
            if lends and 0 < piece.num_bytes == spec.num_bytes and VIEWED_BY_VLLM not in spec.name:
                yield spec.name, _lend(data, spec, piece, lent)
                continue
            if piece.tensor_offset == 0:
                self._split[stage.index] = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device=self._device)
            _copy_piece(self._split[stage.index], data, piece)
            if is_complete:
                yield spec.name, self._split.pop(stage.index)
        _take_back(lent)


class _Lent(NamedTuple):
    """A tensor lent to the loader as a view of a bucket; `memory` lives as long as any view of it."""

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
    """Copies lent views of incomplete layers before the bucket is reused."""
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
