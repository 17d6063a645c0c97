"""The engine against itself (wraps, layouts) and against transformers, on real ranks over gloo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.support.ranks import run_ranks
from tests.support.tiny_models import write_tiny_model

WRAPS = ("ddp", "megatron_fsdp")
FAMILIES = ("qwen2", "qwen3", "llama", "qwen3_moe")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, bool], str]:
    root = tmp_path_factory.mktemp("models")
    return {
        (family, tied): str(write_tiny_model(root / f"{family}_{tied}", family, tied))
        for family in FAMILIES
        for tied in (False, True)
    }


@pytest.fixture(scope="module")
def shallow(tmp_path_factory: pytest.TempPathFactory) -> str:
    """For long runs of many cases: a layer for each of two stages."""
    return str(write_tiny_model(tmp_path_factory.mktemp("shallow"), "qwen3", tied=True, num_hidden_layers=2))


def fit(case: dict[str, Any]) -> dict[str, Any]:
    """With sequence parallelism, where the model's tensor parallelism wants it."""
    return {**case, "sequence": True} if "qwen3_moe" in case["path"] and case.get("tensor", 1) > 1 else case


def assert_close(a: list[tuple[float, float]], b: list[tuple[float, float]], tolerance: float) -> None:
    for step, (x, y) in enumerate(zip(a, b, strict=True)):
        for name, first, second in zip(("loss", "gradient norm"), x, y, strict=True):
            bound = tolerance * max(1.0, abs(second))
            assert abs(first - second) <= bound, f"step {step}: {name} {first} against {second}"


def test_wraps_and_layouts_train_alike(shallow: str) -> None:
    """Same data, fp32: loss and gradient norm equal to 1e-5; more families in test_families.py, more layouts in bench."""
    one = [{"path": shallow, "wrap": wrap, "name": "grpo", "num_minibatches": 2} for wrap in ("ddp", "megatron_fsdp")]
    two: list[dict[str, Any]] = [
        *one,
        {**one[0], "tensor": 2, "logits_chunk_tokens": 50},
        {**one[1], "tensor": 2, "recompute": "selective"},
        {**one[0], "tensor": 2, "sequence": True},
        {**one[0], "pipeline": 2, "recompute": "selective", "recompute_modules": ("mlp", "core_attn")},
        {**one[0], "overrides": {"overlap_grad_reduce": True}},
        {**one[0], "pipeline": 2, "fusions": "all", "logits_chunk_tokens": 16, "overrides": {"overlap_grad_reduce": True}},
        {**one[0], "tensor": 2, "sequence": True, "fusions": "all", "logits_chunk_tokens": 16},
        {**one[1], "fusions": "all", "recompute": "full", "recompute_inputs": "host", "logits_chunk_tokens": 16},
    ]
    reference, fsdp = run_ranks(1, "tests.engine.engine_cases:losses", {"cases": one, "num_steps": 4})[0]
    assert_close(fsdp, reference, 1e-5)
    results = run_ranks(2, "tests.engine.engine_cases:losses", {"cases": two, "num_steps": 4})[0]
    for case, result in zip(two, results, strict=True):
        print(case)
        assert_close(result, reference, 1e-5)


GRADIENT_NORMS = "tests.engine.wrap.fsdp_cases:gradient_norms"


@pytest.fixture(scope="module")
def gradients_alone(models: dict[tuple[str, bool], str], shallow: str) -> dict[str, Any]:
    """Of DDP on one rank, by the model's path."""
    paths = (shallow, models["llama", False])
    results = run_ranks(1, GRADIENT_NORMS, {"cases": [{"path": path, "tokens": 60} for path in paths], "num_steps": 4})[0]
    return {path: result["history"] for path, result in zip(paths, results, strict=True)}


@pytest.mark.parametrize("num_ranks", [*(pytest.param(number, marks=pytest.mark.long) for number in (1, 2)), 4])
def test_unclipped_gradients_are_equal_over_many_microbatches(gradients_alone: dict[str, Any], num_ranks: int) -> None:
    """Megatron-FSDP alone, sharded, in stages and both, against DDP on one rank; embeddings tied across the stages and not.

    On four ranks the untied model's stages are chunks, under DDP, too, where reductions and gathers overlap.
    """
    paths, tokens = list(gradients_alone), 60 if num_ranks == 1 else 30
    staged = {"pipeline": 2, "logits_chunk_tokens": 16}
    layouts: list[dict[str, Any]] = [staged] if num_ranks == 4 else [{}, staged][:num_ranks]
    cases = [{"path": path, "wrap": "megatron_fsdp", "tokens": tokens, **layout} for path in paths for layout in layouts]
    if num_ranks == 4:
        cases[1] |= {"stages": {"virtual_pipeline": 2}}
        overlaps = {"overlap_grad_reduce": True, "overlap_param_gather": True}
        cases.append({**cases[1], "wrap": "ddp", "overrides": overlaps})
    ranks = run_ranks(num_ranks, GRADIENT_NORMS, {"cases": cases, "num_steps": 4}, alone=num_ranks == 4)
    for number, case in enumerate(cases):
        print(case)
        assert all(rank[number]["num_microbatches"] >= 4 for rank in ranks)
        assert_close(ranks[0][number]["history"], gradients_alone[case["path"]], 1e-5)


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "TP1": (1, {}),
    "TP2": (2, {"tensor": 2}),
    "PP2": (2, {"pipeline": 2}),
    "DP2-late-gather": (2, {"overrides": {"overlap_param_gather": True}}),
    "DP2-FSDP": (2, {"wrap": "megatron_fsdp"}),
    "PP2-FSDP": (2, {"pipeline": 2, "wrap": "megatron_fsdp"}),
    "PP2xDP2-FSDP": (4, {"pipeline": 2, "wrap": "megatron_fsdp"}),
    "TP2xDP2-FSDP": (4, {"tensor": 2, "wrap": "megatron_fsdp"}),
}


