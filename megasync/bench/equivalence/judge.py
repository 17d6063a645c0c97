"""How far a case is from its reference, transformers and its folder, and whether that is within bounds. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from engine.config import MOE_FAMILIES

MAX_STEP_DIFFERENCE, MAX_STEP_DIFFERENCE_OF_EXPERTS = 1e-5, 1e-4  # of losses and gradient norms
MAX_LOG_PROB_DIFFERENCE = 1e-4
STEPS = ("loss", "grad_norm", "balance")
LOG_PROBS = ("log_probs", "log_probs_trained")
EXPORTS = ("export_before", "export_after")
EXPORT_PROBLEMS = ("differing", "missing", "twice")
Found = dict[str, Any]


def bound_of(name: str, family: str) -> float:
    """What a difference of this name may be."""
    if name in LOG_PROBS:
        return MAX_LOG_PROB_DIFFERENCE
    return MAX_STEP_DIFFERENCE_OF_EXPERTS if family in MOE_FAMILIES else MAX_STEP_DIFFERENCE


def differences(found: Found, reference: Found, transformers: tuple[list[float], list[float]]) -> dict[str, float]:
    """The largest, by name. Losses and gradient norms: relative to the reference's, a loss below 1 to 1; log-probs: absolute.

    `transformers`: its log-probs with the model's folder and with the folder that the case left.
    """
    worst: dict[str, float] = {}
    by_step = list(zip(found["history"], reference["history"], strict=True))
    for name in STEPS:
        pairs = [(own[name], other[name]) for own, other in by_step if name in other]
        scales = [abs(other) if name == "grad_norm" else max(1.0, abs(other)) for _, other in pairs]
        if pairs:
            worst[name] = _largest(abs(own - other) / (scale or 1.0) for (own, other), scale in zip(pairs, scales, strict=True))
    for name, own, other in zip(LOG_PROBS, found["log_probs"], transformers, strict=True):
        worst[name] = _largest(abs(mine - theirs) for mine, theirs in zip(own, other, strict=True))
    return worst


def _largest(values: Iterable[float]) -> float:
    """As max, but what is no number stays."""
    return float(np.max(list(values)))


def problems(found: Found, worst: dict[str, float], family: str, micro_batches: int) -> list[str]:
    """What is not right with a case, in words; `micro_batches`: that each step has to have on a rank."""
    bounds = {name: bound_of(name, family) for name in worst}
    wrong = [f"{name} {value:.1e}, above {bounds[name]:g}" for name, value in worst.items() if not value <= bounds[name]]
    for name in EXPORTS:
        for what in EXPORT_PROBLEMS:
            names = found[name][what]
            wrong += [f"{name}: {len(names)} tensors {what}, first {names[0]}"] if names else []
    if found["micro_batches"][0] < micro_batches:
        wrong.append(f"steps of {found['micro_batches'][0]} micro-batches")
    return wrong


def is_unequal(export: Found) -> bool:
    return any(export[what] for what in EXPORT_PROBLEMS)
