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
    experts: tuple[tuple[str, ...], ...] = ()
    is_stack: bool = False


class Conversions:
    """Norms are computed, as Gemma's are, and narrowed; fused linears come apart by heads, experts in halves; the rest stays."""

    def _weight_to_hf_format(self, name: str, tensor: torch.Tensor) -> tuple[list[str], list[torch.Tensor]]:
        if name.endswith("norm"):
            return [name, f"{name}.half"], [tensor + 1, tensor.half()]
        if name.endswith("fused"):
            heads = tensor.view(2, 3, -1, tensor.shape[1])
            parts = [heads[:, :2].reshape(-1, tensor.shape[1]), heads[:, 2].reshape(-1, tensor.shape[1])]
            return [f"{name}.q", f"{name}.k"], parts
        if "experts" in name:
            return [f"{name}.gate", f"{name}.up"], list(tensor.chunk(2))
        return [name], [tensor]


def make_units(device: str = "cpu") -> list[list[Item]]:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device)

    adapted = Item("0.out", draw(8, 6), 1, Adapter(draw(2, 6), draw(8, 2), 0.5))
    names = tuple((f"0.experts{number}",) for number in range(3))
    experts = Item("0.experts", draw(3 * 4, 6), 0, Adapter(draw(3 * 2, 6), draw(3 * 4, 2), 0.25), names)
    return [
        [Item("embedding", draw(10, 6))],
        [Item("0.norm", draw(6)), Item("0.fused", draw(12, 6), 0), adapted, experts, Item("0.last_norm", draw(6).half())],
        [Item("1.experts", draw(3 * 8, 6), 0, None, tuple((f"1.{name}",) for (name,) in names)), Item("1.norm", draw(6))],
    ]


def expected(units: list[list[Item]]) -> dict[str, torch.Tensor]:
    tensors = {}
    for item in (item for unit in units for item in unit):
        parts, factors = len(item.experts) or 1, item.adapter[:2] if item.adapter is not None else ()
        for number, (value, *own) in enumerate(zip(*(each.chunk(parts) for each in (item.tensor, *factors)), strict=True)):
            name = item.experts[number][0] if item.experts else item.name
            merged = merge_into(torch.empty_like(value), value, *own, item.adapter.scale) if item.adapter is not None else value
            tensors |= dict(zip(*Conversions()._weight_to_hf_format(name, merged), strict=True))
    return tensors


def tensors_of(units: list[list[Item]]) -> list[torch.Tensor]:
    items = [item for unit in units for item in unit]
    return [tensor for item in items for tensor in (item.tensor, *(item.adapter[:2] if item.adapter is not None else ()))]


def change(units: list[list[Item]], kind: str) -> None:
    """Other values where they are, in other memory, or in memory that has been away, as an offload leaves it."""
    for tensor in tensors_of(units):
        if kind == "values":
            tensor.neg_()
        if kind == "memory":
            tensor.data = tensor.clone() + 2
        if kind == "storages":
            storage, held = tensor.untyped_storage(), tensor.clone()
            size = storage.nbytes()
            storage.resize_(0)
            held = held.clone()  # in what was freed
            storage.resize_(size)
            tensor.copy_(held * 3)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("is_in_place", [True, False])
@pytest.mark.parametrize("gather_bytes", [1, 10_000])
def test_parts_are_what_the_conversions_give(is_in_place, gather_bytes, device) -> None:
    """Pass after pass: the same memory while it stays, other values in it, memory elsewhere. Each adapter is merged as alone."""
    units = make_units(device)
    source = Exporter(lambda: iter(units), Conversions(), gather_bytes=gather_bytes, is_in_place=is_in_place)
    assert [(spec.name, spec.dtype) for spec in source.manifest().tensors][1:3] == [
        ("0.norm", "float32"), ("0.norm.half", "float16"),
    ]  # fmt: skip
    former: list[tuple[object, list[str]]] = []
    for kind in ("none", "values", "memory", "storages", "values"):
        change(units, kind)
        tensors = {name: tensor.clone() for name, tensor in whole_tensors(source)}
        wanted = expected(units)
        assert list(tensors) == list(wanted) == [spec.name for spec in source.manifest().tensors]
        for spec in source.manifest().tensors:
            assert torch.equal(tensors[spec.name], wanted[spec.name]), (kind, spec)
            dtype = str(wanted[spec.name].dtype).removeprefix("torch.")
            assert spec == TensorSpec(spec.name, dtype, tuple(wanted[spec.name].shape))
        parts = list(source.parts())
        form = [(part.copies, list(part.memory)) for part in parts]
        assert former in ([], form)
        former = form


def test_a_manifest_needs_no_memory_of_the_weights() -> None:
    """They may be offloaded."""
    units = make_units()
    sizes = [tensor.untyped_storage().nbytes() for tensor in tensors_of(units)]
    for tensor in tensors_of(units):
        tensor.untyped_storage().resize_(0)
    source = Exporter(lambda: iter(units), Conversions(), is_in_place=True)
    manifest = source.manifest()
    for tensor, size in zip(tensors_of(units), sizes, strict=True):
        tensor.untyped_storage().resize_(size)
        tensor.fill_(1)
    assert [spec.name for spec in manifest.tensors] == list(expected(units))
    assert all(torch.equal(tensor, expected(units)[name]) for name, tensor in whole_tensors(source))


def test_a_scale_that_changes_is_merged_with() -> None:
    units = make_units()
    source = Exporter(lambda: iter(units), Conversions())
    before = {name: tensor.clone() for name, tensor in whole_tensors(source)}
    units[1][2:4] = [item._replace(adapter=item.adapter._replace(scale=-1.0)) for item in units[1][2:4]]
    after = {name: tensor.clone() for name, tensor in whole_tensors(source)}
    assert all(torch.equal(after[name], tensor) for name, tensor in expected(units).items())
    assert not torch.equal(after["0.out"], before["0.out"])


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
