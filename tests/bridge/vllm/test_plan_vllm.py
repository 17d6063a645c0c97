"""The baked plan of vLLM's own models, linears and experts too: bit for bit what their loaders load, and what is read back.

Also on tensor-parallel ranks; experts of gpt-oss go through vLLM's loader. And layers have the windows there that they have here.

On CPUs vLLM packs these after loading, so that plans of running replicas leave them out; here that step is left out.

    python -m pytest tests/bridge/vllm/test_plan_vllm.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from engine.attention.windows import layer_windows
from engine.config import LATENT_FAMILIES, MOE_FAMILIES
from megasync.checks.fp8 import OTHER_LINEARS
from tests.support.ranks import run_ranks
from tests.support.tiny_models import DELTA_SERVED, SERVED, write_tiny_model

pytestmark = pytest.mark.vllm_on_cpu

# whether embeddings are tied; experts first, since vLLM builds their group only with the others, for a first model that has some
FAMILIES = {"deepseek_v3": False, "glm4_moe_lite": False, "kimi_k2": False, "gpt_oss": False, "glm4_moe": False}
FAMILIES |= {"qwen2_moe": False, "qwen3_moe": False, "qwen3_5_moe_text": False, "qwen3_next": False}
FAMILIES |= {"qwen2": False, "qwen3": True, "mistral": False, "gemma3_text": True, "qwen3_5_text": True, "seed_oss": False}
FAMILIES |= {"olmo3": False, "smollm3": True}
DELTA_FAMILIES = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
WINDOW = {"use_sliding_window": True, "sliding_window": 16}
CHANGES: dict[str, dict[str, Any]] = {  # windows in all layers
    **dict.fromkeys(LATENT_FAMILIES, SERVED),
    "qwen2_moe": {**WINDOW, "layer_types": ["sliding_attention"] * 2},
    "qwen3_moe": WINDOW,
    "qwen2": {**WINDOW, "max_window_layers": 0},
    "mistral": {"sliding_window": 16},
    "qwen3_5_moe_text": DELTA_SERVED,
    "qwen3_5_text": DELTA_SERVED,
    "qwen3_next": DELTA_SERVED,
}


def write(folder: Path, family: str, tied: bool, seed: int) -> Path:
    return write_tiny_model(folder, family, tied, seed, **{"vocab_size": 130, **CHANGES.get(family, {})})


@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_every_parameter_of_unquantised_models_is_planned(tmp_path: Path, tensor_parallel: int) -> None:
    folders = {
        family: [str(write(tmp_path / f"{family}{seed}", family, tied, seed)) for seed in range(2)]
        for family, tied in FAMILIES.items()
    }
    arguments = {"families": folders, "tensor_parallel": tensor_parallel}
    all_results = run_ranks(tensor_parallel, "tests.bridge.vllm.plan_cases:planned_models", arguments, alone=True)
    for rank, results in enumerate(all_results):
        for family, result in results.items():
            by_loader = {f"model.layers.{layer}.mlp.experts" for layer in range(2)} if family == "gpt_oss" else set()
            assert {name.removesuffix(".routed_experts") for name in result["fallback"]} == by_loader, family
            assert result["problem"] == "", family
            is_reported = family in LATENT_FAMILIES and rank == 0
            stale = "vLLM holds different values of model.layers.0.self_attn.kv_b_proj.weight in layers that share it"
            assert result["stale"] == stale * is_reported
            assert {name.rpartition(".")[0] for name in result["unplanned"]} == by_loader, family
            assert result["differing"] == [], family
            assert result["read_back"] == [], family
            assert result["digests"] == [], family
            assert result["windows"] == layer_windows(AutoConfig.from_pretrained(folders[family][0]).to_dict()), family
            is_reported = tensor_parallel == 2 and rank == 0
            assert result["disagreement"] == "workers of one replica hold different values of model.norm.weight" * is_reported
            assert result["num_parameters"] > 20


@pytest.mark.parametrize("tensor_parallel", [pytest.param(1, marks=pytest.mark.long), 2])
def test_layers_that_keep_parameters_in_float32_are_planned(tmp_path: Path, tensor_parallel: int) -> None:
    """In bfloat16: gated delta nets, and routers of glm4_moe."""
    kept = {"glm4_moe": "mlp.gate.weight", **dict.fromkeys(DELTA_FAMILIES, "linear_attn.A_log")}
    folders = {
        family: [
            str(write_tiny_model(tmp_path / f"{family}{seed}", family, False, seed, torch.bfloat16, **CHANGES.get(family, {})))
            for seed in range(2)
        ]
        for family in kept
    }
    arguments = {"families": folders, "tensor_parallel": tensor_parallel, "dtype": "bfloat16"}
    for results in run_ranks(tensor_parallel, "tests.bridge.vllm.plan_cases:planned_models", arguments, alone=True):
        for family, result in results.items():
            assert any(name.endswith(kept[family]) for name in result["kept_in_float32"]), family
            assert (result["fallback"], result["unplanned"], result["differing"]) == ({}, [], []), family
            assert (result["read_back"], result["digests"]) == ([], []), family


@pytest.mark.parametrize("tensor_parallel", [pytest.param(1, marks=pytest.mark.long), 2])
def test_quantised_weights_are_planned_and_read_back_bit_for_bit(tmp_path: Path, tensor_parallel: int) -> None:
    families = {"mixtral": False, **FAMILIES}
    folders = {
        family: [str(write_tiny_model(tmp_path / f"{family}{seed}", family, tied, seed, torch.bfloat16)) for seed in range(2)]
        for family, tied in families.items()
        if family not in OTHER_LINEARS
    }
    arguments = {"families": folders, "tensor_parallel": tensor_parallel}
    for results in run_ranks(tensor_parallel, "tests.bridge.vllm.plan_cases:quantised_models", arguments, alone=True):
        for family, result in results.items():
            layers = AutoConfig.from_pretrained(folders[family][0]).num_hidden_layers
            assert result["fallback"] == {}, family
            assert result["quantised"] >= (3 if family in MOE_FAMILIES else 4) * layers, family
            assert result["differing"] == [], family
            assert (result["read_back"], result["digests"]) == ([], []), family
