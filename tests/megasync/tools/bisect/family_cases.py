"""The trainer's model of each family, every module of it judged; run on a rank of its own (tests/support/ranks.py)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from engine.config import EngineConfig, ModelConfig, ParallelConfig
from engine.runtime import parallel
from engine.trace import Forward
from megasync.tools.bisect.judge import Local, judge
from megasync.tools.bisect.reference import Reference
from megasync.tools.bisect.response import Response
from megasync.tools.bisect.side import TRAINER, Side

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
        return {name: _judged_family(model, engine) for name, model in models.items()}
    finally:
        parallel.shutdown()


def wrong_with(folder: Path, faults: dict[str, tuple[str, float]], dtype: str) -> dict[str, list[str]]:
    """The modules that are wrong with each fault alone: a parameter or attribute of the trainer's model, and its factor."""
    parallel.initialize(ParallelConfig(), 0)
    try:
        forward = Forward(ModelConfig(path=str(folder), dtype=dtype), EngineConfig(), temperature=1.0)  # type: ignore[arg-type]
        reference = Reference(folder, getattr(torch, dtype), torch.device("cpu"), 1.0)
        return {name: _wrong_with(forward, reference, *fault) for name, fault in faults.items()}
    finally:
        parallel.shutdown()


def _wrong_with(forward: Forward, reference: Reference, place: str, factor: float) -> list[str]:
    """`place`: the path of an attribute, of a parameter perhaps with a row behind it, as in `a.b.weight/5`."""
    path, _, row = place.partition("/")
    owner, _, name = path.rpartition(".")
    module = forward.model.get_submodule(owner)
    former = getattr(module, name)
    if isinstance(former, torch.Tensor):
        part, kept = former.data[int(row) : int(row) + 1] if row else former.data, former.data.clone()
        part.mul_(factor)
        found = _judged(forward, reference)
        former.data.copy_(kept)
    else:
        setattr(module, name, former * factor)
        found = _judged(forward, reference)
        setattr(module, name, former)
    return [each.site for each in found if each.is_wrong]


def _judged(forward: Forward, reference: Reference) -> list[Local]:
    side = Side.of(TRAINER, forward.trace(RESPONSE.prompt_ids, RESPONSE.token_ids), RESPONSE)
    return judge(list(reference.sites.values()), [(reference, side)]).locals


def _judged_family(model: ModelConfig, engine: EngineConfig) -> dict[str, Any]:
    forward = Forward(model, engine, temperature=0.8)
    asked: list[str] = []  # modules whose results a swap may replace
    tensors = forward.trace(RESPONSE.prompt_ids, RESPONSE.token_ids, lambda name, _: asked.append(name))
    reference = Reference(Path(model.path), getattr(torch, model.dtype), torch.device("cpu"), 0.8)
    found = judge(list(reference.sites.values()), [(reference, Side.of(TRAINER, tensors, RESPONSE))]).locals
    worst = max(found, key=lambda each: each.ratio)
    is_traced = sorted(tensors) == sorted(asked) == sorted(reference.sites)
    return {"site": worst.site, "ratio": worst.ratio, "modules": len(found), "traced": is_traced}
