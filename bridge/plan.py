"""Baked plans: which part of memory each piece of a bucket is, known before a sync, on either side.

A vLLM worker scatters buckets with torch._foreach_copy_ straight into its parameters: no Python loaders, no layer-wise reload.
The sender packs them in the same way. Leaves out how a plan is made (bake.py, trace.py) and buckets' way (transport/).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from bridge.bucket import Bucket, Piece
from bridge.manifest import Manifest

Views = tuple[list[torch.Tensor], list[torch.Tensor]]  # of memory, and of a bucket


class Region(NamedTuple):
    """`num_rows` runs of `num_columns` elements that follow each other in memory, `row_stride` apart, from `offset` on."""

    offset: int
    num_rows: int
    num_columns: int
    row_stride: int


NOWHERE = Region(0, 0, 0, 1)


class Copy(NamedTuple):
    """A part of a tensor, and the part of a parameter that it becomes, or is taken from; of as many rows and columns."""

    source: Region
    parameter: str
    target: Region


@dataclass
class Plan:
    """What to do with each tensor of a manifest; `copies` has an entry a tensor, None for the ordinary way."""

    manifest: Manifest
    parameters: dict[str, torch.Tensor]  # the planned ones, as the model computes with them
    copies: list[tuple[Copy, ...] | None]
    ordinary: dict[str, str]  # layer -> why it is not planned
    ordinary_layers: list[torch.nn.Module]
    is_whole: bool = field(init=False)  # all tensors are planned
    _addresses: dict[str, int] = field(init=False)
    _bound: dict[tuple[int, int, int], list[Views]] = field(init=False)

    def __post_init__(self) -> None:
        self.is_whole = all(copies is not None for copies in self.copies)
        self._addresses = {name: parameter.data_ptr() for name, parameter in self.parameters.items()}
        self._bound = {}

    @property
    def is_current(self) -> bool:
        """Whether the parameters still lie where they lay."""
        return all(self._addresses[name] == parameter.data_ptr() for name, parameter in self.parameters.items())

    def is_planned(self, tensor: int) -> bool:
        return self.copies[tensor] is not None

    @torch.no_grad()
    def scatter(self, bucket: Bucket, first_tensor: int, data: torch.Tensor) -> None:
        """Copy a bucket's planned pieces into the parameters; `first_tensor` is the stage's, `data` its bytes.

        Views are made when a bucket first comes to lie at an address, and kept.
        """
        key = (first_tensor, bucket.index, data.data_ptr())
        if key not in self._bound:
            self._bound[key] = self._bind(bucket, first_tensor, data)
        for targets, sources in self._bound[key]:
            torch._foreach_copy_(targets, sources)

    def _bind(self, bucket: Bucket, first_tensor: int, data: torch.Tensor) -> list[Views]:
        flats: dict[str, torch.Tensor] = {}
        planned = {piece.tensor: self.copies[first_tensor + piece.tensor] for piece in bucket.pieces}
        for name in {copy.parameter for piece in bucket.pieces for copy in planned[piece.tensor] or ()}:
            parameter = self.parameters[name]
            size = parameter.untyped_storage().nbytes() // parameter.element_size()
            flats[name] = parameter.detach().as_strided((size,), (1,), 0)
        dtypes = [spec.dtype for spec in self.manifest.tensors[first_tensor:]]
        return bind(bucket.pieces, dtypes, planned, flats, data)


def bind(
    pieces: Sequence[Piece],
    dtypes: Sequence[str],
    copies: Mapping[int, Sequence[Copy] | None],
    memory: Mapping[str, torch.Tensor],
    data: torch.Tensor,
) -> list[Views]:
    """Views of memory and of a bucket's bytes `data`, pairs of which are the same elements of a tensor.

    `dtypes` and `copies` have an entry for each tensor that a piece is of, `memory` is flat. In groups that foreach copies
    in one kernel: of one dtype and without gaps, or else the rest.
    """
    groups: dict[tuple[torch.dtype, bool], Views] = {}
    for piece in pieces:
        if not copies[piece.tensor] or piece.num_bytes == 0:
            continue
        dtype: torch.dtype = getattr(torch, dtypes[piece.tensor])
        values = data[piece.bucket_offset : piece.bucket_offset + piece.num_bytes].view(dtype)
        start = piece.tensor_offset // dtype.itemsize
        for copy in copies[piece.tensor] or ():
            flat = memory[copy.parameter]
            for in_tensor, in_memory in cut(copy, start, start + values.numel()):
                is_dense = in_tensor.num_rows == 1 and flat.dtype == dtype
                views = groups.setdefault((dtype, is_dense), ([], []))
                views[0].append(view(flat, in_memory))
                views[1].append(view(values, in_tensor))
    return list(groups.values())


def view(flat: torch.Tensor, region: Region) -> torch.Tensor:
    """The region of flat memory, [num_rows, num_columns], or [num_columns] where it is one row."""
    start = flat.storage_offset() + region.offset
    if region.num_rows == 1:
        return flat.as_strided((region.num_columns,), (1,), start)
    return flat.as_strided((region.num_rows, region.num_columns), (region.row_stride, 1), start)


def cut(copy: Copy, start: int, end: int) -> list[tuple[Region, Region]]:
    """The parts of a copy whose source elements lie in [start, end) of the tensor, sources counted from `start`.

    At most three: the end of a row, whole rows, the beginning of a row. Each element of the copy that lies inside is in one.
    """
    source, target = copy.source, copy.target
    if source.num_rows == 0 or source.num_columns == 0:
        return []
    # rows with elements inside: from the first that ends after `start` up to the last that begins before `end`
    begin = max(0, -(-(start - source.offset - source.num_columns + 1) // source.row_stride))
    stop = min(source.num_rows, max(0, -(-(end - source.offset) // source.row_stride)))
    parts: list[tuple[Region, Region]] = []
    row = begin
    while row < stop:
        first = source.offset + row * source.row_stride
        low, high = max(start - first, 0), min(end - first, source.num_columns)
        is_whole = (low, high) == (0, source.num_columns)
        # all rows from a whole one on are whole, but perhaps the last
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
    """Two equally shaped tensors as equally many rows of elements; None where that takes more than two dims."""
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
