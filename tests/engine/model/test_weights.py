"""Weights that no model can be trained from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.model.build import check_finite
from tests.support.ranks import run_ranks
from tests.support.tiny_models import write_tiny_model


def test_values_that_are_not_finite_are_named() -> None:
    layer = torch.nn.Linear(2, 2)
    check_finite([layer], "folder")
    with torch.no_grad():
        layer.bias[1] = torch.nan
    with pytest.raises(ValueError, match=r"model.path: bias of folder has values that are not finite. Remedy: download"):
        check_finite([layer], "folder")
    with torch.no_grad():
        layer.bias[1] = 1e5
    with pytest.raises(ValueError, match=r"bias of folder has values that float16 cannot hold.*model.dtype=bfloat16"):
        check_finite([layer.half()], "folder")


def test_a_tensor_of_another_shape_is_refused(tmp_path: Path) -> None:
    path = str(write_tiny_model(tmp_path, "qwen3", num_hidden_layers=2))
    (message,) = run_ranks(1, "tests.engine.model.family_cases:load_of_another_shape", {"path": path})
    assert "model.norm.weight" in message and "[1], not [128]" in message
