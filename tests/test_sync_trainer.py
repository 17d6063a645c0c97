"""Real trainer ranks, real Ray, real vLLM: after every sync the replica holds exactly what the trainer exports."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.ranks import run_ranks
from tests.tiny_models import write_tiny_model

CASES = [{"wrap": wrap, "tensor": tensor} for wrap in ("ddp", "megatron_fsdp") for tensor in (1, 2)]
NUM_STEPS = 20


@pytest.mark.parametrize(("tied", "transport"), [(True, "shm"), (False, "nccl")])
def test_replica_follows_the_trainer_bit_for_bit(tmp_path: Path, tied: bool, transport: str) -> None:
    path = str(write_tiny_model(tmp_path / "model", "qwen3", tied))
    arguments = {"path": path, "cases": CASES, "num_steps": NUM_STEPS, "transport": transport}
    results = run_ranks(2, "tests.sync_cases:publish_and_compare", arguments, timeout_seconds=600)[0]
    for number, (case, result) in enumerate(zip(CASES, results, strict=True)):
        print(case, result["gap"])
        assert result["differing"] == []
        assert result["moved"] == NUM_STEPS - 1
        assert result["gap"] < 1e-4
        assert result["num_pickled"] == 0
        assert set(result["ordinary"].values()) == {"oneDNN packs its weight after loading"}
        kinds = {name.rpartition(".")[2] for name in result["ordinary"]}
        assert kinds == {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"} | (set() if tied else {"lm_head"})
        assert result["versions"] == [(v, [v], True) for v in range(number * 100, number * 100 + NUM_STEPS)]


def test_a_missing_or_renamed_tensor_is_refused_on_every_rank(tmp_path: Path) -> None:
    path = str(write_tiny_model(tmp_path / "model", "qwen2", tied=False))
    zero, one = run_ranks(2, "tests.sync_cases:refused_syncs", {"path": path}, timeout_seconds=300)
    for change in ("missing", "renamed"):
        assert "model.layers.1.mlp.up_proj.weight" in zero[change]
        assert zero[change] == one[change], "the same error on every rank"
        assert zero[f"{change} serves"] == [1]
    assert zero["serves"] == [3]
    assert zero["damaged"] == one["damaged"]
    assert re.search(r"out of service.*bucket 3 of \d+ of stage 0 \(model\.layers\..*\) arrived damaged", zero["damaged"])
    assert zero["failed"] == [4]
