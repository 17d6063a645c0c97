"""A whole run whose replicas are quantised, with adapters merged and weights gathered, and its resume with replicas that are not.

    python -m pytest tests/runs/test_fp8_runs.py
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.runs.train_cases import metrics, train, write_config
from tests.support.tiny_models import write_tiny_model

pytestmark = [pytest.mark.vllm_on_cpu, pytest.mark.long, pytest.mark.timeout(600)]
MOST = 0.5  # of the mean gap, in nats a token: of random weights of another seed it is 1 to 2
LEAST = 0.05


def test_a_run_on_quantised_replicas_resumes_without_them(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model", "qwen3", dtype=torch.bfloat16)
    config = write_config(
        tmp_path,
        run={"steps": 3},
        model={"path": str(model), "dtype": "bfloat16"},
        engine={"wrap": "megatron_fsdp", "lora": {"rank": 4, "alpha": 8}},
        rollout={"dtype": "fp8", "max_staleness": 1, "on_update": "continue"},
        sync={"verify": "readback", "log": "deltas"},
        checkpoint={"every_steps": 3},
    )
    for more, numbers in (([], [1, 2, 3]), (["run.steps=5", "rollout.dtype=model"], [1, 2, 3, 4, 5])):
        code, said = train(config, *more)
        assert code == 0, said
        lines = metrics(tmp_path / "runs" / "run")
        assert [line["step"] for line in lines] == numbers
        assert all(line["sync/verified"] == 1 for line in lines)
    quantised, plain = lines[:3], lines[3:]
    assert all(LEAST < line["sync/canary_gap"] < MOST and line["logprob_gap/mean"] < MOST for line in quantised)
    assert all(line["sync/canary_gap"] < LEAST for line in plain)
    assert quantised[0]["sync/bytes"] < 0.75 * plain[0]["sync/bytes"]
