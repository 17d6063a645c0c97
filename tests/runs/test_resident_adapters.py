"""Adapter-only runs ahead of their trainer: samples end under the adapter that they began with, and no sync waits for them."""

from __future__ import annotations

from pathlib import Path

import pytest

from bridge.generation import Completion
from megasync.config.load import load_config
from megasync.rollouts.records import load_record, paths_of
from tests.runs.train_cases import launch, metrics, write_config

pytestmark = [pytest.mark.long, pytest.mark.vllm_on_cpu]
NUM_STEPS, STALENESS, LENGTH = 5, 2, 40


def test_a_sync_waits_for_no_sample(tmp_path: Path) -> None:
    lora = {"rank": 4, "alpha": 8.0, "sync": "adapter"}
    config = write_config(
        tmp_path,
        run={"steps": NUM_STEPS},
        engine={"wrap": "ddp", "lora": lora, "optimizer": {"learning_rate": 1e-3}},
        rollout={"max_staleness": STALENESS, "max_new_tokens": LENGTH, "max_model_len": 64, "record": "all"},
    )
    assert load_config(config).adapter_slots == STALENESS + 1
    done = launch(config, ranks=1)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = metrics(tmp_path / "runs" / "run")
    print([(line["sync/pause_seconds"], line["logprob_gap/max"], line["staleness/max"]) for line in lines])
    assert max(line["staleness/max"] for line in lines) <= STALENESS
    assert max(line["logprob_gap/max"] for line in lines if not line["staleness/max"]) < 1e-4
    versions = set[int]()
    for path in paths_of(tmp_path / "runs" / "run").values():
        for group in load_record(path).groups:
            for completion in group.members.values():
                assert isinstance(completion, Completion)
                (version,) = set(completion.weight_versions.tolist())
                versions.add(version)
    assert len(versions) > 2
