"""One optimizer step after another: old log-probs, steps that are left out, the rate, dropout, the KL's reference. Real ranks."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from engine.config import OptimizerConfig
from engine.algorithm import AlgorithmConfig
from engine.objective.loss import aggregation_weights, grpo_loss
from engine.wrap.optimizer import build_schedule
from tests.support.squares import COLOURS, squares
from tests.support.ranks import run_ranks
from tests.engine.step_cases import micro_batch
from tests.support.tiny_models import write_tiny_model

WRAPS = ("ddp", "megatron_fsdp")
LORA = {"rank": 4, "alpha": 8.0}
FAST = {"learning_rate": 1e-2}


# ----------------------------------------------------------------------------------------------------- logits in chunks


def test_logits_in_chunks_are_never_whole_and_change_nothing(root: Path) -> None:
    path = str(write_tiny_model(root / "wide", "qwen2", False, num_hidden_layers=1, vocab_size=160))
    cases: list[dict[str, Any]] = [{"wrap": "megatron_fsdp"}, {"fusions": "all"}, {"dtype": "bfloat16", "tokens": 60}]
    results = run_ranks(1, "tests.engine.step_cases:read_at_once_and_in_chunks", {"path": path, "cases": cases})[0]
    for case, both in zip(cases, results, strict=True):
        whole, parts = both["8192"], both["7"]
        tolerance = 2e-2 if "dtype" in case else 1e-5
        assert parts["metrics"] == pytest.approx(whole["metrics"], rel=tolerance, abs=tolerance), case
        for mine, other in zip(parts["matches"], whole["matches"], strict=True):
            assert mine == pytest.approx(other, rel=tolerance)
        assert parts["most"] <= 7
        assert whole["most"] > 7 * 4


@pytest.mark.parametrize("num_ranks", [pytest.param(1, marks=pytest.mark.long), 2])
def test_held_out_loss_is_that_of_a_step_on_the_same_samples(model: str, num_ranks: int) -> None:
    """Of the sampled tokens of each response alone, whatever the wrap and the ranks."""
    arguments = {"path": model, "cases": [{"wrap": wrap} for wrap in WRAPS]}
    for result in run_ranks(num_ranks, "tests.engine.step_cases:held_out_and_trained", arguments)[0]:
        numbers, log_probs, _ = zip(*result["found"], strict=True)
        assert list(numbers) == result["num_sampled"] and log_probs == pytest.approx(result["scores"], rel=1e-6)
        assert -sum(log_probs) / sum(numbers) == pytest.approx(result["loss"], rel=1e-5)


# ------------------------------------------------------------------------------------------------------ old log-probs


@pytest.mark.parametrize("num_ranks", [pytest.param(1, marks=pytest.mark.long), 2])
def test_old_log_probs_of_the_training_pass_are_those_of_a_pass_of_their_own(model: str, num_ranks: int) -> None:
    """Everything that is logged, bit for bit, over three steps of several micro-batches."""
    pairs = squares(WRAPS, ("float32", "bfloat16"), is_black=num_ranks == 2)
    cases: list[dict[str, Any]] = [{"wrap": wrap, "tokens": 60, "kl_coefficient": 0.1, "dtype": dtype} for wrap, dtype in pairs]
    cases.append({"wrap": "ddp", "lora": LORA, "optimizer": FAST, "recompute": "full"})
    if num_ranks == 2:
        cases += [{"wrap": wrap, "tensor": 2, "sequence": True} for wrap in WRAPS] + [{"pipeline": 2, "tokens": 60}]
    arguments = {"cases": [{"path": model, **case} for case in cases]}
    for case, (auto, separate) in zip(
        cases, run_ranks(num_ranks, "tests.engine.step_cases:old_log_prob_metrics", arguments)[0], strict=True
    ):
        print(case)
        assert auto == separate
        assert all(step["ratio/first_minibatch_mean"] == 1 for step in auto)
        assert all(step["loss/policy"] != 0 and step["grad_norm"] > 0 for step in auto)


def test_old_log_probs_of_a_few_samples_reach_rank_0(model: str) -> None:
    """From whichever rank trains on them, taken by the training pass or before it, and from every mini-batch."""
    common = {"path": model, "tokens": 60}
    layouts: list[dict[str, Any]] = [
        *({"wrap": wrap, "num_minibatches": number} for wrap in WRAPS for number in (1, 2)),
        *({"tensor": 2, "sequence": True}, {"pipeline": 2}, {"context": 2, "num_minibatches": 3}, {"tokens": 4000}),
    ]
    cases = [{**common, **layout} for layout in layouts]
    for case, found in zip(cases, run_ranks(2, "tests.engine.step_cases:chosen_log_probs", {"cases": cases})[0], strict=True):
        print(case)
        assert len(found[0]) == 3 and max(found[0]) < 1e-5


@COLOURS
def test_dropout_of_adapters_leaves_the_first_ratio_at_one(model: str, is_black: bool) -> None:
    """Old log-probs have the dropout masks of the training pass, taken from it or before."""
    common = {"path": model, "lora": {**LORA, "dropout": 0.5}, "optimizer": FAST}
    layouts: list[dict[str, Any]] = [
        *({"wrap": wrap} for wrap in WRAPS),
        {"tensor": 2, "sequence": True},
        {"wrap": "megatron_fsdp", "recompute": "full", "tokens": 60},
    ]
    choices: list[dict[str, Any]] = [{"num_minibatches": 2}, {"old_log_probs": "separate"}, {}]
    cases = [{**common, **layout, **choice} for layout, choice in squares(layouts, choices, is_black=is_black)]
    results = run_ranks(2, "tests.engine.step_cases:first_ratios_with_dropout", {"cases": cases})[0]
    for case, ratios in zip(cases, results, strict=True):
        print(case, ratios)
        assert max(abs(ratio - 1) for ratio in ratios) < 1e-6


def test_passes_over_a_batch_are_updates_on_the_same_old_log_probs(model: str) -> None:
    decay = {"optimizer": {"learning_rate": 3e-3, "decay": "linear"}}
    arguments = {"path": model, "passes": 3, "case": {"wrap": "ddp", "num_minibatches": 2, **decay}}
    at_once, one_by_one = run_ranks(1, "tests.engine.step_cases:passes_and_updates", arguments)[0]
    for together, last in zip(at_once, one_by_one, strict=True):
        print(together["ratio/mean"], last["ratio/mean"], together["learning_rate"], last["learning_rate"])
        assert together["ratio/first_minibatch_mean"] == 1 != last["ratio/first_minibatch_mean"]
        assert together["learning_rate"] == last["learning_rate"], "the schedule counts all of them"
    assert at_once[1]["learning_rate"] < at_once[0]["learning_rate"]


# ---------------------------------------------------------------------------------------------------------- objectives


def test_supervised_steps_ignore_the_temperature_of_rollouts(model: str) -> None:
    plain, hot = run_ranks(1, "tests.engine.step_cases:supervised_metrics", {"path": model, "temperatures": [1.0, 0.5]})[0]
    print(plain, hot)
    assert plain == hot


# --------------------------------------------------------------------------------------------------- what is not finite


@COLOURS
def test_a_step_that_is_not_finite_is_skipped_on_every_rank(model: str, is_black: bool) -> None:
    layouts: list[dict[str, Any]] = [{"wrap": wrap, "dtype": dtype} for dtype in ("float32", "bfloat16") for wrap in WRAPS]
    layouts += [{"tensor": 2}, {"pipeline": 2}]
    pairs = squares(layouts, ("loss", "gradient"), is_black=is_black)
    cases = [{"path": model, "how": how, **layout} for layout, how in pairs]
    ranks = run_ranks(2, "tests.engine.step_cases:skipped_steps", {"cases": cases})
    for case, *results in zip(cases, *ranks, strict=True):
        print(case, results)
        for result in results:
            assert result["skipped"] == 1
            assert not math.isfinite(result["loss"] if case["how"] == "loss" else result["grad_norm"])
            assert result["changed"] == [] and result["num_tensors"] > 0
            assert result["zero"] and all(result["zero"]) and result["same_schedule"]
            assert result["same_after"] and result["finite_after"]


def test_a_step_that_stops_the_run_leaves_the_weights_as_they_were(model: str) -> None:
    cases = [{"path": model, "wrap": wrap} for wrap in WRAPS]
    for changed in run_ranks(2, "tests.engine.step_cases:stopped_weights", {"cases": cases})[0]:
        assert changed == []


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("log_ratio", [-1e4, -200.0, 200.0, 1e4])
def test_one_token_alone_makes_no_infinite_loss(log_ratio: float, advantage: float) -> None:
    config = AlgorithmConfig(kl_coefficient=0.1)
    micro = micro_batch(log_ratio, advantage)
    log_probs = torch.zeros(5, requires_grad=True)
    loss, sums = grpo_loss(log_probs, micro, aggregation_weights(micro, 3, 1, "token_mean"), config)
    loss.backward()  # type: ignore[no-untyped-call]
    assert log_probs.grad is not None
    assert bool(torch.isfinite(loss)) and bool(torch.isfinite(log_probs.grad).all())
    assert all(math.isfinite(value) for value in sums.values())
    assert float(sums["gap_max"]) == abs(log_ratio), "the gap is logged as it is"


@settings(deadline=None, max_examples=50)
@given(st.floats(-2.5, 2.5, width=32), st.floats(-2, 2, width=32))
def test_bounds_change_no_bit_of_what_is_within_them(log_ratio: float, advantage: float) -> None:
    config = AlgorithmConfig(kl_coefficient=0.1)
    micro = micro_batch(log_ratio, advantage)
    weights = aggregation_weights(micro, 3, 1, "token_mean")
    loss, _ = grpo_loss(torch.zeros(5), micro, weights, config)
    ratio = torch.exp(-micro.old_log_probs * micro.mask)
    surrogate = torch.minimum(ratio * micro.advantages, ratio.clamp(0.8, 1.28) * micro.advantages)
    correction = (micro.old_log_probs * micro.mask).exp().clamp(max=2.0)
    difference = micro.reference_log_probs * micro.mask
    expected = ((-surrogate * correction + 0.1 * (difference.exp() - difference - 1)) * weights).sum()
    assert torch.equal(loss, expected)


# ------------------------------------------------------------------------------------------------------------- the rate


def rates(num_steps: int, **options: Any) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = build_schedule(OptimizerConfig(learning_rate=1.0, **options), optimizer, num_steps)
    found = []
    for _ in range(num_steps):
        schedule.step(1)
        found.append(optimizer.param_groups[0]["lr"])
    return found


def test_the_last_step_of_a_decay_trains() -> None:
    assert rates(4, decay="linear") == [1.0, 0.75, 0.5, 0.25]
    assert rates(6, decay="linear", warmup_steps=2) == [0.5, 1.0, 0.8, pytest.approx(0.6), pytest.approx(0.4), pytest.approx(0.2)]
    assert rates(5, decay="linear", decay_steps=2, min_learning_rate=0.1) == [1.0, pytest.approx(0.55), 0.1, 0.1, 0.1]
    assert rates(3, warmup_steps=2) == [0.5, 1.0, 1.0]
    assert rates(2) == [1.0, 1.0]


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 30), st.integers(0, 30), st.sampled_from(["linear", "cosine"]))
def test_every_step_of_a_decay_trains_with_less_than_the_one_before(num_steps: int, warmup_steps: int, decay: str) -> None:
    found = rates(num_steps, decay=decay, warmup_steps=warmup_steps)
    rising = min(max(warmup_steps, 1), num_steps)
    assert all(rate > 0 for rate in found)
    assert all(a < b for a, b in pairwise(found[:rising]))
    assert all(a > b for a, b in pairwise(found[rising - 1 :]))


@pytest.mark.parametrize("wrap", WRAPS)
def test_the_optimizer_has_the_values_of_its_keys(model: str, wrap: str) -> None:
    """Weight decay is for matrices alone."""
    keys = {"beta1": 0.8, "beta2": 0.97, "epsilon": 1e-7, "weight_decay": 0.3, "learning_rate": 2e-4, "min_learning_rate": 1e-5}
    (groups,) = run_ranks(1, "tests.engine.step_cases:optimizer_settings", {"path": model, "wrap": wrap, "keys": keys})
    wanted = {"betas": (0.8, 0.97), "eps": 1e-7, "max_lr": 2e-4, "min_lr": 1e-5}
    assert [{**group, "weight_decay": 0.3} for group in groups] == [{**wanted, "weight_decay": 0.3}] * len(groups)
    assert {group["weight_decay"] for group in groups} == {0.0, 0.3}


# ------------------------------------------------------------------------------------------------------ the reference


def test_the_kl_is_to_the_adapter_that_the_run_began_with(root: Path, model: str) -> None:
    """None at the first step; the same for a run that resumes with other adapters."""
    from tests.engine.model.lora_cases import write_peft_adapter

    start = str(write_peft_adapter(root / "start", model, shared=True))
    lora = {**LORA, "adapter_path": start}
    layouts: list[dict[str, Any]] = [*({"wrap": wrap} for wrap in WRAPS), {"tensor": 2, "sequence": True}, {"pipeline": 2}]
    cases = [{"path": model, "lora": lora, "optimizer": FAST, **layout} for layout in layouts]
    arguments = {"cases": cases, "folder": str(root / "saved")}
    for case, steps in zip(cases, run_ranks(2, "tests.engine.step_cases:start_adapters", arguments)[0], strict=True):
        kls = [step["loss/kl"] for step in steps]
        print(case, kls)
        assert abs(kls[0]) < 1e-6
        assert all(kl > 1e-5 for kl in kls[1:])
        assert kls[-1] == kls[-2]


# ------------------------------------------------------------------------------------------------------------ memory


def test_optimizer_state_in_host_memory_changes_nothing_and_the_reference_is_sharded(tmp_path: Path) -> None:
    """Everything that is logged, bit for bit, also after resuming; between steps nothing of the state is on the device."""
    narrow = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "num_hidden_layers": 4}
    model = str(write_tiny_model(tmp_path / "model", "qwen3", True, **narrow))
    cases: list[dict[str, Any]] = [{"wrap": wrap, "dtype": "bfloat16"} for wrap in WRAPS]
    cases.append({**cases[0], "pipeline": 2, "fusions": "all"})
    arguments = {"root": str(tmp_path), "cases": [{"path": model, **case} for case in cases]}
    results = run_ranks(2, "tests.engine.step_cases:host_state", arguments)[0]
    for case, result in zip(cases, results, strict=True):
        print(case, {key: value for key, value in result.items() if key != "steps"})
        without, offloaded = result["steps"]
        assert without == offloaded and without[2] == without[3]
        assert result["optimizer False"] > 0 and result["optimizer True"] == 0
    ddp, fsdp = (result["reference True"] for result in results[:2])
    assert fsdp < 0.6 * ddp
