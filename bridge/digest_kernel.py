"""The sums of digest.py as one Triton kernel: each byte is read once, nothing is written but a number a chunk.

Leaves out what the sums mean and how they are joined (digest.py). Imported on CUDA alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK_WORDS = 4096


@triton.jit  # type: ignore[untyped-decorator]
def _sum_chunk(data, multipliers, sums, num_words, num_rest, CHUNK: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: N803
    chunk = tl.program_id(0).to(tl.int64)
    if chunk * CHUNK < num_words:
        words = data.to(tl.pointer_type(tl.int64))
        total = tl.zeros([BLOCK], dtype=tl.int64)
        for start in range(0, CHUNK, BLOCK):
            position = start + tl.arange(0, BLOCK)
            place = chunk * CHUNK + position
            word = tl.load(words + place, mask=place < num_words, other=0)
            total += (word + (word >> 32)) * tl.load(multipliers + position)
        tl.store(sums + chunk, tl.sum(total, axis=0))
    else:  # the bytes after the last whole word, little-endian
        byte = tl.arange(0, 8)
        value = tl.load(data + num_words * 8 + byte, mask=byte < num_rest, other=0).to(tl.int64)
        word = tl.sum(value << (8 * byte).to(tl.int64), axis=0)
        tl.store(sums + chunk, (word + (word >> 32)) * tl.load(multipliers))


def chunk_sums(data: torch.Tensor, multipliers: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
    """For each run of `multipliers.numel()` words the sum of their products, and last that of the bytes after the last word.

    Args:
        data: [n] uint8, aligned to 8 bytes; the last run of words may be short.
        multipliers: int64 [words of a run].
        sums: int64, at least as many as there are; gives those that were written.
    """
    num_words, num_rest = divmod(data.numel(), 8)
    num_sums = triton.cdiv(num_words, multipliers.numel()) + 1
    block = min(BLOCK_WORDS, multipliers.numel())
    _sum_chunk[(num_sums,)](data, multipliers, sums, num_words, num_rest, CHUNK=multipliers.numel(), BLOCK=block, num_warps=8)
    return sums[:num_sums]
