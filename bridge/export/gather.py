"""Gathers weights' values: shards and experts by collectives, adapters merged on the way, the rest read in place.

A GatherPlan is made once for a run of weights and run in every pass, in scratch memory that all plans share: some operations
each, whatever the number of weights. Leaves out the passes and the conversion to Hugging Face's layout (exporter.py), and the
merge itself (merge.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from bridge.export.merge import GroupedMerge, Pair
from bridge.export.source import Part
from bridge.export.trace import Place, trace
from bridge.export.weights import Weight
from bridge.layout.manifest import TensorSpec
from bridge.layout.regions import Copy, contiguous, moved

# (name, tensor) of each Hugging Face tensor that a weight's shards, one a rank of its group, become
Convert = Callable[[Weight, list[torch.Tensor]], Iterable[tuple[str, torch.Tensor]]]


class GatherGroup(NamedTuple):
    """Ranks over which items are gathered; `group` None: there is nothing to gather."""

    group: Any
    takes_part: bool  # of all groups with the same values only one gathers

    @property
    def size(self) -> int:
        return int(self.group.size()) if self.group is not None else 1


class Groups(NamedTuple):
    """`expert`: for weights with `expert_names`; the expert-parallel ranks times the tensor-parallel ones of each."""

    tensor: GatherGroup
    expert: GatherGroup

    def of(self, weight: Weight) -> GatherGroup:
        return self.expert if weight.expert_names else self.tensor

    def num_shards(self, weight: Weight) -> int:
        return self.of(weight).size if weight.expert_names or weight.item.shard_dim is not None else 1

    def needs_scratch(self, weight: Weight) -> bool:
        """Whether the value is written to scratch, to be gathered or merged."""
        return weight.item.adapter is not None or self.num_shards(weight) > 1


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
    """Weights of one dtype that are gathered together: their indices in the run, and where each starts in a rank's scratch."""

    memory: str  # the name of the buffer that they are gathered into
    gather: GatherGroup
    dtype: torch.dtype
    indices: list[int]
    starts: list[int]  # and the end of the last


class _Bound(NamedTuple):
    """A plan attached to the memory of its weights: the operations of a pass, in this order."""

    sources: list[torch.Tensor]  # copied to
    targets: list[torch.Tensor]
    merges: list[GroupedMerge]
    gathers: list[tuple[torch.Tensor, torch.Tensor, Any]]  # all ranks' values, this rank's values, the process group
    memory: dict[str, torch.Tensor]  # of the part


