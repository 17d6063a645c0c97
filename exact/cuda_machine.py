"""Whether this GPU's kernels are as the exact functions need them, as machine.py asks it of CPUs.

Products of many numbers of rows and with a weight's rows in another order; attention of whole sequences beside that of a few
queries over a paged cache. Try it: tests/exact/test_cuda.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate

import torch

from exact import cuda

ROWS = 2048
COUNTS = (1, 2, 3, 7, 8, 16, 33, 64, 128, 200, 256, 512, 1000)  # rows of a product
LENGTHS = (300, 77, 129, 16, 640)  # of sequences
PAGE = 16  # vLLM's blocks (v1/attention/backends/flash_attn.py:get_supported_kernel_block_sizes)
LAST = (1, 2, 9, 64, 130)  # queries over a cache, at most a sequence's length


def problem(shapes: Iterable[tuple[int, int]], heads: tuple[int, int], head_size: int, dtype: torch.dtype) -> str:
    """The function whose result depends on a row's place here, or that is missing; "" if none was found.

    Args:
        shapes: (in, out) of the linears' weights.
        heads: of queries, and of keys and values.
        dtype: of weights and activations.
    """
    if lacking := cuda.missing():
        return lacking
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=generator, device="cuda").to(dtype)

    for num_inputs, num_outputs in sorted(set(shapes)):
        if not _rows_agree(draw(ROWS, num_inputs), draw(num_outputs, num_inputs)):
            return f"a row of a product with a weight [{num_outputs}, {num_inputs}] depends on its place"
    total = sum(LENGTHS)
    query, key, value = (draw(total, count, head_size) for count in (heads[0], heads[1], heads[1]))
    return "" if _queries_agree(query, key, value) else f"attention of {heads[0]} heads of {head_size} depends on its place"


def _rows_agree(rows: torch.Tensor, weight: torch.Tensor) -> bool:
    whole = cuda.linear(rows, weight)
    for count in COUNTS:
        start = count % 11
        if not torch.equal(cuda.linear(rows[start : start + count], weight), whole[start : start + count]):
            return False
    by = len(weight) // 3 + 1
    return torch.equal(cuda.linear(rows, weight.roll(by, 0)), whole.roll(by, 1))


def _queries_agree(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    begins = [0, *accumulate(LENGTHS)]
    scale = query.shape[-1] ** -0.5
    whole = cuda.attend(query, key, value, _int32(begins), max(LENGTHS), scale)
    cache, tables = (_paged(key, begins), _paged(value, begins)), _tables()
    for most in LAST:
        counts = [min(most, length) for length in LENGTHS]
        rows = torch.cat([torch.arange(end - count, end) for end, count in zip(begins[1:], counts, strict=True)]).to(query.device)
        ends, longest = _int32([0, *accumulate(counts)]), (max(counts), max(LENGTHS))
        part = cuda.attend_cached(query[rows], cache, ends, _int32(LENGTHS), tables, longest, scale)
        if not torch.equal(part, whole[rows]):
            return False
    return True


def _int32(numbers: Iterable[int]) -> torch.Tensor:
    return torch.tensor(list(numbers), dtype=torch.int32, device="cuda")


def _tables() -> torch.Tensor:
    """Blocks of each sequence, in order: those of the last sequence come first in the cache."""
    most, tables, start = -(-max(LENGTHS) // PAGE), [], 0
    for length in reversed(LENGTHS):
        count = -(-length // PAGE)
        tables.append([*range(start, start + count), *[0] * (most - count)])
        start += count
    return torch.tensor(tables[::-1], dtype=torch.int32, device="cuda")


def _paged(x: torch.Tensor, begins: list[int]) -> torch.Tensor:
    """[T, groups, size] -> [blocks, PAGE, groups, size]."""
    pages = []
    for start, length in reversed(list(zip(begins, LENGTHS, strict=False))):
        padded = torch.zeros(-(-length // PAGE) * PAGE, *x.shape[1:], dtype=x.dtype, device=x.device)
        padded[:length] = x[start : start + length]
        pages.append(padded.view(-1, PAGE, *x.shape[1:]))
    return torch.cat(pages)
