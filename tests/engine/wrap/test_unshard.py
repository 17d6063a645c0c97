"""Megatron-FSDP's parameters made whole for a while, on two real ranks. That exports are right: test_engine.py.

python -m pytest tests/engine/wrap/test_unshard.py
"""

from __future__ import annotations


import pytest
import torch

from tests.support.ranks import run_ranks
from tests.support.tiny_models import write_tiny_model

NUM_LAYERS = 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("unshard") / "model", "qwen3", tied=True))


def test_layers_come_in_the_same_tensors_and_leave_no_memory(model: str) -> None:
    for rank in run_ranks(2, "tests.engine.wrap.unshard_cases:walk_in_parts", {"path": model}):
        assert len(rank["names"]) == len(set(rank["names"])) == rank["own"] + len(rank["upstreams"])
        assert rank["changed"] and rank["finite"], "after a walk left half-way, training goes on"
        assert rank["left"] == [[0, 0]] * 2
        assert rank["same_tensors"]
        assert sorted(name.rpartition("module.")[2] for name in rank["upstreams"]) == [
            "decoder.final_layernorm.weight",
            "embedding.word_embeddings.weight",
        ]
        assert rank["own"] % NUM_LAYERS == 0


def test_walks_change_nothing_in_training(model: str) -> None:
    cases = [("megatron_fsdp", False), ("megatron_fsdp", True), ("ddp", False)]
    plain, walked, ddp = (
        run_ranks(2, "tests.engine.wrap.unshard_cases:weights_after_training", {"path": model, "wrap": wrap, "walks": walks})[0]
        for wrap, walks in cases
    )
    assert list(plain) == list(walked) and set(plain) == set(ddp)
    assert all(torch.equal(plain[name], walked[name]) for name in plain)
    assert all(torch.allclose(plain[name], ddp[name], atol=1e-5) for name in plain)
