"""What the tests of exact layers run on their ranks."""

from __future__ import annotations

import random
from typing import Any

import torch

from engine.objective.logits import LogProbs
from engine.sample import Sample
from tests.engine.engine_cases import engine, hf_log_probs, log_probs, random_samples


def packings(path: str, wrap: str, lora: dict[str, Any], dtype: str = "float32") -> dict[str, Any]:
    """Log-probs alone, packed in any order, and as transformers has them; what a step with chunks of logits gives."""
    lengths = (1, 2, 40, 63, 64, 65, 200, 500)
    generator = torch.Generator().manual_seed(3)
    samples = []
    for prompt in lengths:
        ids = tuple(torch.randint(3, 120, (prompt + 30,), generator=generator).tolist())
        samples.append(Sample(ids[:prompt], ids[prompt:], tuple([-4.8] * 30), reward=float(prompt % 3), group=prompt % 2))
    with engine(path, wrap, exact=True, name="grpo", tokens=4000, lora=lora, dtype=dtype) as built:
        alone = [log_probs(built, [sample])[0] for sample in samples]
        differing = 0
        for seed in range(4):
            order = random.Random(seed).sample(range(len(samples)), 8 - seed)
            found = log_probs(built, [samples[place] for place in order])
            differing += sum(int((one != alone[place]).sum()) for one, place in zip(found, order, strict=True))
        metrics = built.update(built.prepare(samples))
        moved = float((torch.cat(log_probs(built, samples)) - torch.cat(alone)).abs().max())
    reference = float((torch.cat(hf_log_probs(path, samples)) - torch.cat(alone)).abs().max())
    return {"differing": differing, "reference": reference, "ratio": metrics["ratio/first_minibatch_mean"], "moved": moved}


def histories(path: str, cases: list[dict[str, Any]], num_steps: int) -> list[list[tuple[float, float]]]:
    """(loss, gradient norm) of each step of each case."""
    results = []
    for case in cases:
        with engine(path, **{"name": "grpo", **case}) as built:
            steps = [built.update(built.prepare(random_samples(16, seed=step))) for step in range(num_steps)]
            results.append([(step["loss/total"], step["grad_norm"]) for step in steps])
            assert isinstance(built._criterion.read, LogProbs)
    return results
