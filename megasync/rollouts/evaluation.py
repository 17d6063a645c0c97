"""Evaluation by generation: the mean reward of greedy responses to one held-out file, avg@k and pass@k on each of several sets.

Leaves out when it is done, which is the session's.

    for evaluation in evaluations(config, data):
        requests_of(evaluation, prompts, run_seed)                                # to be generated
        outcome_of(evaluation, prompts, completions, rewards, num_lines).metrics  # {"eval/math/avg@4": 0.4, ...}
"""

from __future__ import annotations

import math
import statistics
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bridge.generation import Sampling
from megasync.data.data import Example
from megasync.rollouts import requests
from megasync.rollouts.requests import SEED_STRIDE

if TYPE_CHECKING:
    from bridge.generation import Completion, GenerationRequest
    from megasync.config.schema import Config
    from megasync.data.load import RunData
    from megasync.data.prompts import Prompts
    from megasync.episodes.task import EpisodeResult

HELD_OUT = "held_out"  # in samples.jsonl the name of data.eval's file, where it is one


@dataclass(frozen=True)
class Evaluation:
    """Examples, and how they are answered. `pass_reward` 0: the file of which the mean reward is taken."""

    name: str
    examples: list[Example]
    sampling: Sampling
    pass_reward: float = 0.0


@dataclass(frozen=True)
class Outcome:
    """Metrics of an evaluation, and lines of samples.jsonl without their step."""

    metrics: dict[str, float]
    lines: list[dict[str, Any]]


def evaluations(config: Config, data: RunData) -> list[Evaluation]:
    """All that data.eval names."""
    if config.data.eval_sets:
        sets = config.data.eval_sets.items()
        return [Evaluation(n, data.eval_sets[n], requests.set_sampling(config.rollout, s), s.pass_reward) for n, s in sets]
    return [Evaluation(HELD_OUT, data.held_out, requests.greedy_sampling(config.rollout))] if config.data.eval else []


def requests_of(evaluation: Evaluation, prompts: Prompts, run_seed: int) -> list[GenerationRequest]:
    """One for each example, in order; the same at every evaluation of a run."""
    seeds = [zlib.crc32(f"{evaluation.name}/{index}".encode()) for index in range(len(evaluation.examples))]
    return [
        requests.make_request(prompts, example, evaluation.sampling, (run_seed * SEED_STRIDE + seed) % 2**31)
        for example, seed in zip(evaluation.examples, seeds, strict=True)
    ]


def outcome_of(
    evaluation: Evaluation,
    prompts: Prompts,
    completions: list[list[Completion | EpisodeResult]],
    rewards: list[list[float]],
    num_lines: int,
) -> Outcome:
    """From the completions and rewards of every example, in order. `num_lines`: how many first samples of prompts are kept."""
    if evaluation.pass_reward:
        ends = [completion.finish_reason == "length" for group in completions for completion in group]
        metrics = set_metrics(evaluation.name, rewards, evaluation.pass_reward)
        metrics[f"eval/{evaluation.name}/truncated"] = statistics.fmean(ends)
    else:
        metrics = {"eval/reward": statistics.fmean(reward for group in rewards for reward in group)}
    name = f"eval/{evaluation.name}/error" if evaluation.pass_reward else "eval/reward_error"
    metrics |= error_metric(name, [statistics.fmean(group) for group in rewards])
    firsts = list(zip(evaluation.examples, completions, rewards, strict=True))[:num_lines]
    lines = [requests.sample_line(prompts, example, group[0], own[0], evaluation.name) for example, group, own in firsts]
    return Outcome(metrics, lines)


def set_metrics(name: str, rewards: Sequence[Sequence[float]], pass_reward: float) -> dict[str, float]:
    """avg@n, the mean reward of n samples a prompt, and pass@k for k = n and the powers of two below it."""
    num_samples = len(rewards[0])
    passed = [sum(reward >= pass_reward for reward in group) for group in rewards]
    metrics = {f"eval/{name}/avg@{num_samples}": statistics.fmean(reward for group in rewards for reward in group)}
    for k in sorted({2**power for power in range(num_samples.bit_length()) if 2**power < num_samples} | {num_samples}):
        metrics[f"eval/{name}/pass@{k}"] = statistics.fmean(pass_at_k(num_samples, count, k) for count in passed)
    return metrics


def standard_error(values: Sequence[float]) -> float:
    """Of the mean of one value a prompt, for two prompts or more (E. Miller, arXiv:2411.00640, sections 2.1 and 2.2)."""
    return statistics.stdev(values) / math.sqrt(len(values))


def error_metric(name: str, values: Sequence[float]) -> dict[str, float]:
    """The standard error of one value a prompt, under this name; {} for one prompt alone."""
    return {name: standard_error(values)} if len(values) > 1 else {}


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """The chance that one of k samples passes, estimated without bias from `num_samples` >= k of which `num_passed` did.

    1 - C(n - c, k) / C(n, k), as a product (arXiv:2107.03374, section 2.1).
    """
    missed = 1.0
    for number in range(num_samples - num_passed + 1, num_samples + 1):
        missed *= max(0.0, 1.0 - k / number)
    return 1.0 - missed