@pytest.mark.parametrize("num_ranks", [pytest.param(1, marks=pytest.mark.long), 2, 4])
def test_export_equals_the_folder_bit_for_bit(models: dict[tuple[str, bool], str], num_ranks: int) -> None:
    layouts = [layout for ranks, layout in LAYOUTS.values() if ranks == num_ranks]
    alone = num_ranks == 4  # nobody else needs that many
    some = [models[each] for each in (("qwen3", True), ("llama", False), ("qwen3_moe", False))]
    paths = list(models.values()) if num_ranks == 1 else some
    cases = [fit({"path": path, **layout}) for path in paths for layout in layouts]
    ranks = run_ranks(num_ranks, "tests.engine.engine_cases:export_differences", {"cases": cases}, alone=alone)
    for number, case in enumerate(cases):
        results = [rank[number] for rank in ranks]
        senders = [result for result in results if result["sender"]]
        names = [name for result in senders for name in result["names"]]
        print(case, len(names))
        assert len(senders) == case.get("pipeline", 1)
        assert sorted(names) == results[0]["disk"], "each tensor once, over all stages"
        assert sorted(name for r in senders for name in r["manifest"]) == results[0]["disk"]
        for result in results:
            assert result["differing"] == [] and result["specs_match"] and result["copied"]
            assert result["sender"] or not result["names"]
            assert not result["sender"] or result["moved"] == len(result["names"]), "training moved every tensor"


def test_experts_are_chosen_and_weighted_as_by_transformers(tmp_path: Path) -> None:
    """Weights of the chosen that do not sum to 1, and experts that get no token at all."""
    path = str(write_tiny_model(tmp_path, "qwen3_moe", num_experts=40, norm_topk_prob=False, moe_intermediate_size=32))
    cases = [{"path": path, "tokens": 30}, {"path": path, "fusions": "all"}]
    worst = run_ranks(1, "tests.engine.engine_cases:log_probs_against_hf", {"cases": cases})[0]
    assert max(worst) < 1e-4, worst
    case = {"path": path, "name": "sft", "tokens": 30}
    results = run_ranks(1, "tests.engine.engine_cases:losses", {"cases": [case, {**case, "fusions": "all"}], "num_steps": 3})[0]
    assert_close(*results, 1e-5)


def test_first_ratio_is_one_for_any_mix_of_lengths(shallow: str) -> None:
    """Old and current log-probs come from the same code at the same positions."""
    cases = [{"wrap": "ddp"}, {"wrap": "megatron_fsdp"}, {"wrap": "ddp", "fusions": "all"}]
    arguments = {"path": shallow, "cases": cases, "max_examples": 20}
    for ratios in run_ranks(2, "tests.engine.engine_cases:first_ratios", arguments)[0]:
        assert len(ratios) >= 20
        assert max(abs(ratio - 1) for ratio in ratios) < 1e-6


def test_resumed_run_equals_the_uninterrupted_one(shallow: str, tmp_path: Path) -> None:
    """Losses and gradient norms bit for bit; the export gives transformers' log-probs (compared in fp32)."""
    cases: list[dict[str, Any]] = [{"wrap": wrap, "dtype": "bfloat16", "fusions": "all"} for wrap in WRAPS]
    cases += [{"wrap": wrap, "pipeline": 2, "dtype": "float32"} for wrap in WRAPS]
    arguments = {"path": shallow, "root": str(tmp_path), "cases": cases, "steps": 4, "stop": 2}
    for case, result in zip(cases, run_ranks(2, "tests.engine.engine_cases:resumed_losses", arguments)[0], strict=True):
        print(case)
        assert result["resumed"] == result["whole"]
        assert result["kept"] == ["step_00000004"]
        assert case["dtype"] == "bfloat16" or result["worst"] < 1e-4


def test_a_warm_up_and_offload_between_steps_change_nothing(shallow: str, models: dict[tuple[str, bool], str]) -> None:
    """Losses, gradient norms and final log-probs bit for bit; what was taken off the device was really given up."""
    cases: list[dict[str, Any]] = [{"path": shallow, "wrap": wrap, "dtype": "bfloat16"} for wrap in WRAPS]
    cases += [{**case, "kinds": ("gradients", "optimizer")} for case in cases]
    cases.append({"path": models["qwen3_moe", False], "wrap": "megatron_fsdp"})
    cases.append({"path": shallow, "wrap": "ddp", "dtype": "float16", "lora": {"rank": 4, "dropout": 0.5}, "pipeline": 2})
    arguments = {"cases": cases, "num_steps": 2}
    for case, result in zip(cases, run_ranks(2, "tests.engine.engine_cases:offloaded_losses", arguments)[0], strict=True):
        print(case, result)
        assert result["same"]
        assert result["left"] == 0 or "kinds" in case
        assert result["freed"] > 0
