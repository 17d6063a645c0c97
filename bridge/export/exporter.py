"""megatron-core parameters become Hugging Face tensors, in layer order, one pipeline stage a rank.

The engine hands out items whole over data parallelism and local to a tensor- and expert-parallel rank; gather.py brings their
values together with few collectives, and mbridge's pure functions say what they become. These run on meta tensors alone: a sync
replays the copies that they make (trace.py). No object collective, nothing broadcast over pipeline stages. Leaves out buckets
and transports (send/).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from bridge.export.gather import Gatherer, GatherGroup
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
        self._hf_bridge = mbridge
        self._gatherer = Gatherer(
            units,
            GatherGroup(tensor_group, data_rank == 0 or on_all_ranks),
            GatherGroup(expert_group, expert_group is not None and (expert_data_rank == 0 or on_all_ranks)),
            gather_bytes,
            is_in_place=is_in_place,
            has_tensors=self.has_tensors,
        )
        self._manifest: Manifest | None = None

    def manifest(self) -> Manifest:
        if self._manifest is None:
            self._manifest = Manifest(tuple(self._gatherer.plan(self._convert)))
        return self._manifest

    def parts(self) -> Iterator[Part]:
        self.manifest()
        return self._gatherer.parts()

    def merge_error(self) -> float:
        """|round(W + D) - (W + D)| / |D| over the whole model at the last pass, D the adapters' update; 0 without one.

        Near 1 the model's dtype swallows the update. Collective over all ranks.
        """
        sums = self._gatherer.merge_sums.clone()
        if dist.is_initialized():
            dist.all_reduce(sums)
        lost, moved = sums.tolist()
        return math.sqrt(lost / moved) if moved else 0.0

    def _convert(self, item: WeightItem, shards: list[torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """Of an expert's item, `shards` are those of the expert on each expert-parallel rank, one after another."""
        names = item.expert_names or (item.name,)
        size = len(shards) // len(names)
        for rank, name in enumerate(names):
            yield from self._convert_one(name, item.shard_dim, shards[rank * size : (rank + 1) * size])

    def _convert_one(self, name: str, shard_dim: int | None, shards: list[torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        # mbridge 0.15.1 bridge.py:_weight_merge_across_tp, :_weight_to_hf_format
        whole = shards[0]
        if len(shards) > 1:  # of the parameter mbridge reads two attributes, which megatron-core sets
            parameter = SimpleNamespace(tensor_model_parallel=True, partition_dim=shard_dim)
            whole = self._hf_bridge._weight_merge_across_tp(name, shards, parameter)
        names, tensors = self._hf_bridge._weight_to_hf_format(name, whole)
        return zip(names, tensors, strict=True)
