"""The baked plan: where each piece of a sync's tensors belongs in a vLLM worker's parameters, known before it arrives.

At the first sync the model's own `load_weights` runs once over tensors without memory (device "meta"), one name at a time;
what it would copy where is recorded and nothing is changed. From then on buckets are scattered with torch._foreach_copy_
straight into the parameters: no Python loaders, no layer-wise reload. A layer is planned when every element of each of its
parameters is written exactly once and vLLM leaves its weights as they were loaded; all others take the ordinary way
through vLLM's loader, with a reason. Leaves out which layers vLLM transforms (vllm_api.py) and buckets' way (transport/).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bridge.bucket import Bucket
from bridge.manifest import ITEM_BYTES, Manifest, TensorSpec

COPY = torch.ops.aten.copy_.default
CONSTANTS = (torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default)


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


Loader = Callable[[Iterable[tuple[str, torch.Tensor]]], Any]
Recorded = tuple[list[Copy], str | None]


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


class UnplannableError(RuntimeError):
    """A loader does more than to copy."""


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes copies from a tensor without memory into a real one, and lets nothing change a real one."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.constants: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is COPY and args[0].device.type != "meta":
            self.copies.append((args[0], args[1]))
            return args[0]
        if func in CONSTANTS and args[0].device.type != "meta":
            self.constants.append(args[0])
            return args[0]
        if func._schema.is_mutable and any(isinstance(a, torch.Tensor) and a.device.type != "meta" for a in args):
            raise UnplannableError(f"its loader calls {func}")
        return func(*args, **(kwargs or {}))


def bake(
    manifest: Manifest,
    model: torch.nn.Module,
    load: Loader,
    transformed: Callable[[torch.nn.Module], str | None],
) -> Plan:
    """Record where `load` puts the tensors of `manifest`. Changes nothing.

    `load` is the model's own loader; `transformed` says why a layer's weights are not as they were loaded, if so.
    """
    layers = {name: layer for name, layer in model.named_modules() if _own_parameters(layer)}
    owners = _Owners(layers)
    try:
        recorded = _record(manifest.tensors, load, owners)
    except Exception:  # noqa: BLE001 # whatever a loader does not like; now find out at which tensors
        recorded = [_record_one(spec, load, owners) for spec in manifest.tensors]
    ordinary = {name: reason for name, layer in layers.items() if (reason := transformed(layer)) is not None}
    for parts, reason in recorded:
        for copy in parts if reason is not None else ():
            ordinary.setdefault(owners.layer_of(copy.parameter), reason or "")
    ordinary = _uncovered(layers, owners, recorded) | ordinary
    for name in layers:
        if name not in ordinary and (parent := next((o for o in ordinary if name.startswith(f"{o}.")), None)):
            ordinary[name] = f"it is part of {parent}"
    copies = [_planned(parts, reason, owners, ordinary) for parts, reason in recorded]
    used = {copy.parameter for planned in copies if planned for copy in planned}
    parameters = {name: owners.parameters[name] for name in used}
    return Plan(manifest, parameters, copies, ordinary, [layer for name, layer in layers.items() if name in ordinary])


def _planned(
    parts: list[Copy], reason: str | None, owners: _Owners, ordinary: dict[str, str]
) -> tuple[Copy, ...] | None:
    """What is recorded of a tensor, if all of it goes to planned layers."""
    if not parts or reason is not None or any(owners.layer_of(copy.parameter) in ordinary for copy in parts):
        return None
    return tuple(parts)


def _uncovered(layers: dict[str, torch.nn.Module], owners: _Owners, recorded: list[Recorded]) -> dict[str, str]:
    """Layers with a parameter of which not every element is written exactly once."""
    written: dict[str, list[Region]] = {}
    for parts, _ in recorded:
        for copy in parts:
            written.setdefault(copy.parameter, []).append(copy.target)
    for (constant, offset), size in owners.constants.items():
        written.setdefault(constant, []).append(Region(offset, 1, size, max(1, size)))
    reasons: dict[str, str] = {}
    for name, layer in layers.items():
        for key, parameter in _own_parameters(layer).items():
            full_name = f"{name}.{key}".removeprefix(".")
            if owners.name_of(parameter) != full_name:
                continue  # another layer's, or without memory
            is_once, elements = covered_once(written.get(full_name, []), parameter.numel())
            if not is_once or elements != parameter.numel():
                more = "" if is_once else ", some more than once"
                reasons[name] = f"{elements} of the {parameter.numel()} elements of its {key} are written{more}"
    return reasons


def _own_parameters(layer: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter for name, parameter in layer._parameters.items() if parameter is not None}


class _Owners:
    """Which parameter a piece of memory belongs to. A shared parameter belongs to the first layer that has it."""

    def __init__(self, layers: dict[str, torch.nn.Module]) -> None:
        self.parameters: dict[str, torch.Tensor] = {}
        self.constants: dict[tuple[str, int], int] = {}  # (parameter, offset) -> elements that are set to a constant
        self._names: dict[int, str] = {}
        self._layers: dict[str, str] = {}
        for name, layer in layers.items():
            for key, parameter in _own_parameters(layer).items():
                full_name = f"{name}.{key}".removeprefix(".")
                address = parameter.untyped_storage().data_ptr()
                if parameter.numel() and address not in self._names:
                    self._names[address] = full_name
                    self.parameters[full_name] = parameter
                    self._layers[full_name] = name

    def name_of(self, memory: torch.Tensor) -> str | None:
        return self._names.get(memory.untyped_storage().data_ptr())

    def layer_of(self, parameter: str) -> str:
        return self._layers[parameter]


def _record_one(spec: TensorSpec, load: Loader, owners: _Owners) -> Recorded:
    try:
        return _record((spec,), load, owners)[0]
    except Exception as error:  # noqa: BLE001 # this one gets real tensors instead
        return [], f"its loader wants real tensors: {type(error).__name__}"


def _record(specs: tuple[TensorSpec, ...], load: Loader, owners: _Owners) -> list[Recorded]:
    """For each tensor the copies that its loading makes, and why they are not the whole of it, if so."""
    tensors = [torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device="meta") for spec in specs]
    index_of = {tensor.untyped_storage()._cdata: index for index, tensor in enumerate(tensors)}
    recorder = _Recorder()
    with recorder, torch.no_grad():
        load(zip((spec.name for spec in specs), tensors, strict=True))
    results: list[Recorded] = [([], None) for _ in specs]
    for target, source in recorder.copies:
        name, index = owners.name_of(target), index_of.get(source.untyped_storage()._cdata)
        regions = matching_regions(source, target)
        if index is None:
            raise UnplannableError("a loader computes with tensors")
        parts, reason = results[index]
        if name is None or regions is None or not source.dtype == target.dtype == tensors[index].dtype:
            reason = reason or f"its loader puts {specs[index].name} into other memory, dtype or order"
        if name is not None:
            source_region, target_region = regions or (NOWHERE, NOWHERE)
            parts.append(Copy(source_region, name, target_region))
        results[index] = parts, reason
    for target in recorder.constants:
        name = owners.name_of(target)
        if name is not None and target.is_contiguous():
            owners.constants[name, int(target.storage_offset())] = target.numel()
    return results


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
    if not dims:
        dims = [[source.numel(), 1, 1]]
    if len(dims) > 2 or dims[-1][1:] != [1, 1]:
        return None
    rows, columns = (dims[0], dims[1]) if len(dims) == 2 else ([1, dims[0][0], dims[0][0]], dims[0])
    return (
        Region(int(source.storage_offset()), rows[0], columns[0], max(1, rows[1])),
        Region(int(target.storage_offset()), rows[0], columns[0], max(1, rows[2])),
    )


def covered_once(regions: list[Region], num_elements: int) -> tuple[bool, int]:
    """Whether no element lies in two of the regions, and in how many elements they lie, of [0, num_elements).

    Regions of rows that interleave, as those of a fused linear do not, are counted row by row.
    """
    spans = [(r.offset, r.offset + r.num_columns) for r in regions if r.num_rows == 1]
    for region in regions:
        if region.num_rows > 1 and region.row_stride == region.num_columns:
            spans.append((region.offset, region.offset + region.num_rows * region.num_columns))
        elif region.num_rows > 1:
            starts = range(region.offset, region.offset + region.num_rows * region.row_stride, region.row_stride)
            spans += [(start, start + region.num_columns) for start in starts]
    spans = sorted(span for span in spans if span[1] > span[0])
    overlap = any(later[0] < earlier[1] for earlier, later in itertools.pairwise(spans))
    inside = sum(min(end, num_elements) - start for start, end in spans if start < num_elements)
    return not overlap, inside
