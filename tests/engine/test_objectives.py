"""Objectives: the same in every layout, of episodes too, and beside transformers.

python -m pytest tests/engine/test_objectives.py
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import pytest

from engine.config import EngineConfig, ModelConfig
from engine.algorithm import AlgorithmConfig
from engine.engine import Engine
from tests.support.squares import COLOURS, squares
from tests.support.ranks import run_ranks

CASES = "tests.engine.objective_cases"

OBJECTIVES: dict[str, dict[str, Any]] = {
    "GSPO": {"ratio_level": "sequence", "loss_aggregation": "sequence_mean", "clip_low": 3e-3, "clip_high": 4e-3},
    "Dr. GRPO, RLOO": {
        "loss_aggregation": "constant_length", "baseline": "leave_one_out", "normalize_advantage_by_std": False,
        "dual_clip": 1.01, "importance_level": "sequence", "importance_cap": 1.5,
    },
    "masks by sequence": {
        "importance_correction": "mask", "importance_level": "sequence", "importance_floor": 0.7,
        "truncated": "penalise", "overlong_buffer": 9, "ratio_level": "sequence",
    },
    "masks by geometric mean": {
        "importance_correction": "mask", "importance_level": "geometric", "importance_floor": 0.9, "importance_cap": 1.1,
        "truncated": "mask", "kl_coefficient": 0.1,
    },
    "masks by token": {"importance_correction": "mask", "importance_floor": 0.8, "importance_cap": 1.3, "truncated": "mask"},
}  # fmt: skip

NAMED: dict[str, dict[str, Any]] = {
    "CISPO, entropy": {"loss": "cispo", "clip_low": 0.002, "clip_high": 0.001, "entropy_coefficient": 0.05},
    "SAPO, KL in the reward": {"loss": "sapo", "kl_coefficient": 0.5, "kl_in": "reward", "kl_estimator": "k1"},
    "GMPO, REINFORCE++": {
        "loss": "gmpo", "clip_low": 0.002, "advantage": "reinforce_plus_plus", "loss_aggregation": "sequence_mean",
    },
    "DPPO, TV, k2": {"loss": "dppo_tv", "clip_low": 0.001, "clip_high": 0.001, "kl_coefficient": 0.1, "kl_estimator": "k2"},
    "DPPO, KL, pass@k": {"loss": "dppo_kl", "clip_low": 1e-5, "clip_high": 1e-5, "advantage": "pass_at_k", "pass_k": 2},
}  # fmt: skip

LAYOUTS: dict[str, dict[str, Any]] = {
    "DP2": {},
    "TP2+SP": {"tensor": 2, "sequence": True, "fusions": "all"},
    "PP2": {"pipeline": 2, "wrap": "megatron_fsdp"},
}


ALL_LAYOUTS: list[dict[str, Any]] = [*LAYOUTS.values(), {"context": 2, "wrap": "megatron_fsdp"}, {"logits_chunk_tokens": 7}]


def without_padding(metrics: dict[str, float]) -> dict[str, float]:
    """What a layout does not change; how much is padded is its own."""
    return {name: value for name, value in metrics.items() if name != "train/padding_fraction"}


def assert_alike(
    common: dict[str, Any],
    layouts: Iterable[dict[str, Any]],
    objectives: Iterable[dict[str, Any]],
    references: list[Any],
    *,
    is_black: bool,
    tolerance: float,
) -> None:
    """The products of one colour have the metrics of `references`, one an objective."""
    pairs = squares(layouts, zip(objectives, references, strict=True), is_black=is_black)
    cases = [{**common, **objective, **layout} for layout, (objective, _) in pairs]
    results = run_ranks(2, f"{CASES}:objective_metrics", {"cases": cases})[0]
    for case, steps, (_, (_, reference)) in zip(cases, results, pairs, strict=True):
        print(case)
        for found, wanted in zip(steps, reference, strict=True):
            assert without_padding(found) == pytest.approx(without_padding(wanted), rel=tolerance, abs=1e-5)


@COLOURS
def test_objectives_are_the_same_in_every_layout(model: str, is_black: bool) -> None:
    """All that is logged, to 1e-5, over two steps of two mini-batches of several micro-batches, as on one rank."""
    common = {"path": model, "num_minibatches": 2, "optimizer": {"learning_rate": 3e-3}, "tokens": 60}
    alone = [{**common, **objective, "tokens": 120} for objective in OBJECTIVES.values()]
    references = run_ranks(1, f"{CASES}:objective_metrics", {"cases": [*alone, common]})[0]
    *references, default = references
    for reference in references:
        print(reference)
        assert abs(reference[1]["grad_norm"] - default[1]["grad_norm"]) > 1e-3, "each objective is another one"
        assert all(0 < step["importance/ess"] < 1 and 0 < step["entropy/mean"] < math.log(128) for step in reference)
    masked = [[step.get("importance/masked_fraction") for step in reference] for reference in references]
    assert masked[:2] == [[None] * 2] * 2, "nothing is masked, which is no measured 0"
    assert all(share is not None and 0 < share < 1 for shares in masked[2:] for share in shares)
    assert references[1][1]["ratio/dual_clipped_fraction"] > 0
    tokens = [reference[1]["train/response_tokens"] for reference in references]
    assert tokens[:3] == [default[1]["train/response_tokens"]] * 3 and tokens[3] == tokens[4] < tokens[0]
    assert_alike(common, LAYOUTS.values(), OBJECTIVES.values(), references, is_black=is_black, tolerance=1e-5)


@COLOURS
def test_named_losses_and_advantages_are_the_same_in_every_layout(model: str, is_black: bool) -> None:
    """All that is logged of episodes, to 5e-5, as on one rank."""
    common = {"path": model, "num_minibatches": 2, "tokens": 60, "episodes": -3.0, "optimizer": {"learning_rate": 3e-3}}
    alone = [{**common, **objective} for objective in NAMED.values()]
    references = run_ranks(1, f"{CASES}:objective_metrics", {"cases": alone})[0]
    for name, (_, reference) in zip(NAMED, references, strict=True):
        print(name, reference)
        assert "SAPO" in name or 0 < reference["ratio/clipped_fraction"] < 1
    assert_alike(common, ALL_LAYOUTS, NAMED.values(), references, is_black=is_black, tolerance=5e-5)


def test_the_gradient_of_the_entropy_is_that_of_transformers(model: str) -> None:
    """A step of the entropy alone, whose advantages are 0."""
    layouts = [*LAYOUTS.values(), {"context": 2}, {"logits_chunk_tokens": 7}]
    cases: list[dict[str, Any]] = [{"path": model, "tokens": 60, **layout} for layout in layouts]
    for case, worst in zip(cases, run_ranks(2, f"{CASES}:entropy_gradients", {"cases": cases})[0], strict=True):
        print(case, worst)
        assert worst < 1e-5


@COLOURS
def test_episodes_are_the_same_in_every_layout(model: str, is_black: bool) -> None:
    """With given tokens and branches, to 1e-5, as on one rank; the log-probs of given tokens have no effect."""
    common = {"path": model, "num_minibatches": 2, "tokens": 60, "episodes": -50.0}
    objectives = [OBJECTIVES[name] for name in ("GSPO", "Dr. GRPO, RLOO", "masks by sequence", "masks by token")]
    alone = [{**common, **objective, "tokens": 120, "episodes": -3.0} for objective in objectives]
    references = run_ranks(1, f"{CASES}:objective_metrics", {"cases": alone})[0]
    assert_alike(common, ALL_LAYOUTS, objectives, references, is_black=is_black, tolerance=1e-5)


def test_kept_tokens_are_normalised_over_in_every_layout(model: str) -> None:
    """As transformers' logits give it; the first ratio is 1, and all that is logged is as on one rank."""
    common = {"path": model, "num_minibatches": 2, "tokens": 60, "old_log_probs": "separate", "temperature": 1.0}
    (alone,) = run_ranks(1, f"{CASES}:supports_beside_transformers", {"cases": [{**common, "tokens": 120}]})[0]
    cases = [{**common, **layout} for layout in ALL_LAYOUTS]
    for case, found in zip(
        cases, run_ranks(2, f"{CASES}:supports_beside_transformers", {"cases": cases})[0], strict=True
    ):
        print(case, found)
        assert found["worst"] < 1e-5 and alone["worst"] < 1e-5
        for step, wanted in zip(found["steps"], alone["steps"], strict=True):
            assert step["ratio/first_minibatch_mean"] == 1.0 and step["grad_norm"] > 1e-3
            assert without_padding(step) == pytest.approx(without_padding(wanted), rel=1e-5, abs=1e-5)


