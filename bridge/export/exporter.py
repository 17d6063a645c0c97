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
from bridge.layout.manifest import Manifest


@dataclass(frozen=True)
class Position:
    """A rank's place in the model-parallel layout."""

    stage: int = 0
    num_stages: int = 1
    tensor_group: Any = None  # the tensor-parallel process group
    data_rank: int = 0  # among the ranks with the same parameters outside of experts; the first of them takes part
    expert_group: Any = None  # the expert-parallel ranks, each with its tensor-parallel ones, in this order; None without experts
    expert_data_rank: int = 0  # as `data_rank`, for the experts


class Exporter:
    """The WeightSource of a model's weights, with adapters merged into them."""

    def __init__(
        self,
        units: Callable[[], Iterator[Sequence[WeightItem]]],
        mbridge: Any,
        position: Position = Position(),
        *,
        gather_bytes: int = 64 * 2**20,
        is_in_place: bool = False,
        on_all_ranks: bool = False,
    ) -> None:
        """
        Args:
            units: returns an iterator over this stage's weight items; collective.
            mbridge: an mbridge Bridge.
            position: of this rank.
            gather_bytes: bound of the scratch for merging and gathering, unless a single parameter needs more.
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
        self._units, self._hf_bridge, self._gather_bytes, self._is_in_place = units, mbridge, gather_bytes, is_in_place
        self._groups = Groups(
            GatherGroup(tensor_group, is_first_copy or on_all_ranks),
            GatherGroup(position.expert_group, has_expert_group and (position.expert_data_rank == 0 or on_all_ranks)),
        )
        self._scratch, self._plans = Scratch(), list[GatherPlan]()
        self._merge_sums = torch.zeros(2, dtype=torch.float64)  # of the last pass: see merge.squared_error
        self._manifest: Manifest | None = None

    def manifest(self) -> Manifest:
        """Walks the units once, without gathering, at the first call."""
        if self._manifest is None:
            for items in self._runs():
                self._merge_sums = self._merge_sums.to(items[0].tensor.device)
                self._plans.append(GatherPlan(items, self._groups, self._scratch, self._convert))
            self._manifest = Manifest(tuple(spec for plan in self._plans for spec in plan.specs))
        return self._manifest

    @torch.no_grad()
    def parts(self) -> Iterator[Part]:
        self.manifest()
        self._merge_sums.zero_()
        is_ready = self._is_in_place and all(plan.is_bound for plan in self._plans)
        runs = [None] * len(self._plans) if is_ready else self._runs()
        for items, plan in zip(runs, self._plans, strict=True):
            if not any(group.takes_part for group in self._groups):
                continue
            if items is not None:
                plan.bind(items)
            part, errors = plan.run(has_tensors=self.has_tensors)
            if errors:
                self._merge_sums += torch.cat(errors).sum(0, dtype=torch.float64)
            if self.has_tensors:
                yield part

    def _runs(self) -> Iterator[list[WeightItem]]:
        """The items in runs, each within a unit and with at most `gather_bytes` of scratch, unless a single item needs more."""
        units: Iterable[Sequence[WeightItem]] = self._units()
        if self._is_in_place:
            units = [list(itertools.chain.from_iterable(units))]
        for unit in units:
            run: list[WeightItem] = []
            num_bytes = 0
            for item in unit:
                more = item.tensor.nbytes * self._groups.num_shards(item) if self._groups.needs_scratch(item) else 0
                if run and num_bytes + more > self._gather_bytes:
                    yield run
                    run, num_bytes = [], 0
                run.append(item)
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

    def _convert(self, item: WeightItem, shards: list[torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """`shards`: of an expert's item those of the expert on each expert-parallel rank, one after another."""
        names = item.expert_names or (item.name,)
        size = len(shards) // len(names)
        stacks = []
        for rank, name in enumerate(names):
            own = shards[rank * size : (rank + 1) * size]
            whole = own[0]  # mbridge 0.15.1 bridge.py:_weight_merge_across_tp, :_weight_to_hf_format
            if size > 1:  # of the parameter mbridge reads two attributes, which megatron-core sets
                parameter = SimpleNamespace(tensor_model_parallel=True, partition_dim=item.shard_dim)
                whole = self._hf_bridge._weight_merge_across_tp(name, own, parameter)
            if item.is_stack:
                stacks.append(whole)
            else:
                yield from zip(*self._hf_bridge._weight_to_hf_format(name, whole), strict=True)
        if stacks:
            yield from zip(*self._hf_bridge._weight_to_hf_format(item.name, torch.cat(stacks)), strict=True)
