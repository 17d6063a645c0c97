"""The baked plan against toy loaders: whatever it scatters is what the loaders would have loaded, bit for bit.

python -m pytest tests/bridge/layout/test_plan.py
"""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from bridge.layout.regions import matching_regions
from bridge.receive.bake import bake
from bridge.layout.plan import LoadPlan
from bridge.receive.unpack import Unpacker
from bridge.layout.bucket import Bucket, StagePlan, SyncPlan
from bridge.layout.manifest import Manifest, TensorSpec
from bridge.layout.regions import Copy, Region, slice_copy


class Fused(nn.Module):
    """A linear that two tensors are fused into, of which each worker holds a share of the rows."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8, 6, dtype=dtype), requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(8, dtype=dtype), requires_grad=False)


class Toy(nn.Module):
    """An embedding with padded rows, a fused linear, one split by columns, a norm, and a head tied to the embedding."""

    def __init__(self, rank: int = 0, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.rank = rank
        self.embed = nn.Embedding(7, 6, dtype=dtype)
        self.fused = Fused(dtype)
        self.down = nn.Linear(5, 6, bias=False, dtype=dtype)
        self.norm = nn.LayerNorm(6, bias=False, dtype=dtype)
        self.head = nn.Linear(6, 7, bias=False, dtype=dtype)
        self.head.weight = self.embed.weight
        self.requires_grad_(False)

    def load_weights(self, weights) -> None:
        for name, tensor in weights:
            layer, _, key = name.rpartition(".")
            if name == "embed.weight":
                self.embed.weight[:5].data.copy_(tensor)
                self.embed.weight[5:].data.fill_(0)
            elif layer in ("gate", "up"):
                place = 0 if layer == "gate" else 4
                getattr(self.fused, key).data[place : place + 4].copy_(tensor.narrow(0, 4 * self.rank, 4))
            elif layer == "down":
                self.down.weight.data.copy_(tensor.narrow(1, 5 * self.rank, 5))
            elif layer == "norm":
                self.norm.weight.data.copy_(self.changed(tensor))

    def changed(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


SHAPES = {
    "embed.weight": (5, 6),
    "gate.weight": (8, 6),
    "gate.bias": (8,),
    "up.weight": (8, 6),
    "up.bias": (8,),
    "down.weight": (6, 10),
    "norm.weight": (6,),
}


def manifest_of(dtype: torch.dtype, names=SHAPES) -> Manifest:
    return Manifest(tuple(TensorSpec(name, str(dtype).removeprefix("torch."), SHAPES[name]) for name in names))


def bake_toy(model: Toy, manifest: Manifest, transformed=lambda layer: None):
    return bake(manifest, model, model.load_weights, transformed)


def unpacker_of(plan: LoadPlan, bucket_bytes: int) -> tuple[Unpacker, StagePlan]:
    sync_plan = SyncPlan(plan.manifest, (len(plan.manifest.tensors),), bucket_bytes)
    return Unpacker(sync_plan, plan, torch.device("cpu")), sync_plan.stages[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("bucket_bytes", [64, 128, 4096])
def test_what_is_scattered_equals_what_is_loaded(dtype, rank, bucket_bytes) -> None:
    manifest = manifest_of(dtype)
    planned, loaded = Toy(rank, dtype), Toy(rank, dtype)
    before = {name: tensor.clone() for name, tensor in planned.state_dict().items()}
    plan = bake_toy(planned, manifest)
    assert plan.loader_fallback == {} and all(plan.copies[index] is not None for index in range(len(SHAPES)))
    assert all(torch.equal(tensor, before[name]) for name, tensor in planned.state_dict().items()), "baking changes nothing"
    unpacker, stage = unpacker_of(plan, bucket_bytes)
    for seed in range(2):  # the second time through the same buffers, whose views are kept
        generator = torch.Generator().manual_seed(seed)
        tensors = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}
        loaded.load_weights(tensors.items())
        buffers = [torch.zeros(bucket_bytes, dtype=torch.uint8) for _ in range(2)]
        for bucket in stage.buckets:
            data = buffers[bucket.index % 2]
            fill(data, bucket, manifest, tensors)
            unpacker.scatter(stage, bucket, data[: bucket.num_bytes])
        planned.embed.weight[5:] = 0  # rows of padding stay as they were loaded first
        for name, tensor in loaded.state_dict().items():
            assert torch.equal(planned.state_dict()[name], tensor), name


def test_a_plan_outlives_the_buckets_it_was_used_with() -> None:
    """The same tensors in other buckets, as after a change of stages, through the same memory."""
    manifest, model = manifest_of(torch.float32), Toy()
    plan = bake_toy(model, manifest)
    tensors = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    buffer = torch.zeros(4096, dtype=torch.uint8)
    for bucket_bytes in (128, 4096):
        unpacker, stage = unpacker_of(plan, bucket_bytes)
        for bucket in stage.buckets:
            fill(buffer, bucket, manifest, tensors)
            unpacker.scatter(stage, bucket, buffer[: bucket.num_bytes])
        assert torch.equal(model.norm.weight, tensors["norm.weight"])
        assert torch.equal(model.fused.weight[4:], tensors["up.weight"][:4])
        tensors = {name: tensor + 1 for name, tensor in tensors.items()}


def fill(buffer: torch.Tensor, bucket: Bucket, manifest: Manifest, tensors: dict[str, torch.Tensor]) -> None:
    for piece in bucket.pieces:
        raw = tensors[manifest.tensors[piece.tensor].name].view(-1).view(torch.uint8)
        part = raw[piece.tensor_offset : piece.tensor_offset + piece.num_bytes]
        buffer[piece.bucket_offset : piece.bucket_offset + piece.num_bytes] = part


def test_layers_that_a_plan_cannot_serve_are_named() -> None:
    missing = manifest_of(torch.float32, [name for name in SHAPES if name != "up.bias"])
    plan = bake_toy(Toy(), missing)
    assert plan.loader_fallback == {"fused": "4 of the 8 elements of its bias are written"}
    assert [missing.tensors[i].name for i in range(6) if plan.copies[i] is None] == ["gate.weight", "gate.bias", "up.weight"]
    manifest = manifest_of(torch.float32)
    assert bake_toy(Toy(), manifest, lambda layer: "packed" if isinstance(layer, Fused) else None).loader_fallback == {
        "fused": "packed"
    }
    computing = Toy()
    computing.changed = lambda tensor: tensor + 1
    assert bake_toy(computing, manifest).loader_fallback == {"norm": "0 of the 6 elements of its weight are written"}
    reading = Toy()
    reading.changed = lambda tensor: tensor * float(tensor.sum())
    assert list(bake_toy(reading, manifest).loader_fallback) == ["norm"]
    bits = Toy()
    bits.changed = lambda tensor: tensor.view(torch.int32)
    assert "other memory, dtype or order" in bake_toy(bits, manifest).loader_fallback["norm"]
    viewed, norm = Toy(), "norm.weight"
    viewed.load_weights = lambda weights: [
        viewed.norm.weight.data.view(torch.int32).copy_(tensor) if name == norm else Toy.load_weights(viewed, [(name, tensor)])
        for name, tensor in weights
    ]
    assert "other memory, dtype or order" in bake_toy(viewed, manifest).loader_fallback["norm"]
    twice = Toy()
    twice.load_weights = lambda weights: [Toy.load_weights(twice, [pair]) for pair in weights for _ in range(2)]
    assert "some more than once" in bake_toy(twice, manifest).loader_fallback["norm"]


class Experts(nn.Module):
    """A layer's experts, each in the slot that `slots` has for it."""

    def __init__(self, slots: dict[int, int]) -> None:
        super().__init__()
        self.slots, self.loaded = slots, list[str]()
        self.w13 = nn.Parameter(torch.zeros(len(slots), 4, 3), requires_grad=False)
        self.w2 = nn.Parameter(torch.zeros(len(slots), 3, 2), requires_grad=False)

    def load_weights(self, weights) -> None:
        for name, tensor in weights:
            self.loaded.append(name)
            expert, part = name.removeprefix("mlp.experts.").split(".")
            if (slot := self.slots.get(int(expert))) is not None:
                rows = {"gate": self.w13[slot, :2], "up": self.w13[slot, 2:], "down": self.w2[slot]}
                rows[part].data.copy_(tensor)


