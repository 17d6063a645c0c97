"""Quantised sources against a plain quantiser, bit for bit: parts cut anywhere, tensors in pieces, values of any size.

    python -m pytest tests/bridge/export/test_fp8.py
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bridge.export import fp8
from bridge.export.source import Part, whole_tensors
from bridge.layout.digest import as_bytes
from bridge.layout.manifest import Manifest, TensorSpec
from bridge.layout.quantised import is_quantised, quantised_manifest
from bridge.layout.regions import Copy, Region, contiguous
from tests.support.sources import DictSource

NAMES = ("self_attn.q_proj", "mlp.down_proj", "mlp.experts.11.up_proj", "block_sparse_moe.experts.0.w2")
NUMBERS = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
FINITE = NUMBERS[NUMBERS.isfinite()].unique().numpy()  # of float8_e4m3fn, in order


def plain(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The nearest numbers of the format, of two that are as near the one whose last bit is 0, found one by one."""
    wide = weight.float().numpy()
    scales = np.maximum(np.abs(wide).max(1, keepdims=True) * np.float32(1 / 448), np.float32(2.0**-60))
    quotients = (wide / scales).clip(-448, 448)
    right = np.searchsorted(FINITE, quotients).clip(1, len(FINITE) - 1)
    low, high = FINITE[right - 1], FINITE[right]
    below, above = quotients.astype(np.float64) - low, high.astype(np.float64) - quotients
    is_odd = as_bytes(torch.from_numpy(low).to(torch.float8_e4m3fn)).numpy().reshape(low.shape) % 2 == 1
    values = np.where((above < below) | ((above == below) & is_odd), high, low)
    signed = np.copysign(values, quotients)  # zeros keep the sign
    return torch.from_numpy(signed).to(torch.float8_e4m3fn), torch.from_numpy(scales)


def make(seed: int, dtype: torch.dtype = torch.bfloat16, rows: int = 24, columns: int = 48) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    tensors = {"model.embed_tokens.weight": draw(10, columns)}
    for layer in range(2):
        for name in NAMES:
            tensors[f"model.layers.{layer}.{name}.weight"] = draw(rows, columns) * 10.0 ** draw(rows, 1).clamp(-3, 3)
        tensors[f"model.layers.{layer}.self_attn.q_proj.bias"] = draw(rows)
        tensors[f"model.layers.{layer}.mlp.gate.weight"] = draw(4, columns)
    tensors["model.layers.1.mlp.down_proj.weight"][3] = 0
    tensors["lm_head.weight"] = draw(10, columns)
    return {name: tensor.to(dtype) for name, tensor in tensors.items()}


def check(found: dict[str, torch.Tensor], tensors: dict[str, torch.Tensor]) -> None:
    expected = dict[str, torch.Tensor]()
    for name, tensor in tensors.items():
        expected |= dict(zip((name, f"{name}_scale"), plain(tensor), strict=True)) if is_quantised(name) else {name: tensor}
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape, name
        assert torch.equal(as_bytes(found[name].cpu()), as_bytes(tensor)), name


def taken(source: fp8.QuantisedSource) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in whole_tensors(source)}


class Halves(DictSource):
    """Each matrix lies in two pieces, as over tensor-parallel ranks: its first columns, and the others."""

    def parts(self) -> Iterator[Part]:
        for part in super().parts():
            memory, copies = dict[str, torch.Tensor](), list[tuple[Copy, ...]]()
            for name, flat in part.memory.items():
                tensor = self.tensors[name]
                if tensor.ndim == 1:
                    memory[name] = flat
                    copies.append((Copy(contiguous(len(flat)), name, contiguous(len(flat))),))
                    continue
                rows, columns = tensor.shape
                half = columns // 2
                memory[name] = torch.cat([tensor[:, :half].reshape(-1), tensor[:, half:].reshape(-1)])
                sides = (Copy(Region(at, rows, half, columns), name, Region(at * rows, rows, half, half)) for at in (0, half))
                copies.append(tuple(sides))
            yield Part(copies, memory)


@given(st.integers(0, 2**32 - 1), st.sampled_from([torch.bfloat16, torch.float16]), st.integers(1, 20), st.integers(1, 4000))
def test_tensors_are_those_of_a_plain_quantiser(seed: int, dtype: torch.dtype, part_size: int, run_elements: int) -> None:
    source = DictSource(make(seed, dtype), part_size=part_size)
    quantised = fp8.QuantisedSource(source)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fp8, "RUN_ELEMENTS", run_elements)
        check(taken(quantised), source.tensors)
        source.tensors = make(seed + 1, dtype)  # the next pass
        check(taken(quantised), source.tensors)
    assert quantised.manifest() == quantised_manifest(source.manifest())


def test_weights_in_pieces_are_put_together_first() -> None:
    source = Halves(make(7))
    check(taken(fp8.QuantisedSource(source)), source.tensors)


def test_a_sync_has_half_the_bytes_and_the_scales() -> None:
    spec = TensorSpec("model.layers.3.mlp.up_proj.weight", "bfloat16", (64, 32))
    sent = quantised_manifest(Manifest((spec,)))
    assert [(each.dtype, each.shape, each.num_bytes) for each in sent.tensors] == [
        ("float8_e4m3fn", (64, 32), 2048), ("float32", (64, 1), 256),
    ]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "columns"), [(24, 48), (130, 5000), (16, 2048)])
def test_the_kernel_gives_the_bits_of_a_plain_quantiser(dtype: torch.dtype, rows: int, columns: int) -> None:
    for kind in (DictSource, Halves):
        tensors = make(rows, dtype, rows, columns)
        source = kind({name: tensor.cuda() for name, tensor in tensors.items()})
        quantised = fp8.QuantisedSource(source)
        for _ in range(2):
            check(taken(quantised), tensors)
