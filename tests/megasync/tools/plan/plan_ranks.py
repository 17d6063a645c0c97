"""Memory of engines on real ranks, for plans to be compared with."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from bench.equivalence.measure import leave_groups

from engine.config import EngineConfig, ModelConfig
from engine.algorithm import AlgorithmConfig
from engine.engine import Engine
from engine.runtime import parallel
from engine.sample import Sample
from bench.common.random_engine import RandomEngine
from bench.training.rank import state_bytes
from megasync.tools.plan.meta.ranks import build_rank
from megasync.tools.plan.meta.tracker import Tracker

SAMPLES = [Sample(np.arange(1, 4, dtype=np.int32), np.arange(3, 20, dtype=np.int32)) for _ in range(4)]


def state(model: dict[str, Any], keys: dict[str, Any]) -> dict[str, Any]:
    """Bytes of an engine by kind after a step, and the counts of a model that is built on the rank's own groups."""
    engine, config = EngineConfig.model_validate(keys), ModelConfig.model_validate(model)
    parallel.initialize(engine.parallel, 0)
    built: Engine = RandomEngine(config, engine, AlgorithmConfig(name="sft"), num_steps=2)
    built.update(built.prepare(SAMPLES))
    found = {
        "state": state_bytes(built),
        "counts": build_rank(config, engine).counts,
        "stage": built.layout.pipeline_rank,
    }
    leave_groups()
    return found


class RealTracker(Tracker):
    """Runs collectives."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        self._add_all(result)
        return result


def passes(model: dict[str, Any], keys: dict[str, Any]) -> int:
    """The most bytes in forward and backward passes beside weights, gradients and the optimizer's state."""
    engine, config = EngineConfig.model_validate(keys), ModelConfig.model_validate(model)
    parallel.initialize(engine.parallel, 0)
    built: Engine = RandomEngine(config, engine, AlgorithmConfig(name="sft"), num_steps=2)
    samples = [Sample(np.ones(1, np.int32), np.ones(127, np.int32)) for _ in range(8)]
    built.update(built.prepare(samples))
    (mini,) = built.prepare(samples)
    tracker, wrapped = RealTracker(), built.wrapped
    tracker.leave_out([*wrapped.parameters(), *wrapped.gradients(), *wrapped.main_weights()])
    with tracker.counting_resizes(), tracker:
        built._runner.run(mini.microbatches, built.chunks, built._criterion.read, partial(built._loss, mini))
    leave_groups()
    return tracker.peak_bytes
