"""Parts of an exporter in one process: what conversions compute, what is merged, values that change, memory that moves.

That exports of real models are right over ranks: test_engine.py, test_lora.py.

    python -m pytest tests/bridge/export/test_gather.py
"""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from bridge.export.exporter import Exporter, Position
from bridge.export.merge import merge_into
from bridge.export.source import whole_tensors
from bridge.layout.manifest import TensorSpec


class Adapter(NamedTuple):
    a: torch.Tensor
    b: torch.Tensor
    scale: float


class Item(NamedTuple):
    name: str
    tensor: torch.Tensor
    shard_dim: int | None = None
    adapter: Adapter | None = None
    expert_names: tuple[str, ...] = ()
    is_stack: bool = False


class Conversions:
    """Norms are computed, as Gemma's are, and narrowed; fused linears come apart by heads; the rest stays."""

    def _weight_to_hf_format(self, name: str, tensor: torch.Tensor) -> tuple[list[str], list[torch.Tensor]]:
        if name.endswith("norm"):
            return [name, f"{name}.half"], [tensor + 1, tensor.half()]
        if name.endswith("fused"):
            heads = tensor.view(2, 3, -1, tensor.shape[1])
            parts = [heads[:, :2].reshape(-1, tensor.shape[1]), heads[:, 2].reshape(-1, tensor.shape[1])]
            return [f"{name}.q", f"{name}.k"], parts
        return [name], [tensor]


def make_units(seed: int = 0) -> list[list[Item]]:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    adapted = Item("0.out", draw(8, 6), 1, Adapter(draw(2, 6), draw(8, 2), 0.5))
    return [
        [Item("embedding", draw(10, 6))],
        [Item("0.norm", draw(6)), Item("0.fused", draw(12, 6), 0), adapted, Item("0.last_norm", draw(6).half())],
        [Item("1.norm", draw(6))],
    ]


def expected(units: list[list[Item]]) -> dict[str, torch.Tensor]:
    tensors = {}
    for item in (item for unit in units for item in unit):
        value = item.tensor
        if item.adapter is not None:
            value = merge_into(torch.empty_like(value), value, item.adapter.a, item.adapter.b, item.adapter.scale)
        tensors |= dict(zip(*Conversions()._weight_to_hf_format(item.name, value), strict=True))
    return tensors


@pytest.mark.parametrize("is_in_place", [True, False])
@pytest.mark.parametrize("gather_bytes", [1, 10_000])
def test_parts_are_what_the_conversions_give(is_in_place, gather_bytes) -> None:
    """Pass after pass: the same memory while it stays, other values in it, and memory elsewhere."""
    units = make_units()
    source = Exporter(lambda: iter(units), Conversions(), gather_bytes=gather_bytes, is_in_place=is_in_place)
    assert [(spec.name, spec.dtype) for spec in source.manifest().tensors][1:3] == [
        ("0.norm", "float32"), ("0.norm.half", "float16"),
    ]  # fmt: skip
    former: list[tuple[object, list[str]]] = []
    for change in ("none", "values", "memory"):
        if change == "values":
            for item in (item for unit in units for item in unit):
                item.tensor.neg_()
        if change == "memory":
            for item in (item for unit in units for item in unit):
                item.tensor.data = item.tensor.clone() + 2
        tensors = {name: tensor.clone() for name, tensor in whole_tensors(source)}
        wanted = expected(units)
        assert list(tensors) == list(wanted) == [spec.name for spec in source.manifest().tensors]
        for spec in source.manifest().tensors:
            assert torch.equal(tensors[spec.name], wanted[spec.name]), (change, spec)
            dtype = str(wanted[spec.name].dtype).removeprefix("torch.")
            assert spec == TensorSpec(spec.name, dtype, tuple(wanted[spec.name].shape))
        parts = list(source.parts())
        form = [(part.copies, list(part.memory)) for part in parts]
        assert former in ([], form)
        former = form


def test_ranks_without_tensors_walk_along() -> None:
    units, walks = make_units(), []

    def walk():
        walks.append(1)
        yield from units
        walks.append(2)

    source = Exporter(walk, Conversions(), Position(data_rank=1))
    assert not source.has_tensors and not source.is_sender
    assert len(source.manifest().tensors) == len(expected(units))
    assert list(source.parts()) == [] and dict(whole_tensors(source)) == {}
    assert walks == [1, 2] * 3
    everywhere = Exporter(walk, Conversions(), Position(data_rank=1), on_all_ranks=True)
    assert [name for name, _ in whole_tensors(everywhere)] == list(expected(units))
