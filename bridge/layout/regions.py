"""Strided regions of flat memory, and copies between two of the same shape. Pure functions.

Leaves out how copies are found (bake.py, trace.py) and run (copies.py).
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Region(NamedTuple):
    """`num_rows` runs of `num_columns` elements that follow each other in memory, `row_stride` apart, from `offset` on."""

    offset: int
    num_rows: int
    num_columns: int
    row_stride: int


NOWHERE = Region(0, 0, 0, 1)


class Copy(NamedTuple):
    """A region of a tensor and the region of a buffer with the same shape and values; either side may be the source.

    The tensor is in Hugging Face coordinates, its elements counted row-major. `buffer` names flat memory: a parameter's, or
    the scratch of a gather.
    """

    tensor_region: Region
    buffer: str
    buffer_region: Region


def contiguous(num_elements: int, offset: int = 0) -> Region:
    """Contiguous elements."""
    return Region(offset, 1, num_elements, num_elements)


def moved_region(region: Region, distance: int) -> Region:
    """The region `distance` elements further."""
    return Region(region.offset + distance, region.num_rows, region.num_columns, region.row_stride)


def moved(copy: Copy, distance: int) -> Copy:
    """The copy from, or to, elements that lie `distance` further in the buffer."""
    return Copy(copy.tensor_region, copy.buffer, moved_region(copy.buffer_region, distance))


def slice_copy(copy: Copy, start: int, end: int) -> list[tuple[Region, Region]]:
    """The pairs of regions of a copy whose tensor elements lie in [start, end), those of the tensor counted from `start`.

    At most three: the end of a row, whole rows, the beginning of a row. Each element of the copy that lies inside is in one.
    """
    source, target = copy.tensor_region, copy.buffer_region
    if source.num_rows == 0 or source.num_columns == 0:
        return []
    if start <= source.offset and source.offset + (source.num_rows - 1) * source.row_stride + source.num_columns <= end:
        return [(moved_region(source, -start), target)]  # the usual case
    # rows with elements inside: from the first that ends after `start` to the last that begins before `end`
    begin = max(0, -(-(start - source.offset - source.num_columns + 1) // source.row_stride))
    stop = min(source.num_rows, max(0, -(-(end - source.offset) // source.row_stride)))
    parts: list[tuple[Region, Region]] = []
    row = begin
    while row < stop:
        first = source.offset + row * source.row_stride
        low, high = max(start - first, 0), min(end - first, source.num_columns)
        is_whole = (low, high) == (0, source.num_columns)
        # after a whole row all are whole, except perhaps the last
        last_end = source.offset + (stop - 1) * source.row_stride + source.num_columns
        count = stop - row - (last_end > end) if is_whole and stop - row > 1 else 1
        parts.append(
            (
                Region(first + low - start, count, high - low, source.row_stride),
                Region(target.offset + row * target.row_stride + low, count, high - low, target.row_stride),
            )
        )
        row += count
    return parts


def matching_regions(source: torch.Tensor, target: torch.Tensor) -> tuple[Region, Region] | None:
    """Two tensors of one shape as regions of their memory; None where that takes more than two dims."""
    if source.shape != target.shape:
        return None
    dims: list[list[int]] = []  # size, stride in the source, stride in the target; merged where both are dense
    for size, of, to in zip(source.shape, source.stride(), target.stride(), strict=True):
        if size == 1:
            continue
        if dims and dims[-1][1] == size * of and dims[-1][2] == size * to:
            dims[-1] = [dims[-1][0] * size, of, to]
        else:
            dims.append([size, of, to])
    if not dims or dims[-1][1:] != [1, 1]:  # rows of one element
        dims.append([source.numel() if not dims else 1, 1, 1])
    if len(dims) > 2:
        return None
    rows, columns = (dims[0], dims[1]) if len(dims) == 2 else ([1, dims[0][0], dims[0][0]], dims[0])
    return (
        Region(int(source.storage_offset()), rows[0], columns[0], max(1, rows[1])),
        Region(int(target.storage_offset()), rows[0], columns[0], max(1, rows[2])),
    )
