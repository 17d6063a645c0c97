"""Driven against plain torch on transformers, and several adapters in turns against each alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.ranks import run_ranks
from tests.support.tiny_models import write_tiny_model

from engine.config import LATENT_TARGETS
from engine.shared import groups

CASES = "tests.engine.driven_cases"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("driven"), "qwen3", tied=True, num_hidden_layers=2))


def check(worst: dict[str, float]) -> None:
    """Adam divides small gradients by their own size, and so enlarges their rounding."""
    assert max(worst[name] for name in ("log_probs", "loss", "norm")) < 1e-5
    assert worst["weights"] < 1e-4


@pytest.mark.parametrize(("rank", "layout"), [(8, {}), (3, {}), (8, {"tensor": 2}), (8, {"pipeline": 2}), (8, {"context": 2})])
def test_losses_gradients_and_steps_are_those_of_torch(model: str, rank: int, layout: dict[str, int]) -> None:
    (found, *_) = run_ranks(2 if layout else 1, f"{CASES}:against_torch", {"path": model, "rank": rank, "parallel": layout})
    for loss, worst in found.items():
        print(loss, worst)
        check(worst)


EXPERTS = [
    ("qwen3_moe", 1, {}),
    ("qwen3_moe", 2, {"expert": 2}),
    ("glm4_moe_lite", 2, {"tensor": 2, "sequence": True}),
]


@pytest.mark.parametrize(("family", "num_ranks", "layout"), EXPERTS)
def test_attention_beside_frozen_experts(tmp_path: Path, family: str, num_ranks: int, layout: dict[str, Any]) -> None:
    path = str(write_tiny_model(tmp_path, family, num_hidden_layers=2))
    targets = {"qwen3_moe": ("linear_qkv", "linear_proj"), "glm4_moe_lite": LATENT_TARGETS}[family]
    given = {"path": path, "parallel": layout, "targets": targets}
    if num_ranks == 1:
        (found, *_) = run_ranks(num_ranks, f"{CASES}:against_torch", {**given, "rank": 8})
        for loss, worst in found.items():
            print(loss, worst)
            check(worst)
    for equal in run_ranks(num_ranks, f"{CASES}:in_turns", given):
        assert equal == dict.fromkeys(equal, True)


@pytest.mark.parametrize(("num_ranks", "layout"), [(1, {}), (2, {}), (2, {"tensor": 2}), (2, {"pipeline": 2})])
def test_all_parameters_are_trained_as_in_torch(model: str, num_ranks: int, layout: dict[str, int]) -> None:
    for found in run_ranks(num_ranks, f"{CASES}:all_parameters", {"path": model, "parallel": layout}):
        print(found)
        check(found)
        assert found["base"] and found["resumed"] and found["saved"]


def test_all_parameters_in_16_bits(model: str) -> None:
    """With main weights of the optimizer's own, which are an adapter's state."""
    (found,) = run_ranks(1, f"{CASES}:all_parameters", {"path": model, "parallel": {}, "dtype": "bfloat16"})
    assert found["base"] and found["resumed"] and found["saved"]
    assert max(found[name] for name in ("log_probs", "loss", "norm", "weights")) < 0.05


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_adapters_in_turns_have_the_bits_of_each_alone(model: str, num_ranks: int) -> None:
    for equal in run_ranks(num_ranks, f"{CASES}:in_turns", {"path": model, "parallel": {}}):
        assert equal == dict.fromkeys(equal, True)


@pytest.mark.parametrize(("num_ranks", "layout"), [(1, {}), (2, {"tensor": 2})])
def test_adapters_of_several_ranks_leave_by_one_exporter(model: str, num_ranks: int, layout: dict[str, int]) -> None:
    for equal in run_ranks(num_ranks, f"{CASES}:shown", {"path": model, "parallel": layout}):
        assert equal == dict.fromkeys(equal, True)


TOGETHER = [
    (1, {}, {"tokens_per_microbatch": 512}),
    (1, {}, {"tokens_per_microbatch": 96, "recompute": "full"}),
    (2, {}, {"tokens_per_microbatch": 96}),
    (2, {"tensor": 2}, {"tokens_per_microbatch": 512}),
    (2, {"tensor": 2, "sequence": True}, {"tokens_per_microbatch": 160, "recompute": "full"}),
    (2, {"pipeline": 2}, {"tokens_per_microbatch": 512}),
    (2, {"context": 2}, {"tokens_per_microbatch": 512}),
    pytest.param(4, {"tensor": 2, "sequence": True, "pipeline": 2}, {"tokens_per_microbatch": 512}, marks=pytest.mark.long),
    (4, {"tensor": 2, "sequence": True}, {"tokens_per_microbatch": 160}),
]


@pytest.mark.parametrize(("num_ranks", "layout", "options"), TOGETHER)
def test_adapters_in_one_pass_have_the_bits_of_each_alone(
    model: str, num_ranks: int, layout: dict[str, Any], options: dict[str, Any]
) -> None:
    losses = ("cross_entropy", "ppo", "gspo", "cispo")
    for equal in run_ranks(num_ranks, f"{CASES}:together", {"path": model, "losses": losses, "parallel": layout, **options}):
        assert equal == dict.fromkeys([*losses, "shared"], True)


@given(st.lists(st.lists(st.integers(1, 50), min_size=1, max_size=6), min_size=1, max_size=6), st.integers(1, 100))
def test_micro_batches_side_by_side(sizes: list[list[int]], most: int) -> None:
    found = groups(sizes, most)
    assert sorted(each for group in found for each in group) == [(n, i) for n, own in enumerate(sizes) for i in range(len(own))]
    for owner in range(len(sizes)):
        assert [i for group in found for number, i in group if number == owner] == list(range(len(sizes[owner])))
    for group in found:
        assert len({owner for owner, _ in group}) == len(group)
        assert len(group) == 1 or sum(sizes[owner][index] for owner, index in group) <= most


def test_grpo_by_four_calls_is_the_product_s(model: str) -> None:
    (worst,) = run_ranks(1, f"{CASES}:as_grpo", {"path": model})
    print(worst)
    assert max(worst["loss"], worst["norm"]) < 1e-5
    assert worst["weights"] < 1e-4


def test_refusals_change_nothing(model: str) -> None:
    (found,) = run_ranks(1, f"{CASES}:refusals", {"path": model})
    assert set(found) == {"rank", "twice", "nothing", "unknown", "loss", "norm", "only decayed"}
    assert (found["norm"], found["only decayed"]) == ("0.0", "True")


def test_data_parallel_ranks_compute_the_same(model: str, tmp_path: Path) -> None:
    (found, *_) = run_ranks(2, f"{CASES}:against_torch", {"path": model, "rank": 8, "parallel": {}})
    for worst in found.values():
        check(worst)
