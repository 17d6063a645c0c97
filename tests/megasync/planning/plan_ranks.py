"""What ranks of tests say of their engines, for the plan's counts to be compared with."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.config import AlgorithmConfig, EngineConfig, ModelConfig
from engine.engine import Engine
from engine.runtime import parallel
from engine.runtime.random_state import random_state
from engine.sample import Sample
from megasync.bench.common.random_engine import RandomEngine
from megasync.bench.training.rank import state_bytes
from megasync.planning.activations import trace
from megasync.planning.meta import build_rank

SAMPLES = [Sample(np.arange(1, 4, dtype=np.int32), np.arange(3, 20, dtype=np.int32)) for _ in range(4)]


def states(folders: dict[str, str], cases: list[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Of each case, (model, engine's keys), after a step: bytes by kind, and parameters of the bare chunks."""
    found = []
    for model, keys in cases:
        engine = EngineConfig.model_validate(keys)
        parallel.initialize(engine.parallel, 0)
        built: Engine = RandomEngine(ModelConfig(path=folders[model]), engine, AlgorithmConfig(name="sft"), num_steps=1)
        counted = sum(item.tensor.numel() for items in built.whole_parameters() for item in items)
        built.update(built.prepare(SAMPLES))
        before = random_state()
        rank = build_rank(ModelConfig(path=folders[model]), engine.model_copy(update={"fusions": "none"}))
        traced = trace(rank, engine.model_copy(update={"fusions": "none"}), (32, 32))
        after = random_state()
        is_same = before["random"] == after["random"] and bool((before["torch"] == after["torch"]).all())
        sizes = {"state": state_bytes(built), "items": counted, "counts": rank.counts, "held": traced.held}
        losses = [built.update(built.prepare(SAMPLES))["loss/sft"]]
        found.append({**sizes, "loss": losses, "is_same": is_same, "stage": built.layout.pipeline_rank})
        parallel.shutdown()
    return found
