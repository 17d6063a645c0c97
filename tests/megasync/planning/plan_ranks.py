"""What ranks of tests say of their engines, for the plan's counts to be compared with."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.engine.engine_cases import leave_groups

from engine.config import AlgorithmConfig, EngineConfig, ModelConfig
from engine.engine import Engine
from engine.runtime import parallel
from engine.runtime.random_state import random_state
from engine.sample import Sample
from megasync.bench.common.random_engine import RandomEngine
from megasync.bench.training.rank import state_bytes
from megasync.planning.meta.activations import trace
from megasync.planning.meta.ranks import build_rank

SAMPLES = [Sample(np.arange(1, 4, dtype=np.int32), np.arange(3, 20, dtype=np.int32)) for _ in range(4)]


def state(model: dict[str, Any], keys: dict[str, Any]) -> dict[str, Any]:
    """Bytes of an engine by kind after a step; and what a trace on the rank's own groups counts and leaves as it was."""
    engine, config = EngineConfig.model_validate(keys), ModelConfig.model_validate(model)
    parallel.initialize(engine.parallel, 0)
    built: Engine = RandomEngine(config, engine, AlgorithmConfig(name="sft"), num_steps=2)
    built.update(built.prepare(SAMPLES))
    before = random_state()
    rank = build_rank(config, engine)
    traced = trace(rank, engine, (32, 32))
    after = random_state()
    built.update(built.prepare(SAMPLES))
    found = {
        "state": state_bytes(built),
        "counts": rank.counts,
        "held": traced.held,
        "is_same": before["random"] == after["random"] and bool((before["torch"] == after["torch"]).all()),
        "stage": built.layout.pipeline_rank,
    }
    leave_groups()
    return found
