"""The trainer's model of each family, every module of it judged; run on a rank of its own (tests/support/ranks.py)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from engine.config import EngineConfig, ModelConfig, ParallelConfig
from engine.runtime import parallel
from engine.trace import Forward
from megasync.comparing.cases import Known
from megasync.comparing.compare import TRAINER, side_of
from megasync.comparing.judge import judge
from megasync.comparing.kinds import explain
from megasync.comparing.reference import Reference
from megasync.comparing.response import Response
from megasync.comparing.shape import Parameters, Shape

RESPONSE = Response(tuple(3 + 7 * n % 100 for n in range(30)), tuple(3 + 11 * n % 100 for n in range(30)), "given")


def judged(folders: dict[str, tuple[Path, str]], fusions: str) -> dict[str, dict[str, Any]]:
    """By name: the module that is nearest to its bound, how near, how many there are, and whether all were traced."""
    parallel.initialize(ParallelConfig(), 0)
    try:
        return {name: _judged(folder, dtype, fusions) for name, (folder, dtype) in folders.items()}
    finally:
        parallel.shutdown()


def small_fault(folder: Path) -> tuple[str, str, str]:
    """Another eps in one norm of a bfloat16 model, which is less than a rounding at every element: where, and what it is."""
    parallel.initialize(ParallelConfig(), 0)
    try:
        forward = Forward(ModelConfig(path=str(folder), dtype="bfloat16"), EngineConfig(), temperature=1.0)
        forward.model.decoder.layers[0].input_layernorm.eps = 1e-5
        side = side_of(TRAINER, forward.trace(RESPONSE.prompt_ids, RESPONSE.token_ids), RESPONSE, {})
    finally:
        parallel.shutdown()
    shape = Shape.of(folder)
    reference = Reference(shape, Parameters(folder, torch.bfloat16, torch.device("cpu")), 1.0)
    (wrong,) = judge(shape.sites, {TRAINER: (reference, side)}).wrong
    return wrong.site, *explain(wrong.site, reference, side, Known())


def _judged(folder: Path, dtype: str, fusions: str) -> dict[str, Any]:
    model = ModelConfig(path=str(folder), dtype=dtype)  # type: ignore[arg-type]
    forward = Forward(model, EngineConfig(fusions=fusions), temperature=0.8)  # type: ignore[arg-type]
    tensors = forward.trace(RESPONSE.prompt_ids, RESPONSE.token_ids)
    shape = Shape.of(folder)
    reference = Reference(shape, Parameters(folder, getattr(torch, dtype), torch.device("cpu")), 0.8)
    found = judge(shape.sites, {TRAINER: (reference, side_of(TRAINER, tensors, RESPONSE, {}))}).locals
    worst = max(found, key=lambda each: each.ratio)
    return {"site": worst.site, "ratio": worst.ratio, "modules": len(found), "traced": sorted(tensors) == sorted(shape.sites)}
