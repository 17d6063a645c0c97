"""Parameters' values come together: shards and experts by collectives, adapters merged on the way, the rest in place.

A GatherPlan is made once for a run of items and run in every pass, in scratch memory that all plans share. Leaves out
the conversion to Hugging Face's layout (exporter.py) and the merge itself (merge.py).
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


class Gatherer:
    """Runs passes over the engine's units; holds what GatherPlans share.

    `is_in_place`: the units' parameters are whole and at the same addresses between passes. `tensor`: the tensor-parallel ranks;
    `expert`: of items with `expert_names` the expert-parallel ranks, and of each of those the tensor-parallel ones.
    `has_tensors`: whether this rank gives parts.
    """

    def __init__(
        self,
        units: Callable[[], Iterator[Sequence[WeightItem]]],
        tensor: GatherGroup,
        expert: GatherGroup,
        gather_bytes: int,
        *,
        is_in_place: bool,
        has_tensors: bool,
    ) -> None:
        self.has_tensors = has_tensors
        self._tensor, self._expert = tensor, expert
        self.merge_sums = torch.zeros(2, dtype=torch.float64)  # of the last pass: see merge.squared_error
        self._units, self._gather_bytes, self._is_in_place = units, gather_bytes, is_in_place
        self._plans: list[GatherPlan] = []
        self._scratch_sizes: dict[str, int] = {}
        self._scratch: dict[str, torch.Tensor] = {}

    def plan(self, convert: Convert) -> list[TensorSpec]:
        """Make the plans of all passes; the tensors that they give. Walks the units once, without gathering."""
        for items in self._runs():
            self.merge_sums = self.merge_sums.to(items[0].tensor.device)
            self._plans.append(GatherPlan(items, self, convert))
        return [spec for plan in self._plans for spec in plan.specs]

    @torch.no_grad()
    def parts(self) -> Iterator[Part]:
        """A pass. See WeightSource.parts."""
        self.merge_sums.zero_()
        is_ready = self._is_in_place and all(plan.is_bound() for plan in self._plans)
        runs = [None] * len(self._plans) if is_ready else self._runs()
        for items, plan in zip(runs, self._plans, strict=True):
            if not (self._tensor.takes_part or self._expert.takes_part):
                continue
            if items is not None:
                plan.bind(items)
            plan.run()
            if self.has_tensors:
                yield plan.part

    def _runs(self) -> Iterator[list[WeightItem]]:
        """The items in runs that need at most `gather_bytes` of scratch, or one item more than that; each within a unit."""
        units: Iterable[Sequence[WeightItem]] = self._units()
        if self._is_in_place:
            units = [list(itertools.chain.from_iterable(units))]
        for unit in units:
            run: list[WeightItem] = []
            num_bytes = 0
            for item in unit:
                more = item.tensor.nbytes * self.num_shards(item) if self.needs_scratch(item) else 0
                if run and num_bytes + more > self._gather_bytes:
                    yield run
                    run, num_bytes = [], 0
                run.append(item)
                num_bytes += more
            if run:
                yield run

    def group_of(self, item: WeightItem) -> GatherGroup:
        """Of an item in scratch."""
        return self._expert if item.expert_names else self._tensor

    def num_shards(self, item: WeightItem) -> int:
        return self.group_of(item).size if item.expert_names or item.shard_dim is not None else 1

    def needs_scratch(self, item: WeightItem) -> bool:
        """Whether its value has to be written to scratch, to be gathered or merged."""
        return item.adapter is not None or self.num_shards(item) > 1

    def reserve(self, name: str, size: int) -> None:
        """Scratch of this name will hold at least `size` elements."""
        self._scratch_sizes[name] = max(size, self._scratch_sizes.get(name, 0))

    def scratch(self, name: str, size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """The first `size` elements of the memory that was reserved."""
        if name not in self._scratch:
            self._scratch[name] = torch.empty(self._scratch_sizes[name], dtype=dtype, device=device)
        return self._scratch[name][:size]


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

    def __init__(self, items: Sequence[WeightItem], gatherer: Gatherer, convert: Convert) -> None:
        self._gatherer, self._convert = gatherer, convert
        self._places: list[list[Place]] = [[(item.name, 0)] for item in items]
        self._groups = list(self._group(items))
        self.specs: list[TensorSpec] = []
        self._copies: list[tuple[Copy, ...]] = []
        self._computed: list[tuple[int, list[tuple[str, int]]]] = []  # of an item: memory and offset of each result
        self._computed_sizes: dict[torch.dtype, int] = {}
        for index, item in enumerate(items):
            self._plan_results(index, item)
        for dtype, size in self._computed_sizes.items():
            gatherer.reserve(f"converted {dtype}", size)
        self.part = Part(self._copies, {})
        self._items: Sequence[WeightItem] = ()
        self._tensors: list[torch.Tensor] = []
        self._views: list[torch.Tensor] = []
        self._addresses: list[int] = []

    def _group(self, items: Sequence[WeightItem]) -> Iterator[_Group]:
        gatherer = self._gatherer
        scratch = [index for index, item in enumerate(items) if gatherer.needs_scratch(item)]
        names = {index: _scratch_name(items[index]) for index in scratch}
        for name in sorted(set(names.values())):
            indices = [index for index in scratch if names[index] == name]
            first = items[indices[0]]
            gather, dtype = gatherer.group_of(first), first.tensor.dtype
            starts = [0, *itertools.accumulate(items[index].tensor.numel() for index in indices)]
            for index, start in zip(indices, starts, strict=False):
                ranks = range(gatherer.num_shards(items[index]))
                self._places[index] = [(name, rank * starts[-1] + start) for rank in ranks]
            if len(indices) > 1 or first.adapter is not None:
                gatherer.reserve(f"own {name}", starts[-1])
            if gather.group is not None:
                gatherer.reserve(f"gathered {name}", gather.size * starts[-1])
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
        """Whether the parameters, which are those of `items` where given, are at the addresses of the last `bind`."""
        now = self._tensors if items is None else _tensors(items)
        return len(now) == len(self._tensors) > 0 and all(
            one is other and one.data_ptr() == view.data_ptr() == address
            for one, other, view, address in zip(now, self._tensors, self._views, self._addresses, strict=True)
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
            memory[name] = self._gatherer.scratch(name, size, dtype, items[0].tensor.device)
        self.part = Part(self._copies, memory)

    def _bind_group(self, group: _Group, items: Sequence[WeightItem]) -> torch.Tensor:
        """Where the group's values will be; one item alone is gathered from where it lies."""
        gatherer, first = self._gatherer, items[group.indices[0]]
        device, size = first.tensor.device, group.starts[-1]
        if len(group.indices) == 1 and first.adapter is None:
            own = first.tensor.detach().reshape(-1)
        else:
            own = gatherer.scratch(f"own {group.memory}", size, group.dtype, device)
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
        gathered = gatherer.scratch(f"gathered {group.memory}", size * group.gather.size, group.dtype, device)
        self._gathers.append((gathered, own, group.gather.group))
        return gathered

    def run(self) -> None:
        """Bring the values of now into the part's memory. Collective over the ranks of the groups that take part."""
        if self._from_to[0]:
            torch._foreach_copy_(self._from_to[1], self._from_to[0])
        errors = [merge(*arguments) for arguments in self._merges]
        if errors:
            self._gatherer.merge_sums += torch.cat(errors).sum(0, dtype=torch.float64)
        for gathered, own, ranks in self._gathers:
            dist.all_gather_into_tensor(gathered, own, group=ranks)
        for index, at in self._computed if self._gatherer.has_tensors else ():
            self._compute(index, at)

    def _compute(self, index: int, at: list[tuple[str, int]]) -> None:
        item, memory = self._items[index], self.part.memory
        size, shape = item.tensor.numel(), item.tensor.shape
        shards = [memory[name][start : start + size].view(shape) for name, start in self._places[index]]
        for (name, start), (_, tensor) in zip(at, self._convert(item, shards), strict=True):
            memory[name][start : start + tensor.numel()].view(tensor.shape).copy_(tensor)


def _scratch_name(item: WeightItem) -> str:
    return f"experts {item.tensor.dtype}" if item.expert_names else str(item.tensor.dtype)


def _tensors(items: Sequence[WeightItem]) -> list[torch.Tensor]:
    tensors = []
    for item in items:
        tensors += [item.tensor] if item.adapter is None else [item.tensor, item.adapter.a, item.adapter.b]
    return tensors
