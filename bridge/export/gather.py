"""Parameters' values come together: shards and experts by collectives, adapters merged on the way, the rest in place.

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
from bridge.layout.manifest import TensorSpec
from bridge.layout.regions import Copy, contiguous

# (name, tensor) of each Hugging Face tensor that an item's shards, one a rank of its group, become
Convert = Callable[[WeightItem, list[torch.Tensor]], Iterable[tuple[str, torch.Tensor]]]


class GatherGroup(NamedTuple):
    """Ranks over which items are gathered; `group` None: there is nothing to gather."""

    group: Any
    takes_part: bool  # whether this rank's group does: one of all that have the same values

    @property
    def size(self) -> int:
        return int(self.group.size()) if self.group is not None else 1


class Groups(NamedTuple):
    """`expert`: of items with `expert_names` the expert-parallel ranks, and of each of those the tensor-parallel ones."""

    tensor: GatherGroup
    expert: GatherGroup

    def of(self, item: WeightItem) -> GatherGroup:
        return self.expert if item.expert_names else self.tensor

    def num_shards(self, item: WeightItem) -> int:
        return self.of(item).size if item.expert_names or item.shard_dim is not None else 1

    def needs_scratch(self, item: WeightItem) -> bool:
        """Whether its value has to be written to scratch, to be gathered or merged."""
        return item.adapter is not None or self.num_shards(item) > 1


class Scratch:
    """Memory by name, which all plans share."""

    def __init__(self) -> None:
        self._sizes: dict[str, int] = {}
        self._memory: dict[str, torch.Tensor] = {}

    def reserve(self, name: str, size: int) -> None:
        """It will hold at least `size` elements."""
        self._sizes[name] = max(size, self._sizes.get(name, 0))

    def take(self, name: str, size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """The first `size` elements of the memory that was reserved."""
        if name not in self._memory:
            self._memory[name] = torch.empty(self._sizes[name], dtype=dtype, device=device)
        return self._memory[name][:size]


class _Group(NamedTuple):
    """Items of one dtype that are gathered together: their indices in the run, and where each starts in a rank's scratch."""

    memory: str  # the name of what they are gathered into
    gather: GatherGroup
    dtype: torch.dtype
    indices: list[int]
    starts: list[int]  # and the end of the last


class GatherPlan:
    """How the values of a run of items come together, and the Hugging Face tensors that they make up.

    Memory is named: that of a parameter whose value is ready where it is as the item, scratch as its dtype (that of experts
    apart), results of conversions that compute as `converted` and their dtype. `bind` attaches it to the addresses of now.
    """

    def __init__(self, items: Sequence[WeightItem], groups: Groups, scratch: Scratch, convert: Convert) -> None:
        self._scratch, self._convert = scratch, convert
        self._places: list[list[Place]] = [[(item.name, 0)] for item in items]
        self._groups = list(self._group(items, groups))
        self.specs: list[TensorSpec] = []
        self._copies: list[tuple[Copy, ...]] = []
        self._computed: list[tuple[int, list[tuple[str, int]]]] = []  # of an item: memory and offset of each result
        self._computed_sizes: dict[torch.dtype, int] = {}
        for index, item in enumerate(items):
            self._plan_results(index, item)
        for dtype, size in self._computed_sizes.items():
            scratch.reserve(f"converted {dtype}", size)
        self.part = Part(self._copies, {})
        self._items: Sequence[WeightItem] = ()
        self._tensors: list[torch.Tensor] = []
        self._views: list[torch.Tensor] = []
        self._addresses: list[int] = []

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
        """Where the tensors that an item becomes lie; those that are computed, and no copies, get scratch of their own."""
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

    def is_bound(self, items: Sequence[WeightItem] | None = None) -> bool:
        """Whether the parameters, which are those of `items` where given, are at the addresses of the last `bind`.

        The views keep the memory of then: at its address there is nothing else.
        """
        now = self._tensors if items is None else _tensors(items)
        return len(now) == len(self._tensors) > 0 and all(
            tensor.data_ptr() == view.data_ptr() == address
            for tensor, view, address in zip(now, self._views, self._addresses, strict=True)
        )

    def bind(self, items: Sequence[WeightItem]) -> None:
        """Attach to the memory of `items`, which are those of the plan; nothing to do where it has stayed in place."""
        if self.is_bound(items):
            return
        self._items, self._tensors = items, _tensors(items)
        self._views = [tensor.detach() for tensor in self._tensors]
        self._addresses = [view.data_ptr() for view in self._views]
        self._from_to: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        self._merges: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, float]] = []
        self._gathers: list[tuple[torch.Tensor, torch.Tensor, Any]] = []  # all ranks' values, this rank's, the ranks
        in_place = [item for item, places in zip(items, self._places, strict=True) if places[0][0] == item.name]
        memory = {item.name: item.tensor.detach().reshape(-1) for item in in_place}
        for group in self._groups:
            if group.gather.takes_part:
                memory[group.memory] = self._bind_group(group, items)
        for dtype, size in self._computed_sizes.items():
            name = f"converted {dtype}"
            memory[name] = self._scratch.take(name, size, dtype, items[0].tensor.device)
        self.part = Part(self._copies, memory)

    def _bind_group(self, group: _Group, items: Sequence[WeightItem]) -> torch.Tensor:
        """Where the group's values will be; one item alone is gathered from where it lies."""
        first = items[group.indices[0]]
        device, size = first.tensor.device, group.starts[-1]
        if len(group.indices) == 1 and first.adapter is None:
            own = first.tensor.detach().reshape(-1)
        else:
            own = self._scratch.take(f"own {group.memory}", size, group.dtype, device)
            for index, start, end in zip(group.indices, group.starts, group.starts[1:], strict=False):
                tensor, adapter = items[index].tensor.detach(), items[index].adapter
                out = own[start:end].view(tensor.shape)
                if adapter is None:
                    self._from_to[0].append(tensor)
                    self._from_to[1].append(out)
                else:
                    self._merges.append((out, tensor, adapter.a.detach(), adapter.b.detach(), adapter.scale))
        if group.gather.group is None:
            return own
        gathered = self._scratch.take(f"gathered {group.memory}", size * group.gather.size, group.dtype, device)
        self._gathers.append((gathered, own, group.gather.group))
        return gathered

    def run(self, *, has_tensors: bool) -> list[torch.Tensor]:
        """Bring the values of now into the part's memory; what merge.merge gives of each weight with an adapter.

        `has_tensors`: whether this rank gives the part. Collective over the ranks of the groups that take part.
        """
        if self._from_to[0]:
            torch._foreach_copy_(self._from_to[1], self._from_to[0])
        errors = [merge(*arguments) for arguments in self._merges]
        for gathered, own, ranks in self._gathers:
            dist.all_gather_into_tensor(gathered, own, group=ranks)
        for index, at in self._computed if has_tensors else ():
            self._compute(index, at)
        return errors

    def _compute(self, index: int, at: list[tuple[str, int]]) -> None:
        item, memory = self._items[index], self.part.memory
        size, shape = item.tensor.numel(), item.tensor.shape
        shards = [memory[name][start : start + size].view(shape) for name, start in self._places[index]]
        for (name, start), (_, tensor) in zip(at, self._convert(item, shards), strict=True):
            memory[name][start : start + tensor.numel()].view(tensor.shape).copy_(tensor)


def _tensors(items: Sequence[WeightItem]) -> list[torch.Tensor]:
    tensors = []
    for item in items:
        tensors += [item.tensor] if item.adapter is None else [item.tensor, item.adapter.a, item.adapter.b]
    return tensors
