"""What must not depend on layout or history: gradients' sums, tables, entropies, and what a folder says of its weights.

    python -m pytest tests/engine/wrap/test_precision.py
    MEGASYNC_MODEL_FOLDER=FOLDER python -m pytest tests/engine/wrap/test_precision.py -k folder     # both wraps, 4 ranks, bf16
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from engine.checkpoint.hf_folder import finish_folder
from tests.engine.wrap.precision_cases import relative_error
from tests.support.ranks import run_ranks
from tests.support.tiny_models import write_tiny_model

WRAPS = ("ddp", "megatron_fsdp")
NUM_SAMPLES = 128  # in micro-batches of 20 tokens


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The output layer is not tied to the embeddings."""
    return str(write_tiny_model(tmp_path_factory.mktemp("precision"), "qwen3", num_hidden_layers=2, hidden_size=64))


@pytest.mark.parametrize("num_ranks", [2, *(pytest.param(number, marks=pytest.mark.long) for number in (1, 4))])
def test_gradients_of_many_microbatches_are_those_of_ddp(model: str, num_ranks: int) -> None:
    """bf16 weights: the same sums in float32, whichever wrap holds them, sharded or whole."""
    cases: list[dict[str, Any]] = [{"path": model, "wrap": wrap, "tokens": 20} for wrap in WRAPS]
    if num_ranks == 2:
        cases += [{**cases[1], "overrides": {"data_parallel_sharding_strategy": each}} for each in ("optim", "optim_grads")]
    found = run_ranks(num_ranks, "tests.engine.wrap.precision_cases:gradients", {"cases": cases, "num_samples": NUM_SAMPLES})
    ddp, *others = ([rank[place] for rank in found] for place in range(len(cases)))
    assert ddp[0]["num_microbatches"] * num_ranks >= 100
    for fsdp in others:
        error = relative_error(fsdp, ddp)
        print(num_ranks, ddp[0]["num_microbatches"], fsdp[0]["dtypes"], error)
        assert {dtype for rank in ddp + fsdp for dtype in rank["dtypes"]} == {"torch.float32"}
        assert error < 1e-5


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_of_one_microbatch_are_those_of_ddp_bit_for_bit(model: str, dtype: str) -> None:
    """Four ranks, in whatever order their gradients lie; those of more micro-batches are added up in another order."""
    cases = [{"path": model, "wrap": wrap, "tokens": 400, "dtype": dtype} for wrap in WRAPS]
    found = run_ranks(4, "tests.engine.wrap.precision_cases:gradients", {"cases": cases, "num_samples": 16})
    ddp, fsdp = ([rank[place] for rank in found] for place in range(2))
    assert ddp[0]["num_microbatches"] == 1 and relative_error(fsdp, ddp) == 0


@pytest.mark.parametrize("wrap", WRAPS)
def test_gradients_are_reduced_in_bfloat16_where_that_is_asked_for(model: str, wrap: str) -> None:
    """Less memory for sums that lose small addends."""
    cases = [{"path": model, "wrap": wrap, "tokens": 20, "gradient_dtype": dtype} for dtype in ("bfloat16", "float32")]
    found = run_ranks(2, "tests.engine.wrap.precision_cases:gradients", {"cases": cases, "num_samples": NUM_SAMPLES})
    half, whole = ([rank[place] for rank in found] for place in range(2))
    error = relative_error(half, whole)
    print(wrap, half[0]["num_microbatches"], error)
    assert {dtype for rank in half for dtype in rank["dtypes"]} == {"torch.bfloat16"}
    assert 1e-3 < error < 0.1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_config_json_names_the_dtype_of_the_weights(tmp_path: Path, dtype: str) -> None:
    """Also by its old name and in nested configs; a few tensors may have another."""
    source, folder = tmp_path / "start", tmp_path / "hf"
    source.mkdir()
    folder.mkdir()
    text = {"hidden_size": 8, "torch_dtype": "float16"}
    (source / "config.json").write_text(json.dumps({"dtype": "float16", "text_config": text, "quantization_config": {"bits": 4}}))
    tensors = {name: torch.zeros(2, dtype=getattr(torch, dtype)) for name in "ab"}
    save_file({**tensors, "bias": torch.zeros(2, dtype=torch.float32)}, folder / "model-000-00000.safetensors")
    finish_folder(folder, source)
    fields = json.loads((folder / "config.json").read_text())
    nested = {"hidden_size": 8, "dtype": dtype, "torch_dtype": dtype}
    assert fields == {"dtype": dtype, "text_config": nested, "quantization_config": {"bits": 4}}