class GatherPlan:
    """How the values of a run of weights come together, and the Hugging Face tensors that they make up.

    Memory is named: a parameter that is complete where it lies by its item, scratch by its dtype (for experts separately),
    results of conversions that compute by `converted` and their dtype. `bind` attaches the plan to the weights' memory.
    """

    def __init__(self, weights: Sequence[Weight], groups: Groups, scratch: Scratch, convert: Convert) -> None:
        self.num_weights, self._scratch, self._convert = len(weights), scratch, convert
        self._places: list[list[Place]] = [[(weight.item.name, weight.start)] for weight in weights]
        self._groups = list(self._group(weights, groups))
        self.specs: list[TensorSpec] = []
        self._copies: list[tuple[Copy, ...]] = []
        self._computed: list[tuple[int, list[Place]]] = []  # index of a weight, and where each of its results goes
        self._computed_sizes: dict[torch.dtype, int] = {}
        self._plan_results(weights)
        for dtype, size in self._computed_sizes.items():
            scratch.reserve(f"converted {dtype}", size)
        self._weights: Sequence[Weight] = ()
        self._bound: _Bound | None = None

    def _group(self, weights: Sequence[Weight], groups: Groups) -> Iterator[_Group]:
        by_name: dict[str, list[int]] = {}
        for index, weight in enumerate(weights):
            if groups.needs_scratch(weight):
                name = f"experts {weight.dtype}" if weight.expert_names else str(weight.dtype)
                by_name.setdefault(name, []).append(index)
        for name, indices in sorted(by_name.items()):
            first = weights[indices[0]]
            gather, dtype = groups.of(first), first.dtype
            starts = [0, *itertools.accumulate(weights[index].shape.numel() for index in indices)]
            for index, start in zip(indices, starts, strict=False):
                ranks = range(groups.num_shards(weights[index]))
                self._places[index] = [(name, rank * starts[-1] + start) for rank in ranks]
            if len(indices) > 1 or first.item.adapter is not None:
                self._scratch.reserve(f"own {name}", starts[-1])
            if gather.group is not None:
                self._scratch.reserve(f"gathered {name}", gather.size * starts[-1])
            yield _Group(name, gather, dtype, indices, starts)

    def _plan_results(self, weights: Sequence[Weight]) -> None:
        """Plan the location of the weights' results. Computed results, unlike copied ones, get scratch of their own.

        The experts of one item are converted alike: the copies of the first are those of the others, elsewhere in memory.
        """
        first, copies = 0, None
        for index, (weight, places) in enumerate(zip(weights, self._places, strict=True)):
            shape, dtype = weight.shape, weight.dtype
            shards = [torch.empty(shape, dtype=dtype, device="meta") for _ in places]
            results = list(self._convert(weight, shards))
            self.specs += [TensorSpec(name, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in results]
            if index == 0 or weight.item.name != weights[first].item.name:
                first, copies = index, trace(partial(self._converted, weight), shape, dtype, places)
            if copies is not None:
                distance = places[0][1] - self._places[first][0][1]
                self._copies += [tuple(moved(copy, distance) for copy in each) for each in copies] if distance else copies
                continue
            at = []
            for _, tensor in results:
                name, start = f"converted {tensor.dtype}", self._computed_sizes.get(tensor.dtype, 0)
                self._computed_sizes[tensor.dtype] = start + tensor.numel()
                self._copies.append((Copy(contiguous(tensor.numel()), name, contiguous(tensor.numel(), start)),))
                at.append((name, start))
            self._computed.append((index, at))

    def _converted(self, weight: Weight, shards: list[torch.Tensor]) -> list[torch.Tensor]:
        return [tensor for _, tensor in self._convert(weight, shards)]

    def bind(self, weights: Sequence[Weight]) -> None:
        """Attach to the memory of `weights`, those of the plan. Their storages may move afterwards."""
        bound = _Bound([], [], [], [], {})
        for weight, places in zip(weights, self._places, strict=True):
            if places[0][0] == weight.item.name and weight.item.name not in bound.memory:
                bound.memory[weight.item.name] = weight.item.tensor.detach().reshape(-1)
        for group in self._groups:
            if group.gather.takes_part:
                bound.memory[group.memory] = self._bind_group(group, weights, bound)
        for dtype, size in self._computed_sizes.items():
            name = f"converted {dtype}"
            bound.memory[name] = self._scratch.take(name, size, dtype, weights[0].item.tensor.device)
        self._weights, self._bound = weights, bound

    def _bind_group(self, group: _Group, weights: Sequence[Weight], bound: _Bound) -> torch.Tensor:
        """The memory of the group's values; a single weight is gathered from where it lies."""
        first = weights[group.indices[0]]
        device, size = first.item.tensor.device, group.starts[-1]
        if len(group.indices) == 1 and first.item.adapter is None:
            own = first.tensor.reshape(-1)
        else:
            own, pairs = self._scratch.take(f"own {group.memory}", size, group.dtype, device), list[Pair]()
            for index, start, end in zip(group.indices, group.starts, group.starts[1:], strict=False):
                weight, adapter = weights[index], weights[index].item.adapter
                if adapter is None:
                    bound.sources.append(weight.tensor)
                    bound.targets.append(own[start:end].view(weight.shape))
                else:
                    pairs.append(Pair(weight.tensor, *weight.factors, adapter.scale, start))
            if pairs:
                bound.merges.append(GroupedMerge(own, pairs))
        if group.gather.group is None:
            return own
        gathered = self._scratch.take(f"gathered {group.memory}", size * group.gather.size, group.dtype, device)
        bound.gathers.append((gathered, own, group.gather.group))
        return gathered

    def run(self, *, has_tensors: bool) -> tuple[Part, list[torch.Tensor]]:
        """Bring the current values into the part's memory. Returns the part, and the sums of each merge.

        `has_tensors`: whether this rank's part has the tensors. Collective over the ranks of the groups that take part.
        """
        bound = self._bound
        assert bound is not None, "bind comes first"
        if bound.sources:
            torch._foreach_copy_(bound.targets, bound.sources)
        errors = [merge.run() for merge in bound.merges]
        for gathered, own, ranks in bound.gathers:
            dist.all_gather_into_tensor(gathered, own, group=ranks)
        for index, places in self._computed if has_tensors else ():
            weight = self._weights[index]
            size, shape = weight.shape.numel(), weight.shape
            shards = [bound.memory[name][start : start + size].view(shape) for name, start in self._places[index]]
            for (name, start), (_, tensor) in zip(places, self._convert(weight, shards), strict=True):
                bound.memory[name][start : start + tensor.numel()].view(tensor.shape).copy_(tensor)
        return Part(self._copies, bound.memory), errors
