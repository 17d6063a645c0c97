"""megatron-core parameters become Hugging Face tensors, in layer order, one pipeline stage a rank.

The engine yields items that are complete over data parallelism and local to a tensor- and expert-parallel rank. gather.py gathers
their values with few collectives, and mbridge's pure functions convert them. The conversions run on meta tensors alone: a sync
replays the copies that they make (trace.py). No object collective, nothing broadcast over pipeline stages. Leaves out buckets
and transports (send/).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from bridge.export.gather import GatherGroup, GatherPlan, Groups, Scratch
from bridge.export.source import Part, WeightItem
from bridge.export.weights import Weight, scales_of, take_apart, tensors_of
from bridge.layout.copies import are_same_memory
from bridge.layout.manifest import Manifest

GATHER_BYTES = 64 * 2**20
GPU_GATHER_BYTES = 256 * 2**20  # there the launches of a run cost more than the bytes of a smaller one


@dataclass(frozen=True)
class Position:
    """A rank's place in the model-parallel layout."""

    stage: int = 0
    num_stages: int = 1
    tensor_group: Any = None  # the tensor-parallel process group
    data_rank: int = 0  # among the ranks with the same parameters outside of experts; the first of them takes part
    expert_group: Any = None  # the expert-parallel ranks, each with its tensor-parallel ones, in this order; None without experts
    expert_data_rank: int = 0  # as `data_rank`, for the experts


class _UnitPlans:
    """The plans of a unit of items, and the memory that they are attached to."""

    def __init__(self, plans: list[GatherPlan]) -> None:
        self.plans = plans
        self._items: Sequence[WeightItem] = ()
        self._kept: list[torch.Tensor] = []  # views of the items' tensors, which keep their memory alive
        self._scales: list[float] = []

    @property
    def is_bound(self) -> bool:
        """Whether the parameters of the last `bind` are still where they were."""
        return bool(self._items) and are_same_memory(self._kept, tensors_of(self._items))

    def bind(self, items: Sequence[WeightItem]) -> None:
        """Attach the plans to the memory of `items`; nothing to do where it and adapters' scales have stayed."""
        tensors, scales = tensors_of(items), scales_of(items)
        if not (self._items and scales == self._scales and are_same_memory(self._kept, tensors)):
            weights = take_apart(items)
            for plan in self.plans:
                plan.bind(list(itertools.islice(weights, plan.num_weights)))
            self._kept, self._scales = [tensor.detach() for tensor in tensors], scales
        self._items = items


