"""Buckets: how the tensors of a manifest lie in fixed-size buffers, pipeline stage by pipeline stage.

Pure functions. Sender and receiver make the same SyncPlan, which is not sent: only index, size and digest of a bucket are.
Leaves out the transports (transport/) and where a bucket's bytes come from and go to (copies.py).

    plan = SyncPlan(manifest, stage_sizes=(len(manifest.tensors),), bucket_bytes=512 * 2**20)
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

from bridge.layout.manifest import Manifest

ALIGNMENT_BYTES = 64  # a cache line; a multiple of every dtype's size, so that typed views of a buffer are legal


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of one tensor's bytes: `num_bytes` starting at `tensor_offset` lie in the bucket starting at `bucket_offset`."""

    tensor: int  # index in the manifest
    tensor_offset: int
    bucket_offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """`num_bytes` is where the last piece ends; it includes gaps of alignment."""

    index: int
    pieces: tuple[Piece, ...]
    num_bytes: int


@dataclass(frozen=True)
class StagePlan:
    """The buckets of one pipeline stage; `manifest` is its part of the whole one, starting at tensor `first_tensor`.

    `buckets`: all `num_buckets` of the stage, or those of one lane (lanes.py).
    """

    index: int
    first_tensor: int
    manifest: Manifest
    buckets: tuple[Bucket, ...]
    buffer_bytes: int
    num_buckets: int

    def lane(self, indices: Iterable[int]) -> StagePlan:
        """Only the buckets of these indices."""
        return replace(self, buckets=tuple(self.buckets[index] for index in indices))

    def describe(self, bucket: Bucket) -> str:
        """For messages: the bucket, and the tensors in it."""
        first, last = (self.manifest.tensors[bucket.pieces[end].tensor].name for end in (0, -1))
        tensors = first if first == last else f"{first} to {last}"
        return f"bucket {bucket.index} of {self.num_buckets} of stage {self.index} ({tensors})"


class PlanKey(NamedTuple):
    """The inputs of a SyncPlan; equal keys give equal plans."""

    manifest_digest: str
    stage_sizes: tuple[int, ...]
    bucket_bytes: int


class SyncPlan:
    """The buckets of every stage, cut once and used by all syncs of a manifest."""

    def __init__(self, manifest: Manifest, stage_sizes: tuple[int, ...], bucket_bytes: int) -> None:
        """`stage_sizes`: each stage's number of tensors."""
        self.manifest, self.stage_sizes, self.bucket_bytes = manifest, stage_sizes, bucket_bytes
        self.key = PlanKey(manifest.digest, stage_sizes, bucket_bytes)
        ends = itertools.accumulate(stage_sizes)
        stages = [(end - size, Manifest(manifest.tensors[end - size : end])) for size, end in zip(stage_sizes, ends, strict=True)]
        buckets = [plan_buckets(part, bucket_bytes) for _, part in stages]
        self.stages = tuple(
            StagePlan(index, first, part, buckets[index], buffer_bytes(part, bucket_bytes), len(buckets[index]))
            for index, (first, part) in enumerate(stages)
        )
        self.num_buckets = sum(len(stage.buckets) for stage in self.stages)


def align(num_bytes: int) -> int:
    """Round up to the alignment."""
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def buffer_bytes(manifest: Manifest, bucket_bytes: int) -> int:
    """Required size of a buffer: `bucket_bytes` rounded down to the alignment, less for a smaller model."""
    whole_model = sum(align(tensor.num_bytes) for tensor in manifest.tensors)
    return max(ALIGNMENT_BYTES, min(bucket_bytes // ALIGNMENT_BYTES * ALIGNMENT_BYTES, whole_model))


def plan_buckets(manifest: Manifest, bucket_bytes: int) -> tuple[Bucket, ...]:
    """Cut the stream of tensors into buckets of at most `buffer_bytes(manifest, bucket_bytes)`.

    Invariants: pieces follow the manifest's order; every byte of every tensor lies in exactly one piece; pieces start
    at multiples of the alignment and do not overlap; only a tensor that meets the end of a bucket is split, and the
    cut is at a multiple of the alignment within the tensor. An empty tensor has one piece of 0 bytes.
    """
    capacity = buffer_bytes(manifest, bucket_bytes)
    buckets: list[Bucket] = []
    pieces: list[Piece] = []
    used = 0
    for index, num_bytes in enumerate(tensor.num_bytes for tensor in manifest.tensors):
        done = 0
        while done < num_bytes or (done == 0 and num_bytes == 0):
            if used == capacity:
                buckets.append(_close(len(buckets), pieces))
                pieces, used = [], 0
            size = min(num_bytes - done, capacity - used)
            pieces.append(Piece(index, done, used, size))
            used += align(size)
            done += size
            if num_bytes == 0:
                break
    if pieces:
        buckets.append(_close(len(buckets), pieces))
    return tuple(buckets)


def gaps(bucket: Bucket) -> list[tuple[int, int]]:
    """Start and end of each run of bytes between pieces, which belong to no tensor."""
    ends = [piece.bucket_offset + piece.num_bytes for piece in bucket.pieces[:-1]]
    starts = [piece.bucket_offset for piece in bucket.pieces[1:]]
    return [(end, start) for end, start in zip(ends, starts, strict=True) if start > end]


def _close(index: int, pieces: list[Piece]) -> Bucket:
    return Bucket(index, tuple(pieces), max(piece.bucket_offset + piece.num_bytes for piece in pieces))