@pytest.mark.parametrize(
    ("slots", "num_loaded"),
    [
        pytest.param({n: n for n in range(40)}, 15, id="in their order"),  # 0, 1, 16, 32 and 39, of three parts
        pytest.param({n: 39 - n for n in range(40)}, 15, id="reversed"),
        pytest.param({n: n // 2 for n in range(0, 40, 2)}, 120, id="some of them"),
        pytest.param({n: n - 16 for n in range(16, 32)}, 120, id="those between"),
        pytest.param({n: 7 * n % 40 for n in range(40)}, 120, id="mixed"),
    ],
)
def test_experts_that_are_loaded_alike_are_planned_by_few(slots, num_loaded) -> None:
    """The plan is that of all of them; `num_loaded`: of 120 tensors, which come as two expert-parallel ranks have them."""
    shapes = {"gate": (2, 3), "up": (2, 3), "down": (3, 2)}
    order = [expert + rank for expert in range(20) for rank in (0, 20)]
    specs = [TensorSpec(f"mlp.experts.{n}.{part}", "float32", shape) for n in order for part, shape in shapes.items()]
    manifest, planned, loaded = Manifest(tuple(specs)), Experts(slots), Experts(slots)
    plan = bake(manifest, planned, planned.load_weights, lambda layer: None)
    assert plan.loader_fallback == {}
    assert len(set(planned.loaded)) == len(planned.loaded) == num_loaded
    tensors = {spec.name: torch.randn(spec.shape) for spec in specs}
    loaded.load_weights(tensors.items())
    buffer = torch.zeros(256, dtype=torch.uint8)
    unpacker, stage = unpacker_of(plan, len(buffer))
    for bucket in stage.buckets:
        fill(buffer, bucket, manifest, tensors)
        unpacker.scatter(stage, bucket, buffer[: bucket.num_bytes])
    assert torch.equal(planned.w13, loaded.w13)
    assert torch.equal(planned.w2, loaded.w2)


@pytest.mark.parametrize(("kept", "sent"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)])
def test_a_layer_that_keeps_another_dtype_is_planned(kept, sent) -> None:
    """As vLLM's gated delta nets and some routers do."""
    manifest, model, loaded = manifest_of(sent), Toy(0, kept), Toy(0, kept)
    plan = bake_toy(model, manifest)
    assert plan.is_whole and plan.loader_fallback == {}
    unpacker, stage = unpacker_of(plan, 4096)
    tensors = {name: torch.randn(shape).to(sent) for name, shape in SHAPES.items()}
    loaded.load_weights(tensors.items())
    buffer = torch.zeros(4096, dtype=torch.uint8)
    for bucket in stage.buckets:
        fill(buffer, bucket, manifest, tensors)
        unpacker.scatter(stage, bucket, buffer[: bucket.num_bytes])
    model.embed.weight[5:] = loaded.embed.weight[5:] = 0
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in loaded.state_dict().items())


