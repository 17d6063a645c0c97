"""Parts of gpt-oss in one process: sinks, weights in MXFP4, stacks of experts over ranks; and a folder in MXFP4 that is trained.

In more layouts: test_families.py, test_context.py.

    python -m pytest tests/engine/model/test_gpt_oss.py
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from engine.model.build import _bridge_class
from engine.model.families import mxfp4
from tests.support.ranks import run_ranks
from tests.support.tiny_models import write_tiny_model

HEADS, SIZE = 4, 8
CODES = range(256)


@settings(deadline=None, max_examples=25)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=4), st.sampled_from([0, 3]))
def test_sinks_and_their_gradients_are_those_of_transformers(lengths: list[int], window: int) -> None:
    """Of packed sequences, each alone, in float64; and sinks are said to be different on tensor-parallel ranks."""
    from engine.attention.core import CoreAttention
    from engine.batch.packed import PackedSequences
    from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

    size = (window - 1, 0) if window else None
    config = SimpleNamespace(
        no_rope_freq=None, window_size=size, window_attn_skip_freq=[1], softmax_type="learnable", params_dtype=torch.float32,
        num_attention_heads=HEADS, tensor_model_parallel_size=1,
    )  # fmt: skip
    attention = CoreAttention(config, 1, None, "self")
    sinks: Any = attention.softmax_offset
    assert sinks.tensor_model_parallel and sinks.partition_dim == 0
    torch.nn.init.normal_(sinks)
    generator = torch.Generator().manual_seed(sum(lengths))
    shapes = [(sum(lengths), heads, SIZE) for heads in (HEADS, 2, 2)]
    mine = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    packed = PackedSequences.from_lengths(lengths, torch.device("cpu"))
    out = attention(*mine, packed_seq_params=packed)
    theirs = [x.detach().double().requires_grad_() for x in mine]
    layer = SimpleNamespace(sinks=sinks.detach().double().requires_grad_(), num_key_value_groups=2, training=False)
    pieces = []
    for parts in zip(*(x.split(lengths) for x in theirs), strict=True):
        number = len(parts[0])
        seen = torch.ones(number, number, dtype=torch.bool).tril()
        seen = seen.triu(1 - window) if window else seen
        mask = torch.zeros(number, number, dtype=torch.float64).masked_fill(~seen, -torch.inf)
        q, k, v = (x.transpose(0, 1)[None] for x in parts)
        pieces.append(eager_attention_forward(layer, q, k, v, mask, SIZE**-0.5)[0][0].flatten(1))
    expected = torch.cat(pieces)
    seed = torch.randn(out.shape, generator=generator)
    out.backward(seed)
    expected.backward(seed.double())
    for a, b in [(out, expected), (sinks.grad, layer.sinks.grad), *((a.grad, b.grad) for a, b in zip(mine, theirs, strict=True))]:
        torch.testing.assert_close(a, b.float(), rtol=0, atol=1e-5)


def test_mxfp4_is_decoded_by_its_formula() -> None:
    """Every byte, with every scale that bfloat16 has; the lower four bits come first."""
    scales = torch.arange(8, 248, dtype=torch.uint8).view(2, 30, 4)
    blocks = torch.tensor(CODES, dtype=torch.uint8).repeat(2 * 30 * 4 * 16 // len(CODES)).view(2, 30, 4, 16)
    numbers = torch.tensor([sign * number for sign in (1, -1) for number in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)])
    pairs = torch.stack((numbers[(blocks & 15).long()], numbers[(blocks >> 4).long()]), -1).flatten(-2)
    values = (pairs.double() * 2.0 ** (scales.double() - 127)[..., None]).to(torch.bfloat16)
    expected = values.flatten(2).transpose(1, 2)
    decoded = mxfp4.decode(blocks, scales)
    assert decoded.shape == (2, 4 * 32, 30)
    assert torch.equal(decoded, expected)
    assert torch.equal(mxfp4.Packed(blocks, scales)[1:2], expected[1:])


@settings(deadline=None)
@given(
    st.sampled_from([1, 2]), st.sampled_from([1, 2, 4]), st.sampled_from(["fc1_stack", "fc1_biases", "fc2_stack", "fc2_biases"]),
)
def test_stacks_of_experts_come_back(experts: int, ranks: int, part: str) -> None:
    """From Hugging Face's tensor to tensor-parallel ranks' shards, and back."""
    made = _bridge_class("gpt_oss").__new__(_bridge_class("gpt_oss"))
    made.config, made.dtype = SimpleNamespace(num_moe_experts=experts), torch.float32
    made.mpu = SimpleNamespace(ep_size=1, ep_rank=0, tp_size=ranks)
    name = f"decoder.layers.0.mlp.experts.linear_{part}.weight"
    sizes, split = {"fc1_stack": ((3, 8), 2), "fc1_biases": ((8,), 1), "fc2_stack": ((4, 3), 1), "fc2_biases": ((3,), None)}[part]
    held = torch.randn(experts, *sizes)
    whole = made._weight_to_mcore_format(name, [held])
    shape = list(held.shape)
    if split is not None:
        shape[split] //= ranks
    shard = torch.empty(shape).flatten(0, 1)
    parameter = SimpleNamespace(partition_dim=None if split is None else split - 1)
    shards = list(made._weight_split_across_tp(name, whole, shard, ranks))
    assert all(each.shape == shard.shape for each in shards)
    merged = made._weight_merge_across_tp(name, shards, parameter)
    names, (tensor,) = made._weight_to_hf_format(name, merged)
    assert torch.equal(tensor, held) and len(names) == 1


def write_packed(folder: Path, **config: int) -> Path:
    """A model in MXFP4 as published, beside which `plain` is the same in bfloat16. `config`: fields of config.json."""
    path = write_tiny_model(folder / "packed", "gpt_oss", dtype=torch.bfloat16, intermediate_size=64, **config)
    plain = write_tiny_model(folder / "plain", "gpt_oss", dtype=torch.bfloat16, intermediate_size=64, **config)
    tensors = load_file(path / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    decoded = dict(tensors)
    for name in [name for name in tensors if name.endswith("_proj") and ".experts." in name]:
        experts, into, out = tensors.pop(name).shape
        blocks = torch.randint(0, 256, (experts, out, into // 32, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(119, 124, (experts, out, into // 32), dtype=torch.uint8, generator=generator)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        decoded[name] = mxfp4.decode(blocks, scales)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    save_file(decoded, plain / "model.safetensors", {"format": "pt"})
    file = path / "config.json"
    fields = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    return path


@pytest.mark.long
@pytest.mark.parametrize("layout", [{}, {"expert": 2, "wrap": "megatron_fsdp"}, {"tensor": 2, "sequence": True}])
def test_a_folder_in_mxfp4_is_trained_and_exported_in_bfloat16(tmp_path: Path, layout: dict[str, Any]) -> None:
    from megasync.models.folder import check_model_folder

    path = write_packed(tmp_path)
    check_model_folder(path)
    plain = tmp_path / "plain"
    num_ranks = 2 if layout else 1
    arguments = {"path": str(path), "plain": str(plain), "folder": str(tmp_path / "out"), **layout}
    results = run_ranks(num_ranks, "tests.engine.model.family_cases:exported_folder", arguments)
    assert all(result["differing"] == [] for result in results)
    fields = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in fields and fields["dtype"] == "bfloat16"
    written, held = load_file(tmp_path / "out" / "model.safetensors"), load_file(plain / "model.safetensors")
    assert written.keys() == held.keys() and all(torch.equal(written[name], held[name]) for name in held)
    check_model_folder(tmp_path / "out")


def test_a_replica_reads_a_folder_in_mxfp4_as_the_trainer_does(tmp_path: Path) -> None:
    from bridge.layout.manifest import read_folder_manifest
    from bridge.vllm.weights import gpt_oss

    path = write_packed(tmp_path)
    made = dict(gpt_oss.unpacked(load_file(path / "model.safetensors").items()))
    plain = load_file(tmp_path / "plain" / "model.safetensors")
    assert made.keys() == plain.keys() and all(torch.equal(made[name], plain[name]) for name in plain)
    held = gpt_oss.unpacked_manifest(read_folder_manifest(path))
    assert held.by_name == read_folder_manifest(tmp_path / "plain").by_name
