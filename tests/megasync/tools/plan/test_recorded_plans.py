"""Planned memory and seconds beside those that GPUs took."""

from __future__ import annotations

from pathlib import Path

import pytest

from megasync.report.log import TRAINING_DEVICE, WORKER_DEVICE

from tests.megasync.tools.plan.recorded import lines, plan_of

CASES = (  # each of other parts: wraps, recompute, adapters, experts, dtypes, contexts, colocation, graphs, shares of a GPU
    *("8b-fsdp-colocated", "fsdp-full", "ddp-bf16-gradients", "lora-fsdp-32k", "moe3-selective", "mid-float32", "few-fsdp"),
    *("train_h200_131k_cp2 ddp", "3b-share", "135m-eager", "experts-share", "3b-tensor-share", "3b-adapter", "7b-colocated"),
    *("steps-3b-kl", "steps-3b-stale", "steps-135m-colocated"),
)
TOLERANCES = {
    "memory/tensors_peak_bytes": 0.035,
    "memory/device_bytes": 0.04,
    TRAINING_DEVICE: 0.04,
    WORKER_DEVICE: 0.035,
    "memory/host_peak_bytes": 0.1,
    "step/seconds": 0.3,
    "train": 0.3,
    "rollout/seconds": 0.3,
}


@pytest.mark.parametrize("case", CASES)
def test_plans_are_near_to_recorded_runs(case: str, tmp_path: Path) -> None:
    line = lines()[case]
    predicted, measured = plan_of(line, tmp_path).predicted, line["measured"]
    compared = {name: value for name, value in predicted.items() if name in measured and name in TOLERANCES}
    assert compared and all(value == pytest.approx(measured[name], rel=TOLERANCES[name]) for name, value in compared.items()), {
        name: (value, measured[name]) for name, value in compared.items()
    }


def test_what_ran_out_of_memory_does_not_fit(tmp_path: Path) -> None:
    assert plan_of(lines()["too-large-ddp"], tmp_path).problems
