"""Fixtures of several checks."""

from __future__ import annotations

from pathlib import Path

import pytest

from megasync.tools.assets.command import write_assets


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config of the quickstart's model and data."""
    folder = tmp_path_factory.mktemp("run")
    assets = write_assets(folder, seed=0)
    path = folder / "config.yaml"
    lines = [f"run: {{dir: {folder}}}", f"model: {{path: {assets.model}}}", f"data: {{train: {assets.train}, batch_size: 4}}"]
    path.write_text("\n".join([*lines, "rollout: {max_new_tokens: 8, reward: token_count}", ""]))
    return path
