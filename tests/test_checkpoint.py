"""What a checkpoint may hold and whose it is; that resuming is bit for bit is in test_engine.py and test_lora.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks import run_ranks
from tests.tiny_models import write_tiny_model


@pytest.mark.parametrize("how", ["whole", "one value"])
def test_no_code_in_a_checkpoint_is_executed(tmp_path: Path, how: str) -> None:
    model = str(write_tiny_model(tmp_path / "model", "qwen3", True, num_hidden_layers=1))
    arguments = {"path": model, "root": str(tmp_path / "checkpoints"), "how": how, "marker": str(tmp_path / "executed")}
    (told,) = run_ranks(1, "tests.step_cases:restore_planted", arguments)
    print(told)
    assert not (tmp_path / "executed").exists()
    assert "rank_00000.pt" in told and "none of which was loaded" in told and "model.path=" in told
