"""A folder and a tiny model for the files beside this one; those of the rooms have models of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.tiny_models import write_tiny_model


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("steps")


@pytest.fixture(scope="module")
def model(root: Path) -> str:
    return str(write_tiny_model(root / "model", "qwen3", True, num_hidden_layers=2))