def test_the_gradient_of_episodes_is_that_of_transformers(model: str) -> None:
    cases: list[dict[str, Any]] = [{"path": model, "wrap": wrap, "tokens": 60} for wrap in ("ddp", "megatron_fsdp")]
    for found in run_ranks(2, f"{CASES}:supervised_beside_transformers", {"cases": cases})[0]:
        print(found)
        assert found["loss"] < 1e-5 and found["gradient"] < 1e-5 and found["named"] > 5


def test_the_gradient_of_turns_is_that_of_transformers(model: str) -> None:
    """Each token by its own turn's advantage; with a KL in the reward, which is 0 at the start, they are written twice."""
    of_ranks: dict[int, list[dict[str, Any]]] = {1: [{"kl_coefficient": 0.1, "kl_in": "reward"}], 2: ALL_LAYOUTS}
    for num_ranks, layouts in of_ranks.items():
        cases = [{"path": model, "tokens": 60, **layout} for layout in layouts]
        results = run_ranks(num_ranks, "tests.engine.turn_cases:turns_beside_transformers", {"cases": cases})[0]
        for case, found in zip(cases, results, strict=True):
            print(case, found)
            assert found["gradient"] < 1e-5 and found["named"] > 5 and found["norm"] > 1e-3


def test_entropy_is_that_of_transformers(model: str) -> None:
    cases: list[dict[str, Any]] = [{"path": model, **layout} for layout in LAYOUTS.values()]
    for case, (mine, theirs) in zip(
        cases, run_ranks(2, f"{CASES}:entropies_beside_transformers", {"cases": cases})[0], strict=True
    ):
        print(case, mine, theirs)
        assert mine == pytest.approx(theirs, abs=1e-5)


def test_an_objective_that_counts_with_the_longest_response_needs_it(model: str) -> None:
    choices: list[dict[str, Any]] = [{"loss_aggregation": "constant_length"}, {"truncated": "penalise", "overlong_buffer": 4}]
    for choice in choices:
        with pytest.raises(ValueError, match="max_new_tokens"):
            Engine(ModelConfig(path=model), EngineConfig(), AlgorithmConfig(**choice), num_steps=1)
