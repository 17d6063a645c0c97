"""Training in float16 with megatron-core's loss scale, and the output layer in float32 beside other dtypes.

    python -m pytest tests/engine/wrap/test_float16.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.ranks import run_ranks
from tests.support.tiny_models import write_tiny_model

CASES = "tests.engine.wrap.float16_cases"
WRAPS = ("ddp", "megatron_fsdp")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Weights of bfloat16, whatever they are trained in; the output layer is the embedding."""
    return str(write_tiny_model(tmp_path_factory.mktemp("float16"), "qwen3", True, num_hidden_layers=2, dtype=torch.bfloat16))


def test_float16_learns_as_float32_under_both_wraps(model: str) -> None:
    cases: list[dict[str, Any]] = [{"path": model, "wrap": wrap, "dtype": "float16"} for wrap in WRAPS]
    cases += [{**cases[0], "tokens": 40}, {**cases[0], "logits_chunk_tokens": 16}, {**cases[0], "dtype": "float32"}]
    *found, whole = run_ranks(2, f"{CASES}:histories", {"cases": cases, "num_steps": 5})[0]
    for history in found:
        assert [step["train/skipped_steps"] for step in history] == [0] * 5
        assert [step["train/loss_scale"] for step in history] == [65536.0] * 5
        for half, full in zip(history, whole, strict=True):
            assert half["loss/total"] == pytest.approx(full["loss/total"], abs=2e-3)
            assert half["grad_norm"] == pytest.approx(full["grad_norm"], rel=2e-2)
    assert "train/loss_scale" not in whole[0]


@pytest.mark.parametrize("wrap", [pytest.param("ddp", marks=pytest.mark.long), "megatron_fsdp"])
def test_steps_that_overflow_are_skipped_and_the_loss_scale_is_kept(model: str, wrap: str, tmp_path: Path) -> None:
    arguments = {"path": model, "root": str(tmp_path), "wrap": wrap}
    (found,) = run_ranks(1, f"{CASES}:resumed", arguments)
    skipped = [step["train/skipped_steps"] for step in found["before"]]
    scales = [step["train/loss_scale"] for step in found["before"]]
    assert skipped[0] == 1 and skipped[-1] == 0
    for was_skipped, before, after in zip(skipped, scales, scales[1:], strict=False):
        assert after == (before / 2 if was_skipped else before)
    assert found["again"] == found["after"] and found["scaler"]["scale"] == scales[-1]


def test_the_output_layer_in_float32_brings_log_probs_nearer(model: str) -> None:
    cases = [{"dtype": dtype, "head_dtype": head} for dtype in ("bfloat16", "float16") for head in ("model", "float32")]
    cases += [{**cases[1], "logits_chunk_tokens": 16}]
    plain, in_float32, half, half_in_float32, in_chunks = run_ranks(1, f"{CASES}:gaps", {"path": model, "cases": cases})[0]
    print(plain, in_float32, half, half_in_float32)
    assert in_float32 < plain and half < plain / 3 and half_in_float32 < half
    assert in_chunks == pytest.approx(in_float32, rel=0.05)


def test_gradients_flow_through_the_output_layer_in_float32(model: str) -> None:
    case: dict[str, Any] = {"path": model, "dtype": "float32", "head_dtype": "float32"}
    cases = [case, {**case, "logits_chunk_tokens": 16}, {**case, "tensor": 2}, {**case, "head_dtype": "model"}]
    *found, plain = run_ranks(2, f"{CASES}:histories", {"cases": cases, "num_steps": 3})[0]
    for history in found:
        for one, other in zip(history, plain, strict=True):
            assert one == pytest.approx(other, rel=1e-4)
