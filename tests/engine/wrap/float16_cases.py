"""What the tests of float16 and of the output layer in float32 run on their ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from engine import checkpoint
from engine.engine import Engine
from tests.engine.engine_cases import engine, everywhere, hf_log_probs, log_probs, random_samples


def _steps(built: Engine, steps: range) -> list[dict[str, float]]:
    names = ("loss/total", "grad_norm", "train/skipped_steps", "train/loss_scale")
    found = []
    for step in steps:
        metrics = built.update(built.prepare(random_samples(16, seed=step)))
        found.append({name: metrics[name] for name in names if name in metrics})
    return found


def histories(cases: list[dict[str, Any]], num_steps: int) -> list[list[dict[str, float]]]:
    """What the steps of each case report."""
    results = []
    for case in cases:
        case = dict(case)
        with engine(case.pop("path"), name="grpo", **case) as built:
            results.append(_steps(built, range(num_steps)))
    return results


def resumed(path: str, root: str, wrap: str) -> dict[str, Any]:
    """A run in float16 and one that goes on from its second step, whose loss scale has fallen; the checkpoint's dtypes."""
    options: dict[str, Any] = {"wrap": wrap, "dtype": "float16", "name": "grpo", "optimizer": {"loss_scale": 2.0**30}}
    with engine(path, **options) as built:
        before = _steps(built, range(16))
        checkpoint.save(Path(root), 16, built, everywhere(built), Path(path), keep=1).wait()
        after = _steps(built, range(16, 19))
    saved = checkpoint.newest(Path(root))
    assert saved is not None
    with engine(path, **checkpoint.engine_arguments(saved), **options) as built:
        checkpoint.restore(saved, built)
        again = _steps(built, range(16, 19))
    index = json.loads((saved / "index.json").read_text())
    return {"before": before, "after": after, "again": again, "scaler": index["loss_scaler"]}


def gaps(path: str, cases: list[dict[str, Any]]) -> list[float]:
    """The mean difference of each case's log-probs to those of transformers in float32."""
    samples, results = random_samples(24, seed=5), []
    reference = torch.cat(hf_log_probs(path, samples))
    for case in cases:
        with engine(path, name="sft", **case) as built:
            results.append(float((torch.cat(log_probs(built, samples)) - reference).abs().mean()))
    return results
