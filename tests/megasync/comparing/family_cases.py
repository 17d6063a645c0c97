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


def judged(
    folders: dict[str, tuple[Path, str]], fusions: str, head_dtype: str = "model", exact: bool = False
) -> dict[str, dict[str, Any]]:
    """By name: the module that is nearest to its bound, how near, how many there are, and whether all were traced."""
    parallel.initialize(ParallelConfig(), 0)
    try:
        engine = EngineConfig(fusions=fusions, head_dtype=head_dtype)  # type: ignore[arg-type]
        models = {
            name: ModelConfig(path=str(folder), dtype=dtype, exact=exact)  # type: ignore[arg-type]
            for name, (folder, dtype) in folders.items()
        }
        return {name: _judged(model, engine) for name, model in models.items()}
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


def faults(folder: Path) -> dict[str, tuple[str, str, str]]:
    """Of a float32 model with biases: where each is, and what it looks like."""
    parallel.initialize(ParallelConfig(), 0)
    try:
        forward = Forward(ModelConfig(path=str(folder), dtype="float32"), EngineConfig(), temperature=1.0)
        layer = forward.model.decoder.layers[1]
        bias, norm = layer.self_attention.linear_qkv.bias.data, layer.pre_mlp_layernorm.weight.data
        row = forward.model.embedding.word_embeddings.weight.data[RESPONSE.ids[7]]
        activation = layer.mlp.linear_fc2.weight.data
        changes = {"bias": (bias[5:6], 1.05), "norm": (norm, 1.01), "row": (row, 1.01), "product": (activation, 0.998)}
        found = {}
        for name, (part, factor) in changes.items():
            former = part.clone()
            part.mul_(factor)
            found[name] = side_of(TRAINER, forward.trace(RESPONSE.prompt_ids, RESPONSE.token_ids), RESPONSE, {})
            part.copy_(former)
    finally:
        parallel.shutdown()
    shape = Shape.of(folder)
    reference = Reference(shape, Parameters(folder, torch.float32, torch.device("cpu")), 1.0)
    wrong = {name: judge(shape.sites, {TRAINER: (reference, side)}).wrong for name, side in found.items()}
    assert all(len(each) == 1 for each in wrong.values()), wrong
    return {name: (each[0].site, *explain(each[0].site, reference, found[name], Known())) for name, each in wrong.items()}


def _judged(model: ModelConfig, engine: EngineConfig) -> dict[str, Any]:
    folder = Path(model.path)
    forward = Forward(model, engine, temperature=0.8)
    asked: list[str] = []  # what a swap may put another tensor in the place of
    tensors = forward.trace(RESPONSE.prompt_ids, RESPONSE.token_ids, lambda name, _: asked.append(name))
    shape = Shape.of(folder)
    reference = Reference(shape, Parameters(folder, getattr(torch, model.dtype), torch.device("cpu")), 0.8)
    found = judge(shape.sites, {TRAINER: (reference, side_of(TRAINER, tensors, RESPONSE, {}))}).locals
    worst = max(found, key=lambda each: each.ratio)
    is_traced = sorted(tensors) == sorted(asked) == sorted(shape.sites)
    return {"site": worst.site, "ratio": worst.ratio, "modules": len(found), "traced": is_traced}