def test_few_tables_of_angles_are_kept(model: str) -> None:
    """One for all lengths, with fusions and without; the angles are those of megatron-core."""
    cases = [{"path": model, "fusions": fusions, "tokens": 10} for fusions in ("none", "all")]
    arguments = {"cases": cases, "lengths": list(range(5, 75, 5))}
    ((plain, fused),) = run_ranks(1, "tests.engine.wrap.precision_cases:rotary_tables", arguments)
    print(plain, fused)
    for found in (plain, fused):
        assert found["same"]
        assert len(found["rows"]) == 1
        assert found["rows"][0] < 2 * 70


def test_the_entropy_of_a_token_is_computed_once(model: str) -> None:
    cases = [{"path": model, "logits_chunk_tokens": tokens} for tokens in (16, 8192)]
    (found,) = run_ranks(1, "tests.engine.wrap.precision_cases:rows_of_entropy", {"cases": cases})
    print(found)
    for rows, num_tokens in found:
        assert rows == num_tokens


@pytest.mark.parametrize("wrap", WRAPS)
def test_a_checkpoint_in_float32_of_a_bf16_model_keeps_small_steps(wrap: str, tmp_path: Path) -> None:
    """transformers loads a folder in the dtype that its config.json names."""
    path = write_tiny_model(tmp_path / "model", "qwen3", num_hidden_layers=2, hidden_size=64, dtype=torch.bfloat16)
    arguments = {"path": str(path), "root": str(tmp_path / "run"), "wrap": wrap, "dtype": "float32"}
    (changed,) = run_ranks(1, "tests.engine.wrap.precision_cases:trained_folders", arguments)
    print(changed)
    assert changed > 0.9


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_both_wraps_clip_by_the_same_norm(dtype: str, model: str) -> None:
    """It is a sum over shards, which are others in each: all bits of 12 steps' losses are the same."""
    arguments = {"path": model, "wraps": WRAPS, "num_steps": 12, "num_samples": 8, "dtype": dtype}
    found = run_ranks(4, "tests.engine.wrap.precision_cases:losses_of_folder", arguments)[0]
    print(found)
    assert found["megatron_fsdp"] == found["ddp"] and len(set(found["ddp"])) > 1


@pytest.mark.timeout(3600)
@pytest.mark.skipif("MEGASYNC_MODEL_FOLDER" not in os.environ, reason="MEGASYNC_MODEL_FOLDER names no model")
def test_a_model_of_a_folder_learns_alike_in_both_wraps() -> None:
    """bf16 on four data-parallel ranks, 20 clipped steps of a micro-batch each.

    With more of them sums have other last bits, at 1e-9 of the gradient: in some step a weight is rounded otherwise, and with it
    all activations behind, so that losses differ by 1e-2.
    """
    arguments = {"path": os.environ["MEGASYNC_MODEL_FOLDER"], "wraps": WRAPS, "num_steps": 20, "num_samples": 8}
    arguments["dtype"] = "bfloat16"
    found = run_ranks(4, "tests.engine.wrap.precision_cases:losses_of_folder", arguments, timeout_seconds=3600)[0]
    print(json.dumps(found), max(abs(one - other) for one, other in zip(*found.values(), strict=True)))
    assert found["megatron_fsdp"] == pytest.approx(found["ddp"], abs=1e-5)
