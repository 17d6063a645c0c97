"""Linears of layers in float8_e4m3fn with a scale for each output channel, for `rollout.dtype: fp8`.

A weight W [out, in] becomes Q float8_e4m3fn [out, in] and, right behind it, s float32 [out, 1]: the row's largest |W| divided by
the largest number of the format. Q is W / s, rounded. Embeddings, norms, routers, biases and the head stay as they are. A row
has one scale, so that any tensor parallelism can cut the weight. Leaves out vLLM's side (vllm/weights/fp8.py).

    source = QuantisedSource(exporter)        # to publish instead of the exporter
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from bridge.export.source import Part, WeightSource
from bridge.layout.copies import view
from bridge.layout.manifest import Manifest, TensorSpec
from bridge.layout.quantised import DTYPE, MOST, SMALLEST, is_quantised, quantised_manifest
from bridge.layout.regions import Copy, Region, contiguous

RUN_ELEMENTS = 2**26  # of quantised weights in a part, unless one weight has more
ALIGNMENT = 16  # elements: copies are made of whole words
VALUES, SCALES = "fp8 values", "fp8 scales"  # memory of a part


def quantise(weight: torch.Tensor, values: torch.Tensor, scales: torch.Tensor) -> None:
    """`weight` [out, in] in any float dtype, to `values` float8_e4m3fn [out, in] and `scales` float32 [out, 1]."""
    wide = weight.float()
    scales.copy_((wide.abs().amax(1, keepdim=True) * (1 / MOST)).clamp(min=SMALLEST))
    values.copy_((wide / scales).clamp(-MOST, MOST))


class _Weight(NamedTuple):
    """A quantised tensor of a run: its number in the part, where it lies there in one run of elements, and where its values and
    scales start.
    """

    number: int
    spec: TensorSpec
    whole: Copy | None  # None: it is put together from several, or of another dtype than others
    start: int
    first_scale: int

    @property
    def place(self) -> tuple[int, int, int, int]:
        """(rows, columns, first element, first scale), one row of fp8_kernel.make_table."""
        return self.spec.shape[0], self.spec.shape[1], self.start, self.first_scale


@dataclass
class _Run:
    """Some tensors of a part of the source, quantised together, and the copies that they become."""

    weights: list[_Weight] = field(default_factory=list)
    copies: list[tuple[Copy, ...]] = field(default_factory=list)
    launch: _Launch | None = None


class _Launch(NamedTuple):
    """The weights of a run that one kernel takes (fp8_kernel.py): where their memory lies, and their table and most rows."""

    bases: dict[str, int]
    table: torch.Tensor
    num_rows: int
    dtype: torch.dtype


class QuantisedSource:
    """The WeightSource of another one's tensors, quantised on the rank that sends them.

    Takes memory for RUN_ELEMENTS weights beside the source's.
    """

    def __init__(self, source: WeightSource) -> None:
        self.source = source
        self.stage, self.num_stages = source.stage, source.num_stages
        self.is_sender, self.has_tensors = source.is_sender, source.has_tensors
        self._runs: dict[int, list[_Run]] = {}  # by the first tensor of the source's part
        self._values = torch.empty(0, dtype=getattr(torch, DTYPE))
        self._scales = torch.empty(0)

    def manifest(self) -> Manifest:
        return quantised_manifest(self.source.manifest())

    @torch.no_grad()
    def parts(self) -> Iterator[Part]:
        specs, first = self.source.manifest().tensors, 0
        for part in self.source.parts():
            if first not in self._runs:
                self._runs[first] = list(plan_runs(part, specs[first : first + len(part.copies)]))
            for run in self._runs[first]:
                yield self._quantised(part, run)
            first += len(part.copies)

    def _quantised(self, part: Part, run: _Run) -> Part:
        """Valid until the next one: all share their memory."""
        memory = dict(part.memory)
        if run.weights:
            last = run.weights[-1]
            device, rows = next(iter(part.memory.values())).device, last.first_scale + last.spec.shape[0]
            self._reserve(last.start + math.prod(last.spec.shape), rows, device)
            memory |= {VALUES: self._values, SCALES: self._scales}
        for each in self._without_kernel(part, run):
            rows, columns = each.spec.shape
            values = view(self._values, Region(each.start, rows, columns, columns)).view(rows, columns)
            scales = self._scales[each.first_scale : each.first_scale + rows, None]
            quantise(part.tensor(each.number, each.spec), values, scales)
        return Part(run.copies, memory)

    def _without_kernel(self, part: Part, run: _Run) -> list[_Weight]:
        """Quantises by one kernel, on CUDA, the weights that lie in one run of elements each. Returns the others."""
        whole = [(each, each.whole) for each in run.weights if each.whole is not None] if _has_kernel(self._values.device) else []
        if not whole:
            return run.weights
        from bridge.export.fp8_kernel import make_table, quantise_all

        launch = run.launch
        if launch is None or any(part.memory[name].data_ptr() != base for name, base in launch.bases.items()):
            bases = {copy.buffer: part.memory[copy.buffer].data_ptr() for _, copy in whole}
            dtype = part.memory[whole[0][1].buffer].dtype
            places = [(bases[copy.buffer] + copy.buffer_region.offset * dtype.itemsize, *each.place) for each, copy in whole]
            table = make_table(places, self._values.device)
            launch = run.launch = _Launch(bases, table, max(each.spec.shape[0] for each, _ in whole), dtype)
        quantise_all(launch.table, launch.num_rows, launch.dtype, self._values, self._scales)
        return [each for each in run.weights if each.whole is None]

    def _reserve(self, num_values: int, num_scales: int, device: torch.device) -> None:
        if len(self._values) < num_values or self._values.device != device:
            self._values = torch.empty(num_values, dtype=self._values.dtype, device=device)
        if len(self._scales) < num_scales or self._scales.device != device:
            self._scales = torch.empty(num_scales, device=device)


def plan_runs(part: Part, specs: Sequence[TensorSpec]) -> Iterator[_Run]:
    """The tensors `specs` of a part of the source, in runs of up to RUN_ELEMENTS quantised elements."""
    run, start, first_scale = _Run(), 0, 0
    dtype = next((spec.dtype for spec in specs if is_quantised(spec.name)), "")
    for index, (spec, copies) in enumerate(zip(specs, part.copies, strict=True)):
        if not is_quantised(spec.name):
            run.copies.append(copies)
            continue
        size, rows = math.prod(spec.shape), spec.shape[0]
        if run.weights and start + size > RUN_ELEMENTS:
            yield run
            run, start, first_scale = _Run(), 0, 0
        is_whole = len(copies) == 1 and copies[0].buffer_region.num_rows == 1 and spec.dtype == dtype
        run.weights.append(_Weight(index, spec, copies[0] if is_whole else None, start, first_scale))
        run.copies.append((Copy(contiguous(size), VALUES, contiguous(size, start)),))
        run.copies.append((Copy(contiguous(rows), SCALES, contiguous(rows, first_scale)),))
        start += _aligned(size)
        first_scale += _aligned(rows)
    if run.copies:
        yield run


def _has_kernel(device: torch.device) -> bool:
    """Triton has the format from this compute capability on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
