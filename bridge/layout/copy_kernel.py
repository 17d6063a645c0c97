"""copies.py's tiles as one Triton kernel, which also sums the digest of the words that it copies. Imported on CUDA alone."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from bridge.layout.digest import CHUNK_WORDS, TILE_WORDS, multipliers, powers
from bridge.layout.digest_kernel import sum_of_words


@triton.jit  # type: ignore[untyped-decorator]
def _copy_tile(  # type: ignore[no-untyped-def] # noqa: PLR0913, PLR0917
    table, bases, bucket, total, factors, weights,
    INTO_BUCKET: tl.constexpr, SUM: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr,  # noqa: N803
):  # fmt: skip
    entry = table + 4 * tl.program_id(0)
    start, count = tl.load(entry + 2), tl.load(entry + 3)
    there = tl.load(bases + tl.load(entry)).to(tl.pointer_type(tl.int64)) + tl.load(entry + 1)
    here = bucket.to(tl.pointer_type(tl.int64)) + start
    word = tl.arange(0, TILE)
    inside = word < count
    moves = word < tl.where(tl.load(entry) == 0, 0, count)  # the bucket's own words are for the digest alone
    if INTO_BUCKET:
        words = tl.load(there + word, mask=inside, other=0)
        tl.store(here + word, words, mask=moves)
    else:
        words = tl.load(here + word, mask=inside, other=0)
        tl.store(there + word, words, mask=moves)
    if SUM:
        part = sum_of_words(words, tl.load(factors + start % CHUNK + word, mask=inside, other=0))
        tl.atomic_add(total, part * tl.load(weights + start // CHUNK), sem="relaxed")


def copy_tiles(
    table: torch.Tensor, bases: torch.Tensor, data: torch.Tensor, total: torch.Tensor | None, *, into_bucket: bool
) -> None:
    """Copy between the memory at `bases` and a bucket.

    Args:
        table: int32 [tiles, 4], see copies.Tiles.
        bases: int64 [1 + memories], addresses that are multiples of 8, of the bucket and of memory.
        data: the bucket's bytes, uint8, aligned to 8.
        total: int64 [], to which the digest's sum over the tiles' words is added; None to leave that out.
        into_bucket: the direction.
    """
    if not len(table):
        return
    num_chunks = -(-data.numel() // (8 * CHUNK_WORDS))
    with torch.cuda.device_of(data):  # type: ignore[no-untyped-call]
        _copy_tile[(len(table),)](
            table, bases, data, total if total is not None else bases, multipliers(data.device), powers(data.device, num_chunks),
            INTO_BUCKET=into_bucket, SUM=total is not None, CHUNK=CHUNK_WORDS, TILE=TILE_WORDS, num_warps=8,
        )  # fmt: skip
