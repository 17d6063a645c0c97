"""Gathers parameters' values: shards and experts by collectives, adapters merged on the way, the rest read in place.

A GatherPlan is made once for a run of items and run in every pass, in scratch memory that all plans share. Leaves out the passes
and the conversion to Hugging Face's layout (exporter.py), and the merge itself (merge.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from bridge.export.merge import merge
from bridge.export.source import Part, WeightItem
from bridge.export.trace import Place, trace
from bridge.layout.copies import are_same_memory
from bridge.layout.manifest import TensorSpec
from bridge.layout.regions import Copy, contiguous

# (name, tensor) of each Hugging Face tensor that an item's shards, one a rank of its group, become
Convert = Callable[[WeightItem, list[torch.Tensor]], Iterable[tuple[str, torch.Tensor]]]


class GatherGroup(NamedTuple):
    """Ranks over which items are gathered; `group` None: there is nothing to gather."""

    group: Any
    takes_part: bool  # of all groups with the same values only one gathers

    @property
    def size(self) -> int:
        return int(self.group.size()) if self.group is not None else 1


class Groups(NamedTuple):
    """`expert`: for items with `expert_names`; the expert-parallel ranks times the tensor-parallel ones of each."""

    tensor: GatherGroup
    expert: GatherGroup

    def of(self, item: WeightItem) -> GatherGroup:
        return self.expert if item.expert_names else self.tensor

    def num_shards(self, item: WeightItem) -> int:
        return self.of(item).size if item.expert_names or item.shard_dim is not None else 1

    def needs_scratch(self, item: WeightItem) -> bool:
        """Whether the value is written to scratch, to be gathered or merged."""
        return item.adapter is not None or self.num_shards(item) > 1


class Scratch:
    """Memory by name, which all plans share."""

    def __init__(self) -> None:
        self._sizes: dict[str, int] = {}
        self._memory: dict[str, torch.Tensor] = {}

    def reserve(self, name: str, size: int) -> None:
        """Reserve at least `size` elements."""
        self._sizes[name] = max(size, self._sizes.get(name, 0))

    def take(self, name: str, size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """The first `size` elements of the reserved memory."""
        if name not in self._memory:
            self._memory[name] = torch.empty(self._sizes[name], dtype=dtype, device=device)
        return self._memory[name][:size]


class _Group(NamedTuple):
    """Items of one dtype that are gathered together: their indices in the run, and where each starts in a rank's scratch."""

    memory: str  # the name of the buffer that they are gathered into
    gather: GatherGroup
    dtype: torch.dtype
    indices: list[int]
    starts: list[int]  # and the end of the last


class _Merge(NamedTuple):
    """Arguments of merge.merge."""

    out: torch.Tensor
    weight: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    scale: float


class _Bound(NamedTuple):
    """A plan attached to the memory of its items: what a pass does, in this order."""

    items: Sequence[WeightItem]
    kept: list[torch.Tensor]  # views of the items' tensors, which keep their memory alive
    sources: list[torch.Tensor]  # copied to
    targets: list[torch.Tensor]
    merges: list[_Merge]
    gathers: list[tuple[torch.Tensor, torch.Tensor, Any]]  # all ranks' values, this rank's values, the process group
    memory: dict[str, torch.Tensor]  # of the part


