"""The baked plan: where each piece of a sync's tensors belongs in a vLLM worker's parameters, known before it arrives.

Buckets are scattered with torch._foreach_copy_ straight into the parameters: no Python loaders, no layer-wise reload. Leaves
out how a plan is made (bake.py) and buckets' way (transport/).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from bridge.bucket import Bucket
from bridge.manifest import ITEM_BYTES, Manifest


class Region(NamedTuple):
    """`num_rows` runs of `num_columns` elements that follow each other in memory, `row_stride` apart, from `offset` on."""

    offset: int
    num_rows: int
    num_columns: int
    row_stride: int


NOWHERE = Region(0, 0, 0, 1)


class Copy(NamedTuple):
    """A part of a tensor, and the part of a parameter that it becomes; of as many rows and columns."""

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
    _addresses: dict[str, int] = field(init=False)
    _bound: dict[tuple[int, int, int], list[tuple[list[torch.Tensor], list[torch.Tensor]]]] = field(init=False)

    def __post_init__(self) -> None:
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

    def _bind(
        self, bucket: Bucket, first_tensor: int, data: torch.Tensor
    ) -> list[tuple[list[torch.Tensor], list[torch.Tensor]]]:
        """Pairs of views, in groups that foreach copies in one kernel: of one dtype and without gaps, or else the rest."""
        groups: dict[tuple[torch.dtype, bool], tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        for piece in bucket.pieces:
            copies = self.copies[first_tensor + piece.tensor]
            if not copies or piece.num_bytes == 0:
                continue
            spec = self.manifest.tensors[first_tensor + piece.tensor]
            size = ITEM_BYTES[spec.dtype]
            values = data[piece.bucket_offset : piece.bucket_offset + piece.num_bytes].view(getattr(torch, spec.dtype))
            start = piece.tensor_offset // size
            for copy in copies:
                parameter = self.parameters[copy.parameter]
                flat = parameter.detach().as_strided((parameter.untyped_storage().nbytes() // size,), (1,), 0)
                for source, target in cut(copy, start, start + values.numel()):
                    to, of = _view(flat, target), _view(values, source)
                    is_dense = source.num_rows == 1 and to.dtype == of.dtype
                    group = groups.setdefault((of.dtype, is_dense), ([], []))
                    group[0].append(to)
                    group[1].append(of)
        return list(groups.values())


def _view(flat: torch.Tensor, region: Region) -> torch.Tensor:
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
