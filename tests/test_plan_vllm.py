"""The baked plan of vLLM's own models, linears and experts too: bit for bit what their loaders load, and what is read back.

Also on tensor-parallel ranks.

On CPUs vLLM packs these after loading, so that plans of running replicas leave them out; here that step is left out.

    python -m pytest tests/test_plan_vllm.py
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks import run_ranks
from tests.tiny_models import SERVED, write_tiny_model

# experts first, since vLLM builds their group only with the others, for a first model that has some
FAMILIES = ("deepseek_v3", "glm4_moe", "qwen2_moe", "qwen3_moe", "qwen2", "qwen3", "llama")
TIED = ("qwen3",)
SIZES = {"deepseek_v3": SERVED}


@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_every_parameter_of_unquantised_models_is_planned(tmp_path: Path, tensor_parallel: int) -> None:
    def write(family: str, seed: int) -> str:
        sizes = {"vocab_size": 130, **SIZES.get(family, {})}
        return str(write_tiny_model(tmp_path / f"{family}{seed}", family, family in TIED, seed, **sizes))

    folders = {family: [write(family, seed) for seed in range(2)] for family in FAMILIES}
    arguments = {"families": folders, "tensor_parallel": tensor_parallel}
    all_results = run_ranks(tensor_parallel, "tests.plan_cases:planned_models", arguments, alone=True)
    for rank, results in enumerate(all_results):
        for family, result in results.items():
            assert result["fallback"] == {} and result["problem"] == "", family
            is_told = family == "deepseek_v3" and rank == 0
            stale = "vLLM holds different values of model.layers.0.self_attn.kv_b_proj.weight in layers that share it"
            assert result["stale"] == stale * is_told
            assert result["unplanned"] == [], family
            assert result["differing"] == [], family
            assert result["read_back"] == [], family
            assert result["digests"] == [], family
            is_told = tensor_parallel == 2 and rank == 0
            assert result["disagreement"] == "workers of one replica hold different values of model.norm.weight" * is_told
            assert result["num_parameters"] > 20