class GatherPlan:
    """How the values of a run of items come together, and the Hugging Face tensors that they make up.

    Memory is named: a parameter that is complete where it lies by its item, scratch by its dtype (for experts separately),
    results of conversions that compute by `converted` and their dtype. `bind` attaches the plan to the items' current addresses.
    """

    def __init__(self, items: Sequence[WeightItem], groups: Groups, scratch: Scratch, convert: Convert) -> None:
        self._scratch, self._convert = scratch, convert
        self._places: list[list[Place]] = [[(item.name, 0)] for item in items]
        self._groups = list(self._group(items, groups))
        self.specs: list[TensorSpec] = []
        self._copies: list[tuple[Copy, ...]] = []
        self._computed: list[tuple[int, list[Place]]] = []  # index of an item, and where each of its results goes
        self._computed_sizes: dict[torch.dtype, int] = {}
        for index, item in enumerate(items):
            self._plan_results(index, item)
        for dtype, size in self._computed_sizes.items():
            scratch.reserve(f"converted {dtype}", size)
        self._bound: _Bound | None = None

    def _group(self, items: Sequence[WeightItem], groups: Groups) -> Iterator[_Group]:
        by_name: dict[str, list[int]] = {}
        for index, item in enumerate(items):
            if groups.needs_scratch(item):
                name = f"experts {item.tensor.dtype}" if item.expert_names else str(item.tensor.dtype)
                by_name.setdefault(name, []).append(index)
        for name, indices in sorted(by_name.items()):
            first = items[indices[0]]
            gather, dtype = groups.of(first), first.tensor.dtype
            starts = [0, *itertools.accumulate(items[index].tensor.numel() for index in indices)]
            for index, start in zip(indices, starts, strict=False):
                ranks = range(groups.num_shards(items[index]))
                self._places[index] = [(name, rank * starts[-1] + start) for rank in ranks]
            if len(indices) > 1 or first.adapter is not None:
                self._scratch.reserve(f"own {name}", starts[-1])
            if gather.group is not None:
                self._scratch.reserve(f"gathered {name}", gather.size * starts[-1])
            yield _Group(name, gather, dtype, indices, starts)

    def _plan_results(self, index: int, item: WeightItem) -> None:
        """Plan the location of an item's results. Computed results, unlike copied ones, get scratch of their own."""
        shape, dtype, places = item.tensor.shape, item.tensor.dtype, self._places[index]
        shards = [torch.empty(shape, dtype=dtype, device="meta") for _ in places]
        results = list(self._convert(item, shards))
        self.specs += [TensorSpec(name, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in results]
        copies = trace(lambda given: [tensor for _, tensor in self._convert(item, given)], shape, dtype, places)
        if copies is not None:
            self._copies += copies
            return
        at = []
        for _, tensor in results:
            name, start = f"converted {tensor.dtype}", self._computed_sizes.get(tensor.dtype, 0)
            self._computed_sizes[tensor.dtype] = start + tensor.numel()
            self._copies.append((Copy(contiguous(tensor.numel()), name, contiguous(tensor.numel(), start)),))
            at.append((name, start))
        self._computed.append((index, at))

    @property
    def is_bound(self) -> bool:
        """Whether the parameters of the last `bind` are still where they were."""
        return self._bound is not None and are_same_memory(self._bound.kept, _tensors(self._bound.items))

    def bind(self, items: Sequence[WeightItem]) -> None:
        """Attach to the memory of `items`, those of the plan; nothing to do where it and adapters' scales have stayed."""
        tensors, bound = _tensors(items), self._bound
        if bound is not None and _scales(bound.items) == _scales(items) and are_same_memory(bound.kept, tensors):
            return
        bound = _Bound(items, [tensor.detach() for tensor in tensors], [], [], [], [], {})
        for item, places in zip(items, self._places, strict=True):
            if places[0][0] == item.name:
                bound.memory[item.name] = item.tensor.detach().reshape(-1)
        for group in self._groups:
            if group.gather.takes_part:
                bound.memory[group.memory] = self._bind_group(group, bound)
        for dtype, size in self._computed_sizes.items():
            name = f"converted {dtype}"
            bound.memory[name] = self._scratch.take(name, size, dtype, items[0].tensor.device)
        self._bound = bound

    def _bind_group(self, group: _Group, bound: _Bound) -> torch.Tensor:
        """The memory of the group's values; a single item is gathered from where it lies."""
        first = bound.items[group.indices[0]]
        device, size = first.tensor.device, group.starts[-1]
        if len(group.indices) == 1 and first.adapter is None:
            own = first.tensor.detach().reshape(-1)
        else:
            own = self._scratch.take(f"own {group.memory}", size, group.dtype, device)
            for index, start, end in zip(group.indices, group.starts, group.starts[1:], strict=False):
                tensor, adapter = bound.items[index].tensor.detach(), bound.items[index].adapter
                out = own[start:end].view(tensor.shape)
                if adapter is None:
                    bound.sources.append(tensor)
                    bound.targets.append(out)
                else:
                    bound.merges.append(_Merge(out, tensor, adapter.a.detach(), adapter.b.detach(), adapter.scale))
        if group.gather.group is None:
            return own
        gathered = self._scratch.take(f"gathered {group.memory}", size * group.gather.size, group.dtype, device)
        bound.gathers.append((gathered, own, group.gather.group))
        return gathered

    def run(self, *, has_tensors: bool) -> tuple[Part, list[torch.Tensor]]:
        """Bring the current values into the part's memory. Returns the part, and merge.merge's sums of each adapted weight.

        `has_tensors`: whether this rank's part has the tensors. Collective over the ranks of the groups that take part.
        """
        bound = self._bound
        assert bound is not None, "bind comes first"
        if bound.sources:
            torch._foreach_copy_(bound.targets, bound.sources)
        errors = [merge(*each) for each in bound.merges]
        for gathered, own, ranks in bound.gathers:
            dist.all_gather_into_tensor(gathered, own, group=ranks)
        for index, places in self._computed if has_tensors else ():
            item = bound.items[index]
            size, shape = item.tensor.numel(), item.tensor.shape
            shards = [bound.memory[name][start : start + size].view(shape) for name, start in self._places[index]]
            for (name, start), (_, tensor) in zip(places, self._convert(item, shards), strict=True):
                bound.memory[name][start : start + tensor.numel()].view(tensor.shape).copy_(tensor)
        return Part(self._copies, bound.memory), errors


def _tensors(items: Sequence[WeightItem]) -> list[torch.Tensor]:
    tensors = []
    for item in items:
        tensors += [item.tensor] if item.adapter is None else [item.tensor, item.adapter.a, item.adapter.b]
    return tensors


def _scales(items: Sequence[WeightItem]) -> list[float]:
    return [item.adapter.scale for item in items if item.adapter is not None]
