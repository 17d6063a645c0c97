"""Makes a load plan: runs a model's own `load_weights` on meta tensors and records its copies.

Nothing is changed by that. A layer is planned when every element of each of its parameters is written exactly once and vLLM
leaves its weights as they were loaded; the others fall back to vLLM's loader, with a reason. Of a layer's experts
only every 16th is loaded; if their offsets are linear in the expert's number, the others' are computed, else all are loaded.
Leaves out which layers vLLM transforms (vllm/weights/reload.py) and the use of a plan (unpack.py).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bridge.layout.manifest import Manifest, TensorSpec
from bridge.layout.plan import LoadPlan
from bridge.layout.regions import NOWHERE, Copy, Region, matching_regions, moved

COPY = torch.ops.aten.copy_.default
EXPERT = re.compile(r"(.*\.experts\.)(\d+)(\..*)")
EXPERT_STRIDE = 16  # experts 0, 16, 32, ... of a layer are loaded, and the second and the last one
CONSTANTS = (torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default)
Loader = Callable[[Iterable[tuple[str, torch.Tensor]]], Any]
Recorded = tuple[list[Copy], str | None]


class UnplannableError(RuntimeError):
    """A loader does more than copy."""


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records copies from meta tensors into real ones, and lets nothing change a real one."""

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
    derived: Callable[[torch.nn.Module], bool] = lambda _: False,
) -> LoadPlan:
    """Record where `load` puts the tensors of `manifest`. Changes nothing.

    `load` is the model's own loader; `transformed` says why a layer's weights are not as they were loaded, if so;
    `derived` whether a layer's own parameters are made of other layers', which nothing is loaded into.
    """
    layers = {name: layer for name, layer in model.named_modules() if _own_parameters(layer) and not derived(layer)}
    owners = _Owners(layers)
    try:
        recorded = _record_sampled(manifest.tensors, load, owners)
    except Exception:  # noqa: BLE001 # a loader may raise anything; find the tensors where it does
        recorded = [_record_one(spec, load, owners) for spec in manifest.tensors]
    fallback = {name: reason for name, layer in layers.items() if (reason := transformed(layer)) is not None}
    for parts, reason in recorded:
        for copy in parts if reason is not None else ():
            fallback.setdefault(owners.layer_of(copy.buffer), reason or "")
    fallback = _uncovered(layers, owners, recorded) | fallback
    for name in layers:
        if name not in fallback and (parent := next((o for o in fallback if name.startswith(f"{o}.")), None)):
            fallback[name] = f"it is part of {parent}"
    copies = [_planned(parts, reason, owners, fallback) for parts, reason in recorded]
    used = {copy.buffer for planned in copies if planned for copy in planned}
    parameters = {name: owners.parameters[name] for name in used}
    return LoadPlan(manifest, parameters, copies, fallback, [layer for name, layer in layers.items() if name in fallback])


def _planned(parts: list[Copy], reason: str | None, owners: _Owners, fallback: dict[str, str]) -> tuple[Copy, ...] | None:
    """The copies recorded of a tensor, if all of them go to planned layers."""
    if not parts or reason is not None or any(owners.layer_of(copy.buffer) in fallback for copy in parts):
        return None
    return tuple(parts)


def _uncovered(layers: dict[str, torch.nn.Module], owners: _Owners, recorded: list[Recorded]) -> dict[str, str]:
    """Layers with a parameter whose elements are not all written exactly once."""
    written: dict[str, list[Region]] = {}
    for parts, _ in recorded:
        for copy in parts:
            written.setdefault(copy.buffer, []).append(copy.buffer_region)
    for (constant, offset), size in owners.constants.items():
        written.setdefault(constant, []).append(Region(offset, 1, size, max(1, size)))
    reasons: dict[str, str] = {}
    for name, layer in layers.items():
        for key, parameter in _own_parameters(layer).items():
            full_name = f"{name}.{key}".removeprefix(".")
            if owners.name_of(parameter) != full_name:
                continue  # another layer's, or empty
            is_once, elements = covered_once(written.get(full_name, []), parameter.numel())
            if not is_once or elements != parameter.numel():
                more = "" if is_once else ", some more than once"
                reasons[name] = f"{elements} of the {parameter.numel()} elements of its {key} are written{more}"
    return reasons


def _own_parameters(layer: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter for name, parameter in layer._parameters.items() if parameter is not None}


class _Owners:
    """Maps memory to parameters. A shared parameter belongs to the first layer that has it."""

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


def _record_sampled(specs: Sequence[TensorSpec], load: Loader, owners: _Owners) -> list[Recorded]:
    """Like `_record`, but loads only some of a layer's experts and computes the copies of the others, where that is possible."""
    found: dict[tuple[object, ...], dict[int, int]] = {}  # index by expert, of tensors that differ in the expert alone
    for index, spec in enumerate(specs):
        if match := EXPERT.fullmatch(spec.name):
            found.setdefault((match[1], match[3], spec.dtype, spec.shape), {})[int(match[2])] = index
    stacks = [indices for indices in found.values() if indices.keys() == set(range(len(indices)))]
    skipped = {i for indices in stacks for n, i in indices.items() if n % EXPERT_STRIDE and 1 < n < len(indices) - 1}
    loaded = [index for index in range(len(specs)) if index not in skipped]
    recorded = dict(zip(loaded, _record([specs[index] for index in loaded], load, owners), strict=True))
    for indices in stacks:
        recorded |= _interpolated(indices, recorded)
    if rest := sorted(skipped - recorded.keys()):
        recorded |= zip(rest, _record([specs[index] for index in rest], load, owners), strict=True)
    return [recorded[index] for index in range(len(specs))]


def _interpolated(indices: dict[int, int], recorded: dict[int, Recorded]) -> dict[int, Recorded]:
    """Copies of all experts of a stack by index, if the recorded ones' offsets are linear in the expert's number; else {}."""
    (first, _), (second, _) = (recorded[indices.get(number, indices[0])] for number in (0, 1))
    steps = [new.buffer_region.offset - old.buffer_region.offset for old, new in zip(first, second, strict=False)]
    placed = list(zip(first, steps, strict=False))
    found: dict[int, Recorded]
    found = {index: ([moved(copy, number * step) for copy, step in placed], None) for number, index in indices.items()}
    return found if first and all(recorded.get(index, each) == each for index, each in found.items()) else {}


def _record_one(spec: TensorSpec, load: Loader, owners: _Owners) -> Recorded:
    try:
        return _record((spec,), load, owners)[0]
    except Exception as error:  # noqa: BLE001 # this one gets real tensors instead
        return [], f"its loader wants real tensors: {type(error).__name__}"


def _record(specs: Sequence[TensorSpec], load: Loader, owners: _Owners) -> list[Recorded]:
    """For each tensor the copies that its loading makes, and the reason if they do not cover all of it."""
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
        is_viewed = source.dtype != tensors[index].dtype or (name is not None and target.dtype != owners.parameters[name].dtype)
        is_quantised = source.dtype != target.dtype and 1 in (source.itemsize, target.itemsize)  # other copies may convert
        if name is None or regions is None or is_viewed or is_quantised:
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
