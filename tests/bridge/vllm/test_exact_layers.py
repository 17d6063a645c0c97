"""vLLM's layers and the trainer's give each token the same bits under `model.exact`, however vLLM schedules it.

    python -m pytest tests/bridge/vllm/test_exact_layers.py
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.ranks import run_ranks
from tests.support.tiny_models import write_tiny_model

pytestmark = pytest.mark.vllm_on_cpu


FAMILIES = [("qwen3", True)]
FAMILIES += [pytest.param(family, False, marks=pytest.mark.long) for family in ("llama", "mistral", "qwen2")]


@pytest.mark.parametrize(("family", "tied"), FAMILIES)
def test_no_token_differs_in_any_schedule(family: str, tied: bool, tmp_path: Path) -> None:
    more = {"sliding_window": None} if family == "mistral" else {}
    path = write_tiny_model(tmp_path, family, tied, num_hidden_layers=2, max_position_embeddings=1024, **more)
    arguments = {"path": str(path), "count": 64, "rounds": 2}
    (found,) = run_ranks(1, "tests.bridge.vllm.exact_cases:differing", arguments, alone=True)
    print({**found, "chunks": len(found["chunks"])})
    assert found["compared"] > 5000 and found["differing"] == 0
    assert {1, 64} <= found["batches"] and max(found["chunks"]) > 400
