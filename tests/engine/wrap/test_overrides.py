"""Every field of megatron-core's DDP config, under both wraps: it trains and exports as without it, or is refused by name.

python -m pytest tests/engine/wrap/test_overrides.py
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import EngineConfig
from engine.wrap.ddp_fields import REFUSED, TAKEN, refusal
from engine.wrap.table import ddp_config
from tests.support.config_files import cannot_run, write_runnable
from tests.support.ranks import run_ranks
from tests.support.tiny_models import write_tiny_model

WRAPS = ("ddp", "megatron_fsdp")
VALUES: dict[type, list[Any]] = {bool: [True, False], int: [1000]}
# several buckets; each gathers its parameters by itself
TOGETHER = {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 1000}


def cases(wrap: str) -> list[dict[str, Any]]:
    """Every value of every field that may be set, and some together; those alone that change the wrap's own."""
    one = [{name: value} for name, field in TAKEN.items() for value in field.choices or VALUES[field.kind]]
    strategies = TAKEN["data_parallel_sharding_strategy"].choices
    several = [TOGETHER, *({"data_parallel_sharding_strategy": each, "overlap_param_gather": False} for each in strategies)]
    allowed = [each for each in one + several if not any(refusal(wrap, *override) for override in each.items())]  # type: ignore[attr-defined]
    plain = ddp_config(EngineConfig(wrap=wrap))
    return [{}, *(each for each in allowed if ddp_config(EngineConfig(wrap=wrap, overrides=each)) != plain)]


@pytest.mark.parametrize("wrap", WRAPS)
def test_what_may_be_set_trains_and_exports_alike(tmp_path: Path, wrap: str) -> None:
    """At two data-parallel ranks, bit for bit: losses, log-probs right after a step, and the exported parameters on each rank."""
    path = str(write_tiny_model(tmp_path, "qwen3", tied=True, num_hidden_layers=2, hidden_size=64))
    overrides = cases(wrap)
    strategies = [each for each in overrides if not each or "data_parallel_sharding_strategy" in each] if wrap != "ddp" else []
    arguments = {"path": path, "cases": [{"wrap": wrap, "overrides": each} for each in overrides]}
    arguments["cases"] += [{"wrap": wrap, "overrides": each, "lora": {"rank": 2}} for each in strategies]
    for results in run_ranks(2, "tests.engine.wrap.override_cases:trained", arguments, alone=True):
        plain, others = results[0], results[1 : len(overrides)]
        adapted = results[len(overrides) :]
        assert not adapted or sum(name.endswith(" adapter") for name in adapted[0]["weights"]) == 8
        pairs = [(plain, *each) for each in zip(overrides[1:], others, strict=True)]
        pairs += [(adapted[0], *each) for each in zip(strategies[1:], adapted[1:], strict=True)]
        for plain, override, other in pairs:
            assert plain["weights"].keys() == other["weights"].keys(), override
            differing = [name for name, tensor in plain["weights"].items() if not torch.equal(other["weights"][name], tensor)]
            assert not differing, f"{override}: {len(differing)} of {len(plain['weights'])} tensors differ"
            assert other["losses"] == plain["losses"], override
            assert torch.equal(other["log_probs"], plain["log_probs"]), override


def test_every_field_is_judged() -> None:
    from engine.runtime import parallel  # noqa: F401  (the device layer comes before megatron-core)
    from megatron.core.distributed import DistributedDataParallelConfig

    fields = {field.name for field in dataclasses.fields(DistributedDataParallelConfig)}
    assert fields == TAKEN.keys() | REFUSED.keys()
    assert not TAKEN.keys() & REFUSED.keys()


@pytest.mark.parametrize(
    ("wrap", "override", "reason"),
    [
        ("ddp", "overlap_grad_reduce=1", "true or false"),
        ("ddp", "bucket_size=true", "whole number of at least 1"),
        ("megatron_fsdp", "bucket_size=0", "whole number of at least 1"),
        ("megatron_fsdp", "data_parallel_sharding_strategy=no_shard", "optim_grads_params"),
        ("megatron_fsdp", "data_parallel_sharding_strategy=3", "expected text"),
        ("ddp", "fsdp_double_buffer=true", "no effect with engine.wrap=ddp"),
        *((wrap, f"{name}=true", reason) for wrap in WRAPS for name, reason in REFUSED.items()),
    ],
)
def test_what_is_refused_is_said_before_anything_starts(tmp_path: Path, wrap: str, override: str, reason: str) -> None:
    message = cannot_run(write_runnable(tmp_path), f"engine.wrap={wrap}", f"engine.overrides.{override}")
    assert f"engine.overrides.{override.partition('=')[0]} = " in message
    assert reason in message
