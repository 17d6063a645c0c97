"""What test_overrides.py runs on its ranks: training under one override after another, in one pair of processes."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from tests.engine.engine_cases import engine, log_probs, random_samples


def trained(path: str, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each case after two steps: the losses, log-probs and all exported tensors.

    Log-probs come before the export, and again after the second step's, so that both meet parameters that nothing has used yet.
    """
    results = []
    for case in cases:
        with engine(path, name="sft", optimizer={"clip_grad_norm": 0.0, "warmup_steps": 0}, **case) as built:
            losses, values = [], []
            for step in range(2):
                losses.append(built.update(built.prepare(random_samples(8, seed=step)))["loss/sft"])
                if step == 0:
                    values += log_probs(built, random_samples(4, seed=9))
            weights = {}
            for item in itertools.chain.from_iterable(built.whole_parameters()):
                weights[item.name] = item.tensor.detach().clone()
                if item.adapter is not None:
                    weights[f"{item.name} adapter"] = item.adapter.b.detach().clone()
            values += log_probs(built, random_samples(4, seed=9))
        results.append({"losses": losses, "log_probs": torch.cat(values), "weights": weights})
    return results
