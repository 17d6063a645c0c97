"""megatron-core parameters become Hugging Face tensors, in layer order, one pipeline stage a rank.

The engine hands out items whole over data parallelism and local to a tensor- and expert-parallel rank; gather.py brings their
values together with few collectives, and mbridge's pure functions say what they become. These run on meta tensors alone: a sync
replays the copies that they make (trace.py). No object collective, nothing broadcast over pipeline stages. Leaves out buckets
and transports (send/).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from bridge.export.gather import GatherGroup, GatherPlan, Groups, Scratch
from bridge.export.source import Part, WeightItem
from bridge.layout.manifest import Manifest


class Exporter:
    """The WeightSource of a model's weights, with adapters merged into them."""

    def __init__(  # noqa: PLR0913
        self,
        units: Callable[[], Iterator[Sequence[WeightItem]]],
        mbridge: Any,
        *,
        tensor_group: Any = None,
        stage: int = 0,
        num_stages: int = 1,
        data_rank: int = 0,
        expert_group: Any = None,
        expert_data_rank: int = 0,
        gather_bytes: int = 64 * 2**20,
        is_in_place: bool = False,
        on_all_ranks: bool = False,
    ) -> None:
        """
        Args:
            units: a walk over this stage's items; collective.
            mbridge: an mbridge Bridge.
            tensor_group: the tensor-parallel group, or None.
            data_rank: among the ranks that have the same parameters outside of experts; the first of them takes part.
            expert_group: the expert-parallel ranks and of each the tensor-parallel ones, in this order; None without the former.
            expert_data_rank: as `data_rank`, of the experts.
            gather_bytes: bound of the scratch for merging and gathering, if no single parameter needs more.
            is_in_place: whether the items are whole, and at the same addresses, between walks too.
            on_all_ranks: whether all ranks of the stage have the tensors, not its sender alone.
        """
        self.stage, self.num_stages = stage, num_stages
        tensor_group = tensor_group if tensor_group is not None and tensor_group.size() > 1 else None
        self.is_sender = data_rank == 0 and (tensor_group is None or tensor_group.rank() == 0)
        self.has_tensors = self.is_sender or on_all_ranks
        self._units, self._hf_bridge, self._gather_bytes, self._is_in_place = units, mbridge, gather_bytes, is_in_place
        self._groups = Groups(
            GatherGroup(tensor_group, data_rank == 0 or on_all_ranks),
            GatherGroup(expert_group, expert_group is not None and (expert_data_rank == 0 or on_all_ranks)),
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
        is_ready = self._is_in_place and all(plan.is_bound() for plan in self._plans)
        runs = [None] * len(self._plans) if is_ready else self._runs()
        for items, plan in zip(runs, self._plans, strict=True):
            if not any(group.takes_part for group in self._groups):
                continue
            if items is not None:
                plan.bind(items)
            if errors := plan.run(has_tensors=self.has_tensors):
                self._merge_sums += torch.cat(errors).sum(0, dtype=torch.float64)
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

        Near 1 the model's dtype swallows the update. Collective over all ranks.
        """
        sums = self._merge_sums.clone()
        if dist.is_initialized():
            dist.all_reduce(sums)
        lost, moved = sums.tolist()
        return math.sqrt(lost / moved) if moved else 0.0

    def _convert(self, item: WeightItem, shards: list[torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """Of an expert's item, `shards` are those of the expert on each expert-parallel rank, one after another."""
        names = item.expert_names or (item.name,)
        size = len(shards) // len(names)
        for rank, name in enumerate(names):
            own = shards[rank * size : (rank + 1) * size]
            whole = own[0]  # mbridge 0.15.1 bridge.py:_weight_merge_across_tp, :_weight_to_hf_format
            if size > 1:  # of the parameter mbridge reads two attributes, which megatron-core sets
                parameter = SimpleNamespace(tensor_model_parallel=True, partition_dim=item.shard_dim)
                whole = self._hf_bridge._weight_merge_across_tp(name, own, parameter)
            yield from zip(*self._hf_bridge._weight_to_hf_format(name, whole), strict=True)
