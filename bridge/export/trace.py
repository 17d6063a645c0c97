"""The copies that a conversion amounts to, found by running it once on meta tensors.

For conversions made of views, torch.cat and clones, as mbridge's are. Leaves out whose conversions these are (exporter.py) and
the copying (copies.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bridge.layout.regions import Copy, matching_regions, moved_region, slice_copy

CAT, CLONE = torch.ops.aten.cat.default, torch.ops.aten.clone.default
Place = tuple[str, int]  # which memory, and from which element on


def trace(
    convert: Callable[[list[torch.Tensor]], Sequence[torch.Tensor]],
    shape: torch.Size,
    dtype: torch.dtype,
    places: Sequence[Place],
) -> list[tuple[Copy, ...]] | None:
    """For each result of `convert` on contiguous tensors of `shape` at `places` the copies that make it up.

    Copy.tensor_region is a region of the result, Copy.buffer the memory of a place. None where a result is computed.
    """
    given = [torch.empty(shape, dtype=dtype, device="meta") for _ in places]
    tracer = _Tracer({tensor.untyped_storage()._cdata: place for tensor, place in zip(given, places, strict=True)})
    with tracer:
        results = convert(given)
    copies = [tracer.origins(result) if result.dtype == dtype else None for result in results]
    found = [tuple(copy) for copy in copies if copy is not None]
    return found if len(found) == len(copies) else None


class _Tracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records of each new tensor which of its parts are copies of which tensors."""

    def __init__(self, given: dict[int, Place]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._given = given
        self._made: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}  # by memory: (its part, the source of the copy)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is CLONE:
            self._made[result.untyped_storage()._cdata] = [(result, args[0])]
        elif func is CAT:
            dim, begin, parts = args[1] if len(args) > 1 else 0, 0, []
            for source in args[0]:
                parts.append((result.narrow(dim, begin, source.shape[dim]), source))
                begin += source.shape[dim]
            self._made[result.untyped_storage()._cdata] = parts
        return result

    def origins(self, tensor: torch.Tensor) -> list[Copy] | None:
        """The copies out of the given memory that make the tensor up; None where it is computed."""
        regions = matching_regions(torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"), tensor)
        if regions is None:
            return None
        memory = tensor.untyped_storage()._cdata
        if memory in self._given:
            name, start = self._given[memory]
            return [Copy(regions[0], name, moved_region(regions[1], start))]
        if memory not in self._made:
            return None
        parts: list[Copy] = []
        for part, source in self._made[memory]:
            inner, within = self.origins(source), matching_regions(part, torch.empty(source.shape, device="meta"))
            if inner is None or within is None:
                return None
            parts += _compose(Copy(within[0], "", within[1]), inner)
        return _compose(Copy(regions[0], "", regions[1]), parts)


def _compose(outer: Copy, inner: list[Copy]) -> list[Copy]:
    """The outer copy's tensor region, read through the inner copies: they say what lies in its buffer region."""
    of, through = outer.tensor_region, outer.buffer_region
    for copy in inner:  # the usual case, and the only one with many rows: all of it is in one run
        end, run = through.offset + (through.num_rows - 1) * through.row_stride + through.num_columns, copy.tensor_region
        if run.num_rows == 1 and run.offset <= through.offset and end <= run.offset + run.num_columns:
            return [Copy(of, copy.buffer, moved_region(through, copy.buffer_region.offset - copy.tensor_region.offset))]
    composed: list[Copy] = []
    for row in range(of.num_rows):
        begin = through.offset + row * through.row_stride
        for copy in inner:
            for source, target in slice_copy(copy, begin, begin + through.num_columns):
                composed.append(Copy(moved_region(source, of.offset + row * of.row_stride), copy.buffer, target))
    return _joined(composed)


def _joined(copies: list[Copy]) -> list[Copy]:
    """Single rows that follow each other at the same distances become rows of one copy."""
    joined: list[Copy] = []
    for copy in copies:
        last = joined[-1] if joined else None
        if last is not None and copy.tensor_region.num_rows == 1 and copy.buffer == last.buffer and _fits(last, copy):
            rows = last.tensor_region.num_rows + 1
            strides = [
                (new.offset - old.offset) // last.tensor_region.num_rows
                for old, new in ((last.tensor_region, copy.tensor_region), (last.buffer_region, copy.buffer_region))
            ]
            joined[-1] = Copy(
                last.tensor_region._replace(num_rows=rows, row_stride=strides[0]),
                last.buffer,
                last.buffer_region._replace(num_rows=rows, row_stride=strides[1]),
            )
        else:
            joined.append(copy)
    return joined


def _fits(last: Copy, copy: Copy) -> bool:
    """Whether the copy's one row is the next of the last one's."""
    if copy.tensor_region.num_columns != last.tensor_region.num_columns:
        return False
    rows = last.tensor_region.num_rows
    sides = ((last.tensor_region, copy.tensor_region), (last.buffer_region, copy.buffer_region))
    if rows == 1:
        return all(new.offset > old.offset for old, new in sides)
    return all(new.offset == old.offset + rows * old.row_stride for old, new in sides)
