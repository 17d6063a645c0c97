"""digest.py's sum over a bucket as a Triton kernel that reads each byte once. Imported on CUDA alone."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from bridge.layout.splitmix import FOLD_FACTOR

BLOCK_WORDS = 2048
FOLD = tl.constexpr(FOLD_FACTOR)


@triton.jit
def mix(words):  # type: ignore[no-untyped-def]
    """The mixed word, int64, before its position's multiplier."""
    return words + (words >> 32) * FOLD


@triton.jit
def sum_of_words(words, factors):  # type: ignore[no-untyped-def]
    """The digest's sum over words of one chunk; `factors` are their positions' multipliers."""
    return tl.sum(mix(words) * factors, axis=0)


@triton.jit(do_not_specialize=["num_words", "num_rest"])  # type: ignore[untyped-decorator]
def _add_digest(data, multipliers, powers, total, num_words, num_rest, CHUNK: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: N803
    start = tl.program_id(0).to(tl.int64) * BLOCK
    if start < num_words:
        position = start + tl.arange(0, BLOCK)
        inside = position < num_words
        words = tl.load(data.to(tl.pointer_type(tl.int64)) + position, mask=inside, other=0)
        part = sum_of_words(words, tl.load(multipliers + position % CHUNK, mask=inside, other=0))
    else:  # the bytes after the last whole word, little-endian
        start = num_words.to(tl.int64)
        byte = tl.arange(0, 8)
        values = tl.load(data + start * 8 + byte, mask=byte < num_rest, other=0).to(tl.int64)
        word = tl.sum(values << (8 * byte).to(tl.int64), axis=0)
        part = mix(word) * tl.load(multipliers + start % CHUNK)
    tl.atomic_add(total, part * tl.load(powers + start // CHUNK), sem="relaxed")


def add_digest(data: torch.Tensor, multipliers: torch.Tensor, powers: torch.Tensor, total: torch.Tensor) -> None:
    """Add the sum of `data` to `total`, int64 [].

    Args:
        data: [n] uint8, aligned to 8 bytes.
        multipliers: int64 [words of a chunk].
        powers: int64, one a chunk, and one more.
    """
    num_words, num_rest = divmod(data.numel(), 8)
    grid = (triton.cdiv(num_words, BLOCK_WORDS) + 1,)
    with torch.cuda.device_of(data):  # type: ignore[no-untyped-call]
        _add_digest[grid](
            data, multipliers, powers, total, num_words, num_rest, CHUNK=multipliers.numel(), BLOCK=BLOCK_WORDS, num_warps=8
        )
