"""Weights that no model can be trained from."""

from __future__ import annotations

import pytest
import torch

from engine.model.build import check_finite


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
