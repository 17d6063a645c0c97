"""Driven against plain torch on transformers, and several adapters in turns against each alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.ranks import run_ranks
from tests.support.tiny_models import write_tiny_model

from engine.config import LATENT_TARGETS, LORA_TARGETS
from engine.shared import groups

CASES, TORCH, SHARED = (f"tests.engine.driven_{kind}" for kind in ("cases", "torch_cases", "shared_cases"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("driven"), "qwen3", tied=True, num_hidden_layers=2))


def check(worst: dict[str, float]) -> None:
    """Adam divides small gradients by their own size, and so enlarges their rounding."""
    assert max(worst[name] for name in ("log_probs", "loss", "norm")) < 1e-5
    assert worst["weights"] < 1e-4


FSDP: dict[str, Any] = {"wrap": "megatron_fsdp"}
TWO_LOSSES: dict[str, Any] = {"losses": ("cross_entropy", "gspo")}


@pytest.mark.parametrize(("rank", "layout"), [(8, {}), (3, {}), (8, {"tensor": 2}), (8, {"pipeline": 2}), (8, {"context": 2})])
def test_losses_gradients_and_steps_are_those_of_torch(model: str, rank: int, layout: dict[str, int]) -> None:
    """All losses once; in other layouts one of tokens and one of sequences."""
    given = {"path": model, "rank": rank, "parallel": layout} | (TWO_LOSSES if layout or rank < 8 else {})
    (found, *_) = run_ranks(2 if layout else 1, f"{TORCH}:against_torch", given)
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
        (found, *_) = run_ranks(num_ranks, f"{TORCH}:against_torch", {**given, "rank": 8, **TWO_LOSSES})
        for loss, worst in found.items():
            print(loss, worst)
            check(worst)
    for equal in run_ranks(num_ranks, f"{CASES}:in_turns", given):
        assert equal == dict.fromkeys(equal, True)


ALL: list[Any] = [(1, {}, {}), (2, {"tensor": 2}, {}), (2, {"pipeline": 2}, {}), (2, {}, FSDP)]
ALL.append(pytest.param(2, {}, {}, marks=pytest.mark.long))


OF_EXPERTS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"expert": 2}, {}),
    ({"tensor": 2, "sequence": True}, {}),
    ({}, FSDP),
    ({"expert": 2}, FSDP),
]


ALONE = pytest.param(1, {}, {}, marks=pytest.mark.long)  # what two ranks do includes it


@pytest.mark.parametrize(("num_ranks", "layout", "options"), [ALONE, (2, {"expert": 2}, {}), (2, {}, FSDP)])
def test_adapters_of_experts_in_turns(tmp_path: Path, num_ranks: int, layout: dict[str, int], options: dict[str, Any]) -> None:
    path = str(write_tiny_model(tmp_path, "qwen3_moe", num_hidden_layers=2))
    for equal in run_ranks(num_ranks, f"{CASES}:in_turns", {"path": path, "parallel": layout, **options}):
        assert equal == dict.fromkeys(equal, True)


def test_an_adapter_is_not_read_where_it_would_compute_something_else(model: str, tmp_path: Path) -> None:
    """Its tensors have the same shapes and numbers there: of other layers, of another scale, beside another base."""
    other = str(write_tiny_model(tmp_path / "other", "qwen3", tied=True, seed=1, num_hidden_layers=2))
    others: dict[str, dict[str, Any]] = {"none": {}, "engine.parallel.pipeline = 1": {"parallel": {"pipeline": 2}}}
    others |= {"engine.lora.alpha = 16.0": {"alpha": 8.0}, "model.dtype = float32": {"dtype": "bfloat16"}}
    others |= {"model.path = ": {"path": other}, "engine.lora.targets = ": {"targets": LORA_TARGETS[:3]}}
    others |= {"former, alike": {}, "former: engine.lora": {"rank": 5}}
    for said in run_ranks(2, f"{CASES}:read_by_others", {"path": model, "folder": str(tmp_path), "others": others}):
        assert said.keys() == others.keys() - {"none", "former, alike"}
        assert "another model.path" in said.pop("former: engine.lora")
        assert all(f"was saved with {name}" in text for name, text in said.items()), said


def test_adapters_of_experts_are_those_of_peft_in_any_layout(tmp_path: Path) -> None:
    path = str(write_tiny_model(tmp_path / "model", "qwen3_moe", num_hidden_layers=2))
    (tmp_path / "adapter").mkdir()
    given = {"path": path, "folder": str(tmp_path / "adapter")}
    (alone,) = run_ranks(1, f"{CASES}:of_experts", {**given, "parallel": {}})
    assert alone["peft"] < 1e-5
    for layout, options in OF_EXPERTS:
        (found, *_) = run_ranks(2, f"{CASES}:of_experts", {**given, "parallel": layout, **options})
        assert all(torch.equal(tensor, alone["start"][key]) for key, tensor in found["start"].items())
        gaps = [float((tensor - found["end"][key]).abs().max()) for key, tensor in alone["end"].items()]
        assert max(gaps) < 1e-5, (layout, options)


@pytest.mark.parametrize(("num_ranks", "layout", "options"), ALL)
def test_all_parameters_are_trained_as_in_torch(
    model: str, num_ranks: int, layout: dict[str, int], options: dict[str, Any]
) -> None:
    for found in run_ranks(num_ranks, f"{TORCH}:all_parameters", {"path": model, "parallel": layout, **options}):
        print(found)
        check(found)
        assert found["base"] and found["resumed"] and found["saved"]


def test_all_parameters_of_experts_are_trained_as_in_torch(tmp_path: Path) -> None:
    path = str(write_tiny_model(tmp_path, "qwen3_moe", num_hidden_layers=2))
    for found in run_ranks(2, f"{TORCH}:all_parameters", {"path": path, "parallel": {"expert": 2}}):
        check(found)
        assert found["base"] and found["resumed"] and found["saved"]


def test_all_parameters_in_16_bits(model: str) -> None:
    """With main weights of the optimizer's own, which are an adapter's state."""
    (found,) = run_ranks(1, f"{TORCH}:all_parameters", {"path": model, "parallel": {}, "dtype": "bfloat16"})
    assert found["base"] and found["resumed"] and found["saved"]
    assert max(found[name] for name in ("log_probs", "loss", "norm", "weights")) < 0.05


IN_TURNS = [
    ALONE,
    (2, {}, {}),
    pytest.param(2, {}, FSDP, marks=pytest.mark.long),
    (2, {}, {**FSDP, "dtype": "bfloat16", "gradient_dtype": "bfloat16"}),
    (2, {"tensor": 2, "sequence": True}, FSDP),
    pytest.param(2, {"pipeline": 2}, FSDP, marks=pytest.mark.long),
    pytest.param(2, {}, {"overrides": {"overlap_param_gather": True}}, marks=pytest.mark.long),
    pytest.param(2, {}, {**FSDP, "overrides": {"data_parallel_sharding_strategy": "optim"}}, marks=pytest.mark.long),
    pytest.param(4, {"tensor": 2, "sequence": True}, {**FSDP, "dtype": "bfloat16"}, marks=pytest.mark.long),
    pytest.param(4, {"pipeline": 2}, FSDP, marks=pytest.mark.long),
]


@pytest.mark.parametrize(("num_ranks", "layout", "options"), IN_TURNS)
def test_adapters_in_turns_have_the_bits_of_each_alone(
    model: str, num_ranks: int, layout: dict[str, Any], options: dict[str, Any]
) -> None:
    for equal in run_ranks(num_ranks, f"{CASES}:in_turns", {"path": model, "parallel": layout, **options}):
        assert equal == dict.fromkeys(equal, True)


@pytest.mark.parametrize(("num_ranks", "layout", "options"), [ALONE, (2, {"tensor": 2}, {}), (2, {}, FSDP)])
def test_adapters_of_several_ranks_leave_by_one_exporter(
    model: str, num_ranks: int, layout: dict[str, int], options: dict[str, Any]
) -> None:
    for equal in run_ranks(num_ranks, f"{CASES}:shown", {"path": model, "parallel": layout, **options}):
        assert equal == dict.fromkeys(equal, True)


TOGETHER = [
    (1, {}, {"tokens_per_microbatch": 512}),
    pytest.param(1, {}, {"tokens_per_microbatch": 96, "recompute": "full"}, marks=pytest.mark.long),
    (2, {}, {"tokens_per_microbatch": 96}),
    pytest.param(2, {"tensor": 2}, {"tokens_per_microbatch": 512}, marks=pytest.mark.long),
    (2, {"tensor": 2, "sequence": True}, {"tokens_per_microbatch": 160, "recompute": "full"}),
    (2, {"pipeline": 2}, {"tokens_per_microbatch": 512}),
    (2, {"context": 2}, {"tokens_per_microbatch": 512}),
    pytest.param(4, {"tensor": 2, "sequence": True, "pipeline": 2}, {"tokens_per_microbatch": 512}, marks=pytest.mark.long),
    pytest.param(4, {"tensor": 2, "sequence": True}, {"tokens_per_microbatch": 160}, marks=pytest.mark.long),
]


@pytest.mark.parametrize(("num_ranks", "layout", "options"), TOGETHER)
def test_adapters_in_one_pass_have_the_bits_of_each_alone(
    model: str, num_ranks: int, layout: dict[str, Any], options: dict[str, Any]
) -> None:
    losses = ("cross_entropy", "ppo", "gspo", "cispo")
    for equal in run_ranks(num_ranks, f"{SHARED}:together", {"path": model, "losses": losses, "parallel": layout, **options}):
        assert equal == dict.fromkeys([*losses, "shared"], True)


def test_one_product_of_all_adapters_is_that_of_each(model: str) -> None:
    """As on GPUs; forward in two products of each linear."""
    (found,) = run_ranks(1, f"{SHARED}:grouped", {"path": model})
    assert found["difference"] < 1e-5
    assert found["products"] == 2 * 4 * 2  # of 4 linears in 2 layers


def test_passes_are_not_shared_where_rows_change_others_bits(model: str) -> None:
    """One rank has such products; rank 0 says so."""
    for rank, found in enumerate(run_ranks(2, f"{SHARED}:unstable", {"path": model})):
        assert found == {"cross_entropy": True, "ppo": True, "shared": False, "lines": int(rank == 0)}


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


@pytest.mark.parametrize("options", [{}, FSDP])
def test_data_parallel_ranks_compute_the_same(model: str, options: dict[str, Any]) -> None:
    (found, *_) = run_ranks(2, f"{TORCH}:against_torch", {"path": model, "rank": 8, "parallel": {}, **TWO_LOSSES, **options})
    for worst in found.values():
        check(worst)
