"""The trainer's side of `megasync replay --trainer`, run on a rank of its own (tests/support/ranks.py)."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from bridge.generation import Completion, GenerationRequest
from engine.config import ParallelConfig
from engine.runtime import parallel
from megasync.config.schema import Config
from megasync.rollouts.records import RecordedGroup
from megasync.tools.replay import scored


def at_temperatures(folder: Path, temperatures: list[float]) -> scored.Scores:
    """Of one response, recorded at each of these, in a run whose config has another one."""
    done = Completion(np.arange(6, 13), np.zeros(7), np.zeros(7))
    given = {"model": {"path": str(folder), "dtype": "float32"}, "rollout": {"temperature": 1.5}}
    config, members = Config.model_validate(given), {}
    for key, temperature in enumerate(temperatures):
        request = GenerationRequest((3, 4, 5), temperature=temperature)
        members[key, 0] = RecordedGroup(key, request, {0: done}, {0: 0.0})
    parallel.initialize(ParallelConfig(), 0)
    try:
        return scored.score(config, folder, scored.pieces_of(members, config))
    finally:
        parallel.shutdown()
