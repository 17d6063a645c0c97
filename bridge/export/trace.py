"""Where the elements of a conversion's results come from, found by running it once over tensors without memory.

For conversions that only take views of what they are given, concatenate it and put it in order, as mbridge's do. Leaves out
whose conversions these are (export.py) and what is copied by what is found (copies.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bridge.layout.regions import Copy, Region, cut, matching_regions

CAT, CLONE = torch.ops.aten.cat.default, torch.ops.aten.clone.default
Place = tuple[str, int]  # which memory, and from which element on


def trace(
    convert: Callable[[list[torch.Tensor]], Sequence[torch.Tensor]],
    shape: torch.Size,
    dtype: torch.dtype,
    places: Sequence[Place],
) -> list[tuple[Copy, ...]] | None:
    """What `convert` makes of contiguous tensors of `shape` at `places`: for each result the parts of memory that it is.

    Copy.source is a part of the result, Copy.target the part of the memory Copy.parameter. None where a result is computed.
    """
    given = [torch.empty(shape, dtype=dtype, device="meta") for _ in places]
    tracer = _Tracer({tensor.untyped_storage()._cdata: place for tensor, place in zip(given, places, strict=True)})
    with tracer:
        results = convert(given)
    copies = [tracer.origins(result) if result.dtype == dtype else None for result in results]
    found = [tuple(copy) for copy in copies if copy is not None]
    return found if len(found) == len(copies) else None


class _Tracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes of each new tensor which of its parts are copies of which tensors."""

    def __init__(self, given: dict[int, Place]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._given = given
        self._made: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}  # by memory: (its part, what it is a copy of)

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
        """Parts of the tensor, its elements counted in order, and of the memory that was given; None where it is computed."""
        regions = matching_regions(torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"), tensor)
        if regions is None:
            return None
        memory = tensor.untyped_storage()._cdata
        if memory in self._given:
            name, start = self._given[memory]
            return [Copy(regions[0], name, _moved(regions[1], start))]
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
    """From the outer copy's source through its target, which is where the inner ones' sources lie, to their targets."""
    of, through = outer.source, outer.target
    for copy in inner:  # the usual case, and the only one with many rows: all of it is in one run
        end, run = through.offset + (through.num_rows - 1) * through.row_stride + through.num_columns, copy.source
        if run.num_rows == 1 and run.offset <= through.offset and end <= run.offset + run.num_columns:
            return [Copy(of, copy.parameter, _moved(through, copy.target.offset - copy.source.offset))]
    composed: list[Copy] = []
    for row in range(of.num_rows):
        begin = through.offset + row * through.row_stride
        for copy in inner:
            for source, target in cut(copy, begin, begin + through.num_columns):
                composed.append(Copy(_moved(source, of.offset + row * of.row_stride), copy.parameter, target))
    return _joined(composed)


def _joined(copies: list[Copy]) -> list[Copy]:
    """Single rows that follow each other at the same distances become rows of one copy."""
    joined: list[Copy] = []
    for copy in copies:
        last = joined[-1] if joined else None
        if last is not None and copy.source.num_rows == 1 and copy.parameter == last.parameter and _fits(last, copy):
            rows = last.source.num_rows + 1
            strides = [
                (new.offset - old.offset) // last.source.num_rows
                for old, new in ((last.source, copy.source), (last.target, copy.target))
            ]
            joined[-1] = Copy(
                last.source._replace(num_rows=rows, row_stride=strides[0]),
                last.parameter,
                last.target._replace(num_rows=rows, row_stride=strides[1]),
            )
        else:
            joined.append(copy)
    return joined


def _fits(last: Copy, copy: Copy) -> bool:
    """Whether the copy's one row is the next of the last one's."""
    if copy.source.num_columns != last.source.num_columns:
        return False
    rows, sides = last.source.num_rows, ((last.source, copy.source), (last.target, copy.target))
    if rows == 1:
        return all(new.offset > old.offset for old, new in sides)
    return all(new.offset == old.offset + rows * old.row_stride for old, new in sides)


def _moved(region: Region, offset: int) -> Region:
    return region._replace(offset=region.offset + offset)
