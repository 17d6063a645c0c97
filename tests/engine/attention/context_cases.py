"""What tests/engine/attention/test_context.py runs on its ranks (see ranks.py)."""

from __future__ import annotations

from typing import Any

from engine.sample import Sample
from tests.engine.engine_cases import engine, log_probs, random_samples


def tiny_samples(count: int) -> list[Sample]:
    """Two tokens each: with four context ranks two of them have no token of any."""
    return [Sample((3 + number,), (7,), (-4.8,), reward=number % 3, group=number // 4) for number in range(count)]


def steps(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Metrics of each case's steps, and log-probs and greedy matches after them."""
    results = []
    for case in cases:
        case = dict(case)
        options = {"name": "grpo", "num_minibatches": 2, "kl_coefficient": 0.1, "loss_aggregation": "sequence_mean"}
        # with Adam's usual epsilon, gradients that are nothing but rounding move weights as far as all others
        options |= {"ratio_level": "sequence", "optimizer": {"clip_grad_norm": 0.0, "epsilon": 1e-5}, "tokens": 100}
        with engine(case.pop("path"), **{**options, **case}) as built:
            batches = [random_samples(12, seed=0), tiny_samples(4)]
            metrics = [built.update(built.prepare(batch)) for batch in batches]
            greedy = [each.is_match for each in built.held_out(batches[0])]
            values = [value for each in log_probs(built, batches[0]) for value in each.tolist()]
            results.append({"metrics": metrics, "log_probs": values, "greedy": greedy})
    return results
