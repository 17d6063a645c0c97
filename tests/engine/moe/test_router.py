"""Routers of expert layers: shared experts, the load-balancing loss, and experts that a rollout had.

python -m pytest tests/engine/moe/test_router.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.squares import COLOURS
from tests.support.ranks import run_ranks
from tests.support.tiny_models import write_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("model"), "qwen3_moe", num_experts=8, num_experts_per_tok=3))


@pytest.mark.parametrize("gated", [True, False])
def test_a_layer_with_a_shared_expert_equals_transformers(gated: bool) -> None:
    (worst,) = run_ranks(1, "tests.engine.moe.router_cases:shared_expert", {"gated": gated})
    assert worst < 1e-6


def test_a_layer_that_is_computed_again_goes_through_the_experts_of_its_own_pass() -> None:
    (worst,) = run_ranks(1, "tests.engine.moe.router_cases:recomputed_layer", {})
    assert worst == 0.0


def test_the_load_balancing_loss_is_that_of_transformers_by_layer_and_micro_batch(model: str) -> None:
    """A mean over tokens; padding and stand-ins count nothing; in `full` the layers run twice."""
    cases: list[dict[str, Any]] = [
        {"expert": 2},
        {"wrap": "megatron_fsdp", "expert": 2, "recompute": "full"},
        {"tensor": 2, "sequence": True},
        {"pipeline": 2},
        {"context": 2, "expert": 2},
        {"context": 2, "context_attention": "ulysses", "wrap": "megatron_fsdp", "recompute": "full"},
    ]
    ranks = run_ranks(2, "tests.engine.moe.router_cases:balance_against_hf", {"path": model, "cases": cases})
    for case, first, second in zip(cases, *ranks, strict=True):
        print(case, first, second)
        assert first["num_microbatches"] >= 2
        assert first["loss"] > 1.0
        assert max(first["num_compared"], second["num_compared"]) > 10
        for found in (first, second):
            assert found["difference"] < 1e-5 and found["worst"] < 1e-5


@COLOURS
def test_given_experts_are_gone_through_as_in_transformers(model: str, tmp_path: Path, is_black: bool) -> None:
    """Of all tokens: log-probs, gradients and gaps; the router's own choice, given, changes no bit. Also with biases."""
    cases: list[dict[str, Any]] = [
        {"expert": 2},
        {"wrap": "megatron_fsdp", "expert": 2, "recompute": "full"},
        {"tensor": 2, "sequence": True, "recompute": "selective", "recompute_modules": ("layernorm", "mlp_act", "moe")},
        {"pipeline": 2},
        {"context": 2, "context_attention": "ulysses", "wrap": "megatron_fsdp", "recompute": "full"},
        {"context": 2, "expert": 2},
    ]
    biased = str(write_tiny_model(tmp_path, "glm4_moe", num_hidden_layers=2))
    others = run_ranks(2, "tests.engine.moe.router_cases:replay_against_hf", {"path": biased, "cases": cases[1:2]})
    cases = cases[is_black::2]
    ranks = run_ranks(2, "tests.engine.moe.router_cases:replay_against_hf", {"path": model, "cases": cases})
    for case, *each in zip([*cases, biased], *(one + other for one, other in zip(ranks, others, strict=True)), strict=True):
        for found in each:
            print(case, found)
            assert found.pop("own same") and not found.pop("drawn same")
            assert found.pop("moved") == pytest.approx(5 / 8, abs=0.05)
            assert max(found.values()) < 1e-4
