"""Buckets: how the tensors of a manifest lie in fixed-size buffers. Pure functions; both sides plan alike.

Leaves out the bytes' way (transport/) and their loading (receiver.py). Only index, number of bytes and digest of a
bucket travel; the plan does not.

    buckets = plan_buckets(manifest, bucket_bytes=512 * 2**20)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bridge.layout.manifest import Manifest

ALIGNMENT_BYTES = 64  # a cache line; a multiple of every dtype's size, so that typed views of a buffer are legal


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of one tensor's bytes: `num_bytes` from `tensor_offset` on lie in the bucket from `bucket_offset` on."""

    tensor: int  # index in the manifest
    tensor_offset: int
    bucket_offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """`num_bytes` is where the last piece ends; gaps of alignment belong to it."""

    index: int
    pieces: tuple[Piece, ...]
    num_bytes: int


def align(num_bytes: int) -> int:
    """Round up to the alignment."""
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def buffer_bytes(manifest: Manifest, bucket_bytes: int) -> int:
    """How large a buffer has to be: `bucket_bytes` rounded down to the alignment, less when the model is smaller.

    Raises:
        ValueError: `bucket_bytes` is smaller than the alignment.
    """
    if bucket_bytes < ALIGNMENT_BYTES:
        raise ValueError(f"sync.bucket_bytes is {bucket_bytes}; give at least {ALIGNMENT_BYTES}, better 64MiB or more")
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
    for index, tensor in enumerate(manifest.tensors):
        done = 0
        while done < tensor.num_bytes or (done == 0 and tensor.num_bytes == 0):
            if used == capacity:
                buckets.append(_close(len(buckets), pieces))
                pieces, used = [], 0
            size = min(tensor.num_bytes - done, capacity - used)
            pieces.append(Piece(index, done, used, size))
            used += align(size)
            done += size
            if tensor.num_bytes == 0:
                break
    if pieces:
        buckets.append(_close(len(buckets), pieces))
    return tuple(buckets)


def gaps(bucket: Bucket) -> list[tuple[int, int]]:
    """The bytes between pieces, which belong to no tensor: where each run of them starts and ends."""
    ends = [piece.bucket_offset + piece.num_bytes for piece in bucket.pieces[:-1]]
    starts = [piece.bucket_offset for piece in bucket.pieces[1:]]
    return [(end, start) for end, start in zip(ends, starts, strict=True) if start > end]


def _close(index: int, pieces: list[Piece]) -> Bucket:
    return Bucket(index, tuple(pieces), max(piece.bucket_offset + piece.num_bytes for piece in pieces))
