"""Ranks that read other weights, each from a folder of its own, do not train."""

from __future__ import annotations

import json
import re
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from safetensors.torch import load_file, save_file

from engine.alike import CHUNK, digest
from tests.engine.model.lora_cases import write_peft_adapter
from tests.support.ranks import run_ranks
from tests.support.tiny_models import write_tiny_model

LORA = {"rank": 4, "alpha": 8.0}
NORM, QUERY = "model.norm.weight", "model.layers.0.self_attn.q_proj.weight"
EXPERT = "model.layers.1.mlp.experts.3.down_proj.weight"
Change = Callable[[dict[str, torch.Tensor]], object]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("alike")


def other(folder: str, to: Path, change: Change, file: str = "model.safetensors", **fields: Any) -> str:
    """A copy of a folder with other values."""
    shutil.copytree(folder, to)
    tensors = load_file(to / file)
    change(tensors)
    save_file(tensors, to / file, {"format": "pt"})
    if fields:
        (to / "config.json").write_text(json.dumps(json.loads((to / "config.json").read_text()) | fields))
    return str(to)


def one_bit(name: str) -> Change:
    """The lowest of the last value."""
    return lambda tensors: tensors[name].view(-1).view(torch.int32)[-1].bitwise_xor_(1)


def test_ranks_with_other_weights_do_not_train(root: Path) -> None:
    """Each message is the same on both ranks, and names the node, the rank and the tensor."""
    model = str(write_tiny_model(root / "model", "qwen3", True, num_hidden_layers=2))
    experts = str(write_tiny_model(root / "experts", "qwen3_moe", False, num_hidden_layers=2))
    adapter = str(write_peft_adapter(root / "adapter", model, shared=True))
    key = "base_model.model.model.layers.1.mlp.down_proj.lora_B.weight"
    scaled = other(model, root / "scaled", lambda tensors: [tensor.mul_(1.01) for tensor in tensors.values()])
    bit, norm = (other(model, root / name, one_bit(tensor)) for name, tensor in (("bit", QUERY), ("norm", NORM)))
    expert = other(experts, root / "expert", one_bit(EXPERT))
    bent = other(adapter, root / "bent", one_bit(key), "adapter_model.safetensors")
    theta = other(model, root / "theta", lambda _: 0, rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    layers = other(model, root / "layers", lambda tensors: [tensors[name].mul_(2) for name in tensors if ".layers." in name])
    routed = other(experts, root / "routed", lambda tensors: [tensors[name].mul_(2) for name in tensors if ".experts." in name])
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("decoder.layers.0.self_attention.linear_qkv.weight differs", {"paths": (model, bit)}),
        ("decoder.final_layernorm.weight differs", {"paths": (model, norm), "wrap": "megatron_fsdp"}),
        ("so do 17 more", {"paths": (model, scaled), "dtype": "bfloat16"}),
        ("so do 17 more", {"paths": (model, scaled), "context": 2, "wrap": "megatron_fsdp"}),
        ("linear_qkv.weight differs", {"paths": (model, bit), "lora": LORA}),
        ("decoder.layers.1.mlp.linear_fc2.lora_b differs", {"paths": (model,) * 2, "adapters": (adapter, bent), "lora": LORA}),
        ("decoder.layers.1.mlp.experts.linear_fc2.weight differs", {"paths": (experts, expert)}),
        (".experts.0.down_proj.weight differs", {"paths": (experts, routed), "expert": 2}),
        ("embedding.word_embeddings.weight differs", {"paths": (model, scaled), "pipeline": 2}),
        ("model.layers.0.input_layernorm.weight differs", {"paths": (model, layers), "pipeline": 2}),
        ("model.embed_tokens.weight differs", {"paths": (model, scaled), "tensor": 2}),
        ("rope_parameters differs", {"paths": (model, theta)}),
    ]
    same_adapter = other(adapter, root / "same_adapter", lambda _: 0, "adapter_model.safetensors")
    right: list[dict[str, Any]] = [
        {"paths": (model, other(model, root / "same", lambda _: 0))},
        {"paths": (model, other(model, root / "same_too", lambda _: 0)), "pipeline": 2},
        {"paths": (experts, other(experts, root / "same_experts", lambda _: 0)), "expert": 2},
        {"paths": (model,) * 2, "adapters": (adapter, same_adapter), "lora": LORA},
    ]
    holed = other(model, root / "holed", lambda tensors: tensors[QUERY].view(-1)[7].fill_(torch.nan))
    cases = [*(case for _, case in wrong), *right, {"paths": (holed, model), "tensor": 2}]
    results = run_ranks(2, "tests.engine.alike_cases:messages", {"cases": cases})
    texts = [[re.sub(r"/\S+", "FOLDER", message) for message in messages] for messages in results]  # each rank's own, here
    assert texts[0] == texts[1]
    for (words, case), message in zip(wrong, results[0], strict=False):
        print(message)
        assert words in message, case
        assert f"rank 1 on node {socket.gethostname()}" in message and f"rank 0 on node {socket.gethostname()}" in message
        assert case["paths"][0] in message or case["paths"][1] in message
    assert results[0][len(wrong) : -1] == [""] * len(right)
    assert results[0][-1].startswith("rank 0 on node ") and "linear_qkv.weight of " in results[0][-1]


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 3 * CHUNK["cpu"]), st.sampled_from([torch.float32, torch.bfloat16, torch.float64]), st.data())
def test_a_digest_is_of_values_and_positions(size: int, dtype: torch.dtype, data: st.DataObject) -> None:
    tensor = torch.randn(size, generator=torch.Generator().manual_seed(size)).to(dtype)
    index, bit = data.draw(st.integers(0, size - 1)), data.draw(st.integers(0, 8 * tensor.element_size() - 1))
    changed = tensor.clone().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])
    top = 8 * tensor.element_size() - 1
    changed[index] ^= -(1 << top) if bit == top else 1 << bit
    first = int(digest(tensor))
    assert int(digest(tensor.clone()[None])) == first
    assert int(digest(changed.view(dtype))) != first
    place = data.draw(st.integers(0, size - 1))
    swapped = tensor.clone()
    swapped[[index, place]] = swapped[[place, index]]
    assert (int(digest(swapped)) == first) == torch.equal(swapped.view(changed.dtype), tensor.view(changed.dtype))
