"""Kernels of other libraries, by `engine.kernels`: how they are chosen, and that what is trained with them is the same."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.ranks import run_ranks
from tests.support.tiny_models import write_tiny_model

HAS_LIBRARIES = all(find_spec(name) for name in ("transformer_engine", "flash_attn_interface"))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("libraries")
    return {
        "tied": str(write_tiny_model(root / "tied", "qwen3", tied=True, num_hidden_layers=2)),
        "untied": str(write_tiny_model(root / "untied", "qwen2", tied=False, num_hidden_layers=2)),
        "experts": str(write_tiny_model(root / "experts", "qwen3_moe", tied=False, num_hidden_layers=2)),
        "latent": str(write_tiny_model(root / "latent", "deepseek_v3", tied=False)),
    }


def test_gradients_that_linears_add_themselves_are_the_same(models: dict[str, str]) -> None:
    """DDP, fp32: with tied embeddings, several chunks of logits, stages, shards, adapters, experts, frozen weights, recompute."""
    tied, untied = models["tied"], models["untied"]
    cases: list[dict[str, Any]] = [
        {"path": tied, "name": "grpo", "kl_coefficient": 0.01, "num_minibatches": 2},
        {"path": tied, "name": "grpo", "tensor": 2, "sequence": True, "logits_chunk_tokens": 16},
        {"path": tied, "name": "sft", "pipeline": 2, "overrides": {"overlap_grad_reduce": True}},
        {"path": untied, "name": "sft", "recompute": "full", "optimizer": {"offload": True}},
        {"path": untied, "name": "sft", "gradient_dtype": "bfloat16", "overrides": {"overlap_param_gather": True}},
        {"path": untied, "name": "sft", "lora": {"rank": 4}},
        {"path": models["experts"], "name": "sft", "expert": 2},
        {"path": models["latent"], "name": "sft", "recompute": "selective"},
    ]
    found = run_ranks(2, "tests.engine.wrap.library_cases:losses_with_and_without", {"cases": cases, "num_steps": 3})
    for with_product, without, num_calls in found:
        assert num_calls > 0
        for case, one, other in zip(cases, with_product, without, strict=True):
            print(case)
            for step, expected in zip(one, other, strict=True):
                assert step == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_short_microbatches_before_chunks_of_logits_lose_no_gradient(models: dict[str, str]) -> None:
    """Of the short ones the linear adds the output layer's gradient itself, of those read in chunks autograd does."""
    tied, untied = models["tied"], models["untied"]
    common = {"name": "sft", "tokens": 24, "logits_chunk_tokens": 16, "optimizer": {"clip_grad_norm": 0.0}}
    cases: list[dict[str, Any]] = [
        {"path": untied},
        {"path": untied, "overrides": {"overlap_grad_reduce": True}},
        {"path": untied, "pipeline": 2},
        {"path": tied},
        {"path": tied, "pipeline": 2},
    ]
    arguments = {"cases": [common | case for case in cases], "lengths": [14, 14, 13, 12, 11, 10]}
    for found in run_ranks(2, "tests.engine.wrap.library_cases:steps_with_and_without", arguments):
        for case, (with_product, without, tokens, num_calls) in zip(cases, found, strict=True):
            print(case, tokens, with_product, without)
            assert num_calls > 0
            assert tokens == ([14, 14, 23, 23] if "pipeline" in case else [14, 23])
            for step, expected in zip(with_product, without, strict=True):
                assert step == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_without_a_gpu_auto_is_torch_and_te_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from engine.wrap import kernels
    from engine.config import EngineConfig

    assert kernels.choose(EngineConfig(kernels="torch"), "bfloat16") == kernels.Kernels("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    chosen = kernels.choose(EngineConfig(wrap="ddp"), "bfloat16")
    assert (chosen.weight_gradients, chosen.adam) == ("torch", "torch")
    assert chosen.left_out == tuple(f"{name} needs an NVIDIA GPU, and there is none" for name in ("apex", "TransformerEngine"))
    assert "weight gradients torch (apex needs an NVIDIA GPU" in chosen.describe("torch", "")
    for wrap, dtype in (("megatron_fsdp", "bfloat16"), ("ddp", "float32")):
        assert kernels.choose(EngineConfig(wrap=wrap), dtype) == kernels.Kernels("auto"), "nothing to choose"
    with pytest.raises(ValueError, match=r"engine.kernels = torch: another engine of this process has engine.kernels=auto"):
        kernels.choose(EngineConfig(kernels="torch"), "bfloat16")
    del chosen
    with pytest.raises(ValueError, match=r"engine.kernels = te: TransformerEngine needs an NVIDIA GPU.*engine.kernels=auto"):
        kernels.choose(EngineConfig(kernels="te"), "bfloat16")


def test_a_product_is_tried_before_it_is_used() -> None:
    """For main gradients in either precision."""
    from engine.wrap import kernels
    from tests.engine.wrap.library_cases import TorchProduct, torch_product

    with torch_product(), pytest.MonkeyPatch.context() as patch:
        for dtype in (torch.float32, torch.bfloat16):
            assert kernels._accumulates(dtype)
        for name in ("wgrad_gemm_accum_fp32", "wgrad_gemm_accum_fp16"):
            patch.setattr(TorchProduct, name, lambda inputs, gradient, main: main.copy_(gradient.t() @ inputs))
        for dtype in (torch.float32, torch.bfloat16):
            assert not kernels._accumulates(dtype), "it replaces and does not add"


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_LIBRARIES, reason="TransformerEngine and FlashAttention 3 are not installed")
@pytest.mark.parametrize("wrap", ["ddp", "megatron_fsdp"])
def test_kernels_of_other_libraries_train_alike(wrap: str, tmp_path: Path) -> None:
    """bf16 on one GPU, heads of 64: and runs go on with another Adam."""
    path = str(write_tiny_model(tmp_path / "model", "qwen2", tied=True, hidden_size=256, num_attention_heads=4))
    (found,) = run_ranks(1, "tests.engine.wrap.library_cases:trained_with", {"path": path, "wrap": wrap, "root": str(tmp_path)})
    assert "torch and cuDNN" in found["torch"]["reported"]
    assert found["torch"]["adam"] == found["auto"]["adam"] == {"AdamW"}
    assert found["te"]["adam"] == {"FusedAdam"}
    for name in ("auto", "te"):
        assert "attention FlashAttention 3;" in found[name]["reported"]
        assert ("weight gradients torch" in found[name]["reported"]) == (wrap == "megatron_fsdp")
    whole = found["torch"]["history"]
    print(found)
    for name in ("auto", "te"):
        for step, expected in zip(found[name]["history"], whole, strict=True):
            assert step == pytest.approx(expected, rel=2e-2)
    for name in ("torch to te", "te to torch", "te to te"):
        for step, expected in zip(found[name], whole[2:], strict=True):
            assert step == pytest.approx(expected, rel=2e-2)
