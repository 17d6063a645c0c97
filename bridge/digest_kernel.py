"""The sums of verify.py's digest as one Triton kernel: each byte is read once, nothing is written but a number a chunk.

Leaves out what the sums mean and how they are joined (verify.py). Imported on CUDA alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK_WORDS = 4096


@triton.jit  # type: ignore[untyped-decorator]
def _sum_chunk(words, multipliers, sums, num_words, CHUNK: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: N803
    chunk = tl.program_id(0).to(tl.int64)
    total = tl.zeros([BLOCK], dtype=tl.int64)
    for start in range(0, CHUNK, BLOCK):
        position = start + tl.arange(0, BLOCK)
        place = chunk * CHUNK + position
        word = tl.load(words + place, mask=place < num_words, other=0)
        total += (word + (word >> 32)) * tl.load(multipliers + position)
    tl.store(sums + chunk, tl.sum(total, axis=0))


def chunk_sums(words: torch.Tensor, multipliers: torch.Tensor) -> torch.Tensor:
    """For each run of `multipliers.numel()` words the sum of their products; `words` [n] int64, the last run may be short."""
    chunk_words = multipliers.numel()
    sums = torch.empty(triton.cdiv(words.numel(), chunk_words), dtype=torch.int64, device=words.device)
    if words.numel():
        _sum_chunk[(sums.numel(),)](
            words, multipliers, sums, words.numel(), CHUNK=chunk_words, BLOCK=min(BLOCK_WORDS, chunk_words), num_warps=8
        )
    return sums
