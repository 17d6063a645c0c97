"""The trainer's layers under `model.exact`: packing does not show in a bit, and they learn as the ordinary ones.

    python -m pytest tests/engine/model/test_exact.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.model import exact
from tests.support.ranks import run_ranks
from tests.support.tiny_models import write_tiny_model

CASES = "tests.engine.model.exact_cases"
LORA = {"rank": 4, "alpha": 8.0}


@pytest.mark.parametrize(
    ("family", "tied", "wrap", "lora"),
    [
        ("qwen3", True, "ddp", {}),
        ("llama", False, "megatron_fsdp", {}),
        ("qwen2", True, "ddp", LORA),
        ("mistral", False, "ddp", {}),
    ],
)
def test_packing_does_not_show_in_a_bit(family: str, tied: bool, wrap: str, lora: dict[str, Any], tmp_path: Path) -> None:
    more = {"sliding_window": None} if family == "mistral" else {}
    path = str(write_tiny_model(tmp_path, family, tied, max_position_embeddings=1024, **more))
    (found,) = run_ranks(1, f"{CASES}:packings", {"path": path, "wrap": wrap, "lora": lora})
    print(found)
    assert found["differing"] == 0 and found["ratio"] == 1.0
    assert found["reference"] < 1e-4 and found["moved"] > 0


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("family", "tied", "wrap", "lora", "head_dim"),
    [("qwen3", True, "ddp", {}, 128), ("llama", False, "megatron_fsdp", {}, 64), ("qwen2", True, "ddp", LORA, 64)],
)
def test_packing_does_not_show_in_a_bit_on_a_gpu(
    family: str, tied: bool, wrap: str, lora: dict[str, Any], head_dim: int, tmp_path: Path
) -> None:
    more = {"max_position_embeddings": 1024, "hidden_size": 4 * head_dim, "num_attention_heads": 4, "head_dim": head_dim}
    path = str(write_tiny_model(tmp_path, family, tied, **more))
    (found,) = run_ranks(1, f"{CASES}:packings", {"path": path, "wrap": wrap, "lora": lora, "dtype": "bfloat16"})
    print(found)
    assert found["differing"] == 0 and found["ratio"] == 1.0
    assert found["reference"] < 0.5 and found["moved"] > 0


def test_exact_layers_learn_as_the_ordinary_ones(tmp_path: Path) -> None:
    path = str(write_tiny_model(tmp_path, "qwen3", num_hidden_layers=2))
    for more in ({}, {"lora": LORA}):
        ways: tuple[dict[str, Any], ...] = ({}, {"wrap": "megatron_fsdp"}, {"logits_chunk_tokens": 16})
        cases = [more, *({"exact": True, **more, **each} for each in ways)]
        arguments = {"path": path, "cases": cases, "num_steps": 4}
        plain, *found = run_ranks(2, f"{CASES}:histories", arguments, alone=True)[0]
        for history in found:
            for one, other in zip(history, plain, strict=True):
                assert one == pytest.approx(other, rel=2e-4, abs=1e-6)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_gradients_of_log_probs_are_those_of_torch(temperature: float) -> None:
    logits, labels, gradient = torch.randn(1, 40, 60), torch.randint(0, 60, (1, 40)), torch.randn(40)
    plain = logits.clone().requires_grad_()
    expected = (plain[0] / temperature).log_softmax(-1).gather(1, labels[0][:, None]).squeeze(1)
    (of_logits,) = torch.autograd.grad(expected, plain, gradient)
    for use_fused in (False, True):
        own = logits.clone().requires_grad_()
        found = exact.log_probs(own, labels, temperature, use_fused=use_fused)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(torch.autograd.grad(found, own, gradient)[0], of_logits)