class Exporter:
    """The WeightSource of a model's weights, with adapters merged into them."""

    def __init__(
        self,
        units: Callable[[], Iterator[Sequence[WeightItem]]],
        mbridge: Any,
        position: Position = Position(),
        *,
        gather_bytes: int | None = None,
        is_in_place: bool = False,
        on_all_ranks: bool = False,
    ) -> None:
        """
        Args:
            units: returns an iterator over this stage's weight items; collective.
            mbridge: an mbridge Bridge.
            position: of this rank.
            gather_bytes: bound of the scratch for merging and gathering, unless a single weight needs more; None: by the device.
            is_in_place: whether the items are complete, and at the same addresses, between walks too.
            on_all_ranks: whether all ranks of the stage have the tensors, rather than its sender alone.
        """
        self.stage, self.num_stages = position.stage, position.num_stages
        tensor_group = position.tensor_group
        if tensor_group is not None and tensor_group.size() == 1:
            tensor_group = None
        is_first_copy, has_expert_group = position.data_rank == 0, position.expert_group is not None
        self.is_sender = is_first_copy and (tensor_group is None or tensor_group.rank() == 0)
        self.has_tensors = self.is_sender or on_all_ranks
        self._units, self._hf_bridge, self._is_in_place = units, mbridge, is_in_place
        self._gather_bytes = gather_bytes or (GPU_GATHER_BYTES if torch.cuda.is_available() else GATHER_BYTES)
        self._groups = Groups(
            GatherGroup(tensor_group, is_first_copy or on_all_ranks),
            GatherGroup(position.expert_group, has_expert_group and (position.expert_data_rank == 0 or on_all_ranks)),
        )
        self._scratch, self._unit_plans = Scratch(), list[_UnitPlans]()
        self._merge_sums = torch.zeros(2, dtype=torch.float64)  # of the last pass: see merge.squared_error
        self._manifest: Manifest | None = None

    def manifest(self) -> Manifest:
        """Walks the units once, without gathering, at the first call."""
        if self._manifest is None:
            for items in self._walk():
                self._merge_sums = self._merge_sums.to(items[0].tensor.device)
                runs = self._runs(take_apart(items))
                self._unit_plans.append(_UnitPlans([GatherPlan(run, self._groups, self._scratch, self._convert) for run in runs]))
            self._manifest = Manifest(tuple(spec for unit in self._unit_plans for plan in unit.plans for spec in plan.specs))
        return self._manifest

    @torch.no_grad()
    def parts(self) -> Iterator[Part]:
        self.manifest()
        self._merge_sums.zero_()
        is_ready = self._is_in_place and all(unit.is_bound for unit in self._unit_plans)
        walk = [None] * len(self._unit_plans) if is_ready else self._walk()
        for items, unit in zip(walk, self._unit_plans, strict=True):
            if not any(group.takes_part for group in self._groups):
                continue
            if items is not None:
                unit.bind(items)
            for plan in unit.plans:
                part, errors = plan.run(has_tensors=self.has_tensors)
                if errors:
                    self._merge_sums += torch.cat(errors).sum(0, dtype=torch.float64)
                if self.has_tensors:
                    yield part

    def _walk(self) -> Iterator[Sequence[WeightItem]]:
        """The units; all in one where they stay in place."""
        if self._is_in_place:
            return iter([list(itertools.chain.from_iterable(self._units()))])
        return self._units()

    def _runs(self, weights: Iterable[Weight]) -> Iterator[list[Weight]]:
        """The weights of a unit in runs, each with at most `gather_bytes` of scratch, unless a single one needs more."""
        run: list[Weight] = []
        num_bytes = 0
        for weight in weights:
            own = weight.shape.numel() * weight.dtype.itemsize if self._groups.needs_scratch(weight) else 0
            more = own * self._groups.num_shards(weight)
            if run and num_bytes + more > self._gather_bytes:
                yield run
                run, num_bytes = [], 0
            run.append(weight)
            num_bytes += more
        if run:
            yield run

    def merge_error(self) -> float:
        """|round(W + D) - (W + D)| / |D| over the whole model at the last pass, D the adapters' update; 0 without one.

        Near 1 the update is lost to rounding in the model's dtype. Collective over all ranks.
        """
        sums = self._merge_sums.clone()
        if dist.is_initialized():
            dist.all_reduce(sums)
        lost, moved = sums.tolist()
        return math.sqrt(lost / moved) if moved else 0.0

    def _convert(self, weight: Weight, shards: list[torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """`shards`: of an expert those of the expert on each expert-parallel rank, one after another."""
        names = weight.expert_names or (weight.name,)
        size = len(shards) // len(names)
        stacks = []
        for rank, name in enumerate(names):
            own = shards[rank * size : (rank + 1) * size]
            whole = own[0]  # mbridge 0.15.1 bridge.py:_weight_merge_across_tp, :_weight_to_hf_format
            if size > 1:  # of the parameter mbridge reads two attributes, which megatron-core sets
                parameter = SimpleNamespace(tensor_model_parallel=True, partition_dim=weight.item.shard_dim)
                whole = self._hf_bridge._weight_merge_across_tp(name, own, parameter)
            if weight.item.is_stack:
                stacks.append(whole)
            else:
                yield from zip(*self._hf_bridge._weight_to_hf_format(name, whole), strict=True)
        if stacks:
            yield from zip(*self._hf_bridge._weight_to_hf_format(weight.name, torch.cat(stacks)), strict=True)
