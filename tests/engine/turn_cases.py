"""What tests/engine/test_objectives.py runs on its ranks of `algorithm.credit=turn`: samples whose turns have rewards."""

from __future__ import annotations

import dataclasses
import math
from itertools import groupby
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from engine.sample import Sample
from tests.engine.engine_cases import random_samples
from tests.engine.objective_cases import as_episodes, gradient_gap, own_log_probs, trained


def as_turns(samples: list[Sample]) -> list[Sample]:
    """`as_episodes` in which each run of sampled tokens is a turn with a reward; a member's branches have turns by turns."""
    draw, found = np.random.default_rng(3), list[Sample]()
    for _, own in groupby(as_episodes(samples, 0.0), lambda sample: (sample.group, sample.member)):
        branches = list(own)
        masks = [each.is_sampled if len(each.is_sampled) else np.ones(len(each.response_ids), np.bool_) for each in branches]
        edges = [np.flatnonzero(np.diff([False, *mask, False])).tolist() for mask in masks]
        pairs = [(first, place, end) for place, own in enumerate(edges) for first, end in zip(own[::2], own[1::2], strict=True)]
        turns, rewards = sorted(pairs), draw.normal(size=len(pairs))
        returns = [math.fsum(rewards[turn:]) for turn in range(len(rewards))]
        for place, branch in enumerate(branches):
            spans = [(turn, first, end - first) for turn, (first, at, end) in enumerate(turns) if at == place]
            found.append(dataclasses.replace(branch, reward=returns[0], turn_returns=returns, turn_spans=spans))
    return found


def turns_beside_transformers(cases: list[dict[str, Any]]) -> list[dict[str, float]]:
    """Policy loss and largest difference of a gradient to transformers, by advantages of each token that plain loops give."""
    results, samples = [], as_turns(random_samples(12, seed=5))
    for case in cases:
        metrics, found = trained(samples=samples, name="grpo", importance_correction="none", credit="turn", **case)
        model, total = AutoModelForCausalLM.from_pretrained(case["path"], dtype=torch.float32), torch.zeros(())
        for sample in samples:
            values = own_log_probs(model, sample)
            for (_, first, number), advantage in zip(sample.turn_spans, advantages_by_hand(sample, samples), strict=True):
                total = total - advantage * values[first : first + number].sum()
        gap, named = gradient_gap(found, model, total / sum(sample.num_sampled for sample in samples))
        results.append({"gradient": gap, "named": named, "norm": metrics["grad_norm"]})
    return results


def advantages_by_hand(sample: Sample, samples: list[Sample]) -> list[float]:
    """Of the sample's turns."""
    members = {each.member: list(each.turn_returns) for each in samples if each.group == sample.group}
    totals = [own[0] for own in members.values()]
    most = max(map(len, members.values()))
    earlier = [[own[0] - own[turn] for own in members.values() if turn < len(own)] for turn in range(most)]
    deviation = max(float(np.std(each, ddof=1)) for each in (totals, *earlier) if len(each) > 1) + 1e-6
    found = []
    for turn, _, _ in sample.turn_spans:
        before = sample.turn_returns[0] - sample.turn_returns[turn] - float(np.mean(earlier[turn]))
        found.append((sample.turn_returns[0] - float(np.mean(totals)) - before) / deviation)
    return found
