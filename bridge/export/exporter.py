"""megatron-core parameters become Hugging Face tensors: a generator in layer order, one pipeline stage a rank.

Walks the units that the engine hands out (whole over data parallelism, local to a tensor-parallel rank), lets their values
come together with as few collectives as `gather_bytes` allows (gather.py), and converts them with mbridge's pure functions.
What these do is recorded at the first pass (trace.py), so that a sync copies without calling them. No object collective,
nothing broadcast over pipeline stages. Leaves out buckets and the wire (publish.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from bridge.export.gather import Fill, Gatherer, WeightItem
from bridge.export.source import Part
from bridge.export.trace import Place, trace
from bridge.layout.manifest import Manifest, TensorSpec
from bridge.layout.regions import Copy


class Exporter:
    """The weight source of one trainer rank: `manifest()` and iteration over (Hugging Face name, tensor).

    Every rank of the stage must iterate it to the end. Only the sender gets tensors out of it, unless it is `everywhere`; the
    others take part in the collectives. A yielded tensor is valid until the next one is asked for.
    """

    def __init__(
        self,
        units: Callable[[], Iterator[Sequence[WeightItem]]],
        hf_bridge: Any,
        *,
        tensor_group: Any = None,
        stage: int = 0,
        num_stages: int = 1,
        data_rank: int = 0,
        gather_bytes: int = 64 * 2**20,
        stays: bool = False,
    ) -> None:
        """`hf_bridge`: an mbridge Bridge; `tensor_group`: the tensor-parallel group, None for size 1.

        `stays`: whether `units` gives parameters that are whole and in their place all the time, not gathered for a while.
        """
        self.units, self.hf_bridge = units, hf_bridge
        self.tensor_group = tensor_group if tensor_group is not None and tensor_group.size() > 1 else None
        self._gatherer = Gatherer(self.tensor_group, gather_bytes)
        self.stage, self.num_stages = stage, num_stages
        self.data_rank = data_rank
        self.everywhere = False  # whether all ranks get the tensors; set it on all alike, before the first pass
        self._manifest: Manifest | None = None
        self._stays = stays
        self._lasting: list[Fill] = []
        self._only_copies = True  # whether conversions do more
        self._copies: list[list[tuple[Copy, ...]]] = []  # of each part

    @property
    def is_sender(self) -> bool:
        return self.data_rank == 0 and (self.tensor_group is None or self.tensor_group.rank() == 0)

    @property
    def gives(self) -> bool:
        return self.is_sender or self.everywhere

    def manifest(self) -> Manifest:
        """This stage's tensors in order. The first call walks the units once, without converting or sending anything."""
        if self._manifest is None:
            specs = []
            for item in (item for unit in self.units() for item in unit):
                specs += self._specs(item)
                places = [("", 0)] * self._gatherer.num_shards(item)
                self._only_copies &= self._trace(item, places) is not None
            self._manifest = Manifest(tuple(specs))
        return self._manifest

    @torch.no_grad()
    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for fill in self._walk():
            for shards in fill.shards:
                yield from self._convert(shards.member, shards.tensors(fill.memory))

    def parts(self) -> Iterator[Part] | None:
        """The same as iterating, as memory and what is to be copied out of it. None where conversions do more than to copy.

        Every rank must iterate it to the end.
        """
        self.manifest()
        return self._parts() if self._only_copies else None

    @torch.no_grad()
    def _parts(self) -> Iterator[Part]:
        for number, fill in enumerate(self._walk()):
            if number == len(self._copies):
                traced = (self._trace(each.member, each.places) for each in fill.shards)
                self._copies.append([copies for each in traced for copies in each or ()])
            yield Part(self._copies[number], fill.memory)

    def _trace(self, item: WeightItem, places: list[Place]) -> list[tuple[Copy, ...]] | None:
        def convert(shards: list[torch.Tensor]) -> list[torch.Tensor]:
            return [tensor for _, tensor in self._convert(item, shards)]

        return trace(convert, item.tensor.shape, item.tensor.dtype, places)

    def merge_error(self) -> float:
        """|round(W + D) - (W + D)| / |D| over the whole model at the last pass, D the adapters' update; 0 without one.

        Near 1 the model's dtype swallows the update. Collective over all ranks.
        """
        sums = self._gatherer.merge_sums.clone()
        if dist.is_initialized():
            dist.all_reduce(sums)
        lost, moved = sums.tolist()
        return math.sqrt(lost / moved) if moved else 0.0

    def _specs(self, item: WeightItem) -> list[TensorSpec]:
        shadow = torch.empty(item.tensor.shape, dtype=item.tensor.dtype, device="meta")
        converted = self._convert(item, [shadow] * self._gatherer.num_shards(item))
        return [
            TensorSpec(hf_name, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for hf_name, t in converted
        ]

    def _convert(self, item: WeightItem, shards: list[torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        # mbridge 0.15.1 bridge.py:_weight_merge_across_tp, :_weight_to_hf_format; both only cat, chunk and view
        whole = shards[0]
        if len(shards) > 1:  # of the parameter mbridge reads these two attributes of megatron-core's
            parameter = SimpleNamespace(tensor_model_parallel=True, partition_dim=item.shard_dim)
            whole = self.hf_bridge._weight_merge_across_tp(item.name, shards, parameter)
        names, tensors = self.hf_bridge._weight_to_hf_format(item.name, whole)
        return zip(names, tensors, strict=True)

    def _walk(self) -> Iterator[Fill]:
        """Part by part: gather, and on the sender give what came together."""
        self._gatherer.merge_sums.zero_()
        for fill in self._fills():
            fill.run()
            if self.gives:
                yield fill

    def _fills(self) -> Iterator[Fill]:
        """Of all parts; the same ones again where the parameters have stayed in their place, or came back to it."""
        if self._stays and self._lasting and all(fill.is_current() for fill in self._lasting):
            yield from self._lasting
            return
        former, self._lasting = iter(self._lasting), []
        units = self.units()
        for members in [[member for unit in units for member in unit]] if self._stays else units:
            self._gatherer.merge_sums = self._gatherer.merge_sums.to(members[0].tensor.device)
            for part in self._gatherer.cut(members) if self.data_rank == 0 or self.everywhere else ():
                fill = next(former, None)
                if fill is None or not fill.is_current(part):
                    fill = Fill(part, self._gatherer)
                self._lasting.append(fill)
                yield fill