def test_a_plan_notices_that_parameters_moved() -> None:
    model = Toy()
    plan = bake_toy(model, manifest_of(torch.float32))
    assert plan.is_current
    model.norm.weight.data = torch.zeros(6)
    assert not plan.is_current


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_pieces_of_a_copy_hold_each_element_once(data) -> None:
    rows, columns = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 6))
    strides = [columns + data.draw(st.integers(0, 3)) for _ in range(2)]
    source = Region(data.draw(st.integers(0, 5)), rows, columns, strides[0])
    target = Region(data.draw(st.integers(0, 5)), rows, columns, strides[1])
    end = source.offset + rows * strides[0] + 3
    borders = [0, *sorted(data.draw(st.lists(st.integers(0, end), max_size=4))), end]
    pairs = []
    for start, stop in itertools.pairwise(borders):
        parts = slice_copy(Copy(source, "p", target), start, stop)
        assert len(parts) <= 3
        for of, to in parts:
            assert (of.num_rows, of.num_columns) == (to.num_rows, to.num_columns)
            for row in range(of.num_rows):
                for column in range(of.num_columns):
                    place = start + of.offset + row * of.row_stride + column
                    assert start <= place < stop
                    pairs.append((place, to.offset + row * to.row_stride + column))
    expected = [
        (source.offset + r * strides[0] + c, target.offset + r * strides[1] + c) for r in range(rows) for c in range(columns)
    ]
    assert sorted(pairs) == expected


def test_shapes_that_two_dims_can_say() -> None:
    whole = torch.zeros(4, 3, 5)
    assert matching_regions(whole, torch.zeros(4, 3, 5)) == (Region(0, 1, 60, 60), Region(0, 1, 60, 60))
    assert matching_regions(whole[:, 1:], torch.zeros(4, 2, 5)) == (Region(5, 4, 10, 15), Region(0, 4, 10, 10))
    assert matching_regions(whole[:, :, 1:], torch.zeros(4, 3, 4)) == (Region(1, 12, 4, 5), Region(0, 12, 4, 4))
    assert matching_regions(whole[:, 1:, 1:], torch.zeros(4, 2, 4)) is None
    assert matching_regions(whole.transpose(0, 2), torch.zeros(5, 3, 4)) is None
    assert matching_regions(whole, torch.zeros(4, 15)) is None
