"""Weight items taken apart into weights, each of one conversion: an item, or one expert of it. Leaves out who gathers them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from bridge.export.source import WeightItem


class Weight(NamedTuple):
    """A unit that mbridge converts in one call: part `number` of `num_parts` equal parts of an item's rows.

    `expert_names`: empty, or of an expert the names of what each expert-parallel rank has in its place; `name` is the first.
    """

    name: str
    item: WeightItem
    expert_names: tuple[str, ...]
    number: int
    num_parts: int

    @property
    def shape(self) -> torch.Size:
        rows, *others = self.item.tensor.shape
        return torch.Size((rows // self.num_parts, *others))

    @property
    def dtype(self) -> torch.dtype:
        return self.item.tensor.dtype

    @property
    def start(self) -> int:
        """Where it begins in the item's memory, in elements."""
        return self.number * self.shape.numel()

    @property
    def tensor(self) -> torch.Tensor:
        return self._part(self.item.tensor)

    @property
    def factors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """A and B of its adapter."""
        assert self.item.adapter is not None
        return self._part(self.item.adapter.a), self._part(self.item.adapter.b)

    def _part(self, tensor: torch.Tensor) -> torch.Tensor:
        rows = len(tensor) // self.num_parts
        return tensor.detach().narrow(0, self.number * rows, rows)


def take_apart(items: Sequence[WeightItem]) -> Iterator[Weight]:
    """The weights of all items, in order. Needs no memory of theirs, which may be offloaded."""
    for item in items:
        experts = item.experts or ((item.name,),)
        for number, names in enumerate(experts):
            yield Weight(names[0], item, names if len(names) > 1 else (), number, len(experts))


def tensors_of(items: Sequence[WeightItem]) -> list[torch.Tensor]:
    """Parameters and adapters' factors."""
    found = []
    for item in items:
        found += [item.tensor] if item.adapter is None else [item.tensor, item.adapter.a, item.adapter.b]
    return found


def scales_of(items: Sequence[WeightItem]) -> list[float]:
    return [item.adapter.scale for item in items if item.adapter is not None]
