"""The bridge's input and output: typed weight items from the engine, and parts of flat memory with copies out of them.

Leaves out how items become parts: exporter.py, adapter.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import torch

from bridge.layout.copies import view
from bridge.layout.manifest import Manifest, TensorSpec
from bridge.layout.regions import Copy


class Factors(Protocol):
    """A and B of a low-rank update B @ A."""

    @property
    def a(self) -> torch.Tensor: ...

    @property
    def b(self) -> torch.Tensor: ...


class Adapter(Factors, Protocol):
    """A low-rank update of a weight: W + scale * B @ A, of the shards that this tensor-parallel rank has."""

    @property
    def scale(self) -> float: ...


class WeightItem(Protocol):
    """A parameter as the engine hands it out, whole over data parallelism and local to the tensor-parallel rank.

    `shard_dim`: the dimension that tensor parallelism shards, None where it is replicated. `experts`: empty, or of experts, which
    lie one after another in `tensor`, [experts * rows, columns], and in the adapter's factors, for each the names of what each
    expert-parallel rank has in its place, the same on all of them. `is_stack`: those of all ranks are one tensor of Hugging
    Face's, not one each; `experts` is empty, or has one entry.
    """

    @property
    def name(self) -> str: ...

    @property
    def tensor(self) -> torch.Tensor: ...

    @property
    def shard_dim(self) -> int | None: ...

    @property
    def adapter(self) -> Adapter | None: ...

    @property
    def experts(self) -> tuple[tuple[str, ...], ...]: ...

    @property
    def is_stack(self) -> bool: ...


class AdapterFactors(Factors, Protocol):
    """The whole adapter of one linear, in PEFT's names and coordinates.

    `name` is the linear's. `a`: [rank, in]. `b`: [*, rank]; flattening * gives its rows. `shares_a`: with the linear before it.
    """

    @property
    def name(self) -> str: ...

    @property
    def shares_a(self) -> bool: ...


class WeightSource(Protocol):
    """The weights of one pipeline stage in Hugging Face names and shapes, as one trainer rank sees them.

    One rank a stage is its sender. `has_tensors`: whether this rank's parts hold the tensors; always true on the sender.
    """

    stage: int
    num_stages: int
    is_sender: bool
    has_tensors: bool

    def manifest(self) -> Manifest:
        """This stage's tensors in order. Collective over the stage's ranks at the first call."""

    def parts(self) -> Iterator[Part]:
        """One pass over all tensors, in the manifest's order; none on ranks without tensors.

        May run collectives: all ranks of a stage iterate in lockstep and to the end.
        """


class Part(NamedTuple):
    """Some of a source's tensors, in order: for each the copies out of `memory` that make it up.

    Valid until the next part is requested. Every pass has the same parts, with equal `copies` and the same names in `memory`,
    whose flat tensors may lie elsewhere in each pass.
    """

    copies: Sequence[tuple[Copy, ...]]
    memory: dict[str, torch.Tensor]

    def tensor(self, index: int, spec: TensorSpec) -> torch.Tensor:
        """The part's tensor of this index: a view where its elements lie together, else a new one."""
        copies = self.copies[index]
        if len(copies) == 1 and copies[0].buffer_region.num_rows == 1:
            return view(self.memory[copies[0].buffer], copies[0].buffer_region).view(spec.shape)
        first = self.memory[copies[0].buffer]
        tensor = first.new_empty(spec.shape)
        for copy in copies:
            view(tensor.view(-1), copy.tensor_region).copy_(view(self.memory[copy.buffer], copy.buffer_region))
        return tensor


@torch.no_grad()
def whole_tensors(source: WeightSource) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of all tensors, one pass; a tensor is valid until the next is requested. Collective as `parts` is."""
    specs = iter(source.manifest().tensors)
    for part in source.parts():
        for index in range(len(part.copies)):
            spec = next(specs)
            yield spec.name, part.tensor(index, spec)
