"""fp8.quantise of many weights by one Triton kernel, a program for each row. Imported on CUDA alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from bridge.layout.quantised import MOST, SMALLEST
from bridge.layout.upload import upload

BLOCK = 2048  # elements of a row at a time
ELEMENTS = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
FIELDS = 5  # of a weight in the table: address, rows, columns, where its values and its scales start


@triton.jit  # type: ignore[untyped-decorator]
def _quantise_row(  # type: ignore[no-untyped-def]
    table, values, scales,
    ELEMENT: tl.constexpr, FIELDS: tl.constexpr, MOST: tl.constexpr, SMALLEST: tl.constexpr, BLOCK: tl.constexpr,  # noqa: N803
):  # fmt: skip
    entry = table + FIELDS * tl.program_id(1)
    row, num_columns = tl.program_id(0).to(tl.int64), tl.load(entry + 2)
    if row < tl.load(entry + 1):
        source = tl.load(entry).to(tl.pointer_type(ELEMENT)) + row * num_columns
        target = values + tl.load(entry + 3) + row * num_columns
        column = tl.arange(0, BLOCK)
        largest = tl.zeros([BLOCK], dtype=tl.float32)
        for start in range(0, num_columns, BLOCK):
            numbers = tl.load(source + start + column, mask=start + column < num_columns, other=0.0).to(tl.float32)
            largest = tl.maximum(largest, tl.abs(numbers))
        scale = tl.maximum(tl.max(largest, 0) * (1 / MOST), SMALLEST)
        tl.store(scales + tl.load(entry + 4) + row, scale)
        for start in range(0, num_columns, BLOCK):
            inside = start + column < num_columns
            numbers = tl.load(source + start + column, mask=inside, other=0.0).to(tl.float32)
            tl.store(target + start + column, tl.div_rn(numbers, scale).to(tl.float8e4nv), mask=inside)


def make_table(weights: Sequence[tuple[int, int, int, int, int]], device: torch.device) -> torch.Tensor:
    """`weights`: for each its address, rows, columns, and where its values and its scales start. int64 on the device."""
    return upload(torch.tensor(weights, dtype=torch.int64).view(-1, FIELDS), device)


def quantise_all(table: torch.Tensor, num_rows: int, dtype: torch.dtype, values: torch.Tensor, scales: torch.Tensor) -> None:
    """Quantise the weights of `make_table`. They have the same `dtype`; `num_rows`: the largest number of rows of a weight."""
    with torch.cuda.device_of(values):  # type: ignore[no-untyped-call]
        _quantise_row[(num_rows, len(table))](
            table, values, scales, ELEMENT=ELEMENTS[dtype], FIELDS=FIELDS, MOST=MOST, SMALLEST=SMALLEST, BLOCK=BLOCK
        )
