"""Metrics of a batch of rollouts: rewards, lengths, staleness, penalties, ties, episodes.

Groups whose samples all have the same reward teach nothing: UniformRewardMonitor says so after several such steps. Leaves out the
metrics of the rewards' functions (rewards/pool.py) and of evaluations (evaluation.py).

    fraction = tied_fraction([[[1.0], [1.0]], [[0.0], [1.0]]])     # 0.5
    note = UniformRewardMonitor().observe(step=3, fraction=1.0, rewards=[0.0, 0.0])
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import numpy as np

from bridge.generation import Speculation
from engine.objective.advantages import is_group_worth_training, overlong_penalty
from engine.sample import Sample
from megasync.config.schema import Config
from megasync.episodes.task import EpisodeResult
from megasync.rollouts.samples import members_of

PATIENCE = 3  # steps in a row
RETURNED = "_returned"  # behind a metric that an episode returns under a name of ours


def batch_metrics(samples: list[Sample], step: int, seconds: float, waited_seconds: float) -> dict[str, float]:
    """Rewards, lengths, staleness of a batch. `seconds`: its generation; `waited_seconds`: the part that training waited."""
    tokens = sum(sample.num_sampled for sample in samples)
    own = [sample.weight_versions[sample.is_sampled] if len(sample.is_sampled) else sample.weight_versions for sample in samples]
    versions = sum(int(each.sum(dtype=np.int64)) for each in own)
    oldest = min(int(each.min(initial=step)) for each in own)
    firsts = [member[0] for member in members_of(samples)]
    rewards = [sample.reward for sample in firsts]
    return {
        "reward/mean": statistics.fmean(rewards),
        "reward/std": statistics.pstdev(rewards),
        "response/tokens_mean": tokens / len(firsts),
        "response/truncated_fraction": statistics.fmean(sample.finish_reason == "length" for sample in firsts),
        "staleness/mean": (step * tokens - versions) / max(tokens, 1),
        "staleness/max": step - oldest,
        "rollout/seconds": seconds,
        "rollout/wait_seconds": waited_seconds,
        "rollout/tokens_per_second": tokens / max(seconds, 1e-9),
    }


def speculation_metrics(counts: Speculation) -> dict[str, float]:
    """The length is of what a pass over drafts adds to a sample: the accepted tokens and one more."""
    found = {"rollout/drafted_tokens": float(counts.num_drafted), "rollout/accepted_tokens": float(counts.num_accepted)}
    return found | ({"rollout/accepted_length": 1 + counts.num_accepted / counts.num_passes} if counts.num_passes else {})


def source_metrics(groups: Sequence[tuple[str, Sequence[float]]]) -> dict[str, float]:
    """By source of data.train, of the source and the rewards of each group; none where there is one source."""
    found: dict[str, float] = {}
    for name in sorted({source for source, _ in groups if source}):
        own = [rewards for source, rewards in groups if source == name]
        found[f"source/{name}/prompts"] = len(own)
        if rewards := [reward for of_group in own for reward in of_group]:
            found[f"source/{name}/reward"] = statistics.fmean(rewards)
    return found


def tied_fraction(groups: Sequence[Sequence[Sequence[float]]]) -> float:
    """From 0 to 1, of groups of `learnt_rewards`."""
    return statistics.fmean(not is_group_worth_training(rewards) for rewards in groups)


class UniformRewardMonitor:
    """Notes that nothing is learnt, once all groups were tied PATIENCE steps in a row."""

    def __init__(self, *, filters_groups: bool = False) -> None:
        """`filters_groups`: whether the run replaces tied groups already."""
        self._filters_groups = filters_groups
        self._in_a_row = 0

    def observe(self, step: int, fraction: float, rewards: Sequence[float]) -> str:
        """The note after `step` steps, mostly empty. `fraction`: of the groups, tied."""
        self._in_a_row = self._in_a_row + 1 if fraction == 1 else 0
        if self._in_a_row != PATIENCE:
            return ""
        if max(rewards) == min(rewards):
            what = f"every reward of step {step} is {rewards[0]:g}"
            look = "Compare responses and answers in samples.jsonl: does the reward read what the model writes, is it cut off?"
        else:
            what = "within each group all samples have the same reward"
            look = "Raise rollout.temperature or rollout.group_size."
        note = f"nothing is learnt since step {step - PATIENCE + 1}: {what}, so that every advantage is 0"
        note += f" (groups/tied_fraction = 1). {look}"
        if self._filters_groups:
            return f"{note} algorithm.filter_groups found no other prompts: some of middling difficulty are needed"
        return f"{note} Prompts of middling difficulty teach most; algorithm.filter_groups=true replaces tied groups"


def penalty_fields(config: Config, num_tokens: int) -> dict[str, float]:
    """The summand, -1 to 0, that `algorithm.truncated = penalise` adds to the reward of a response of `num_tokens`; else {}."""
    if config.algorithm.truncated != "penalise":
        return {}
    return {"penalty": overlong_penalty(num_tokens, config.rollout.max_sampled_tokens, config.algorithm.overlong_buffer)}


def learnt_rewards(config: Config, samples: Sequence[Sample]) -> list[list[list[float]]]:
    """For each member of each group its reward with the penalty, or, with `algorithm.credit=turn`, the returns of its turns.

    Advantages are computed from them.
    """
    groups: dict[int, list[list[float]]] = {}
    for member in members_of(samples):
        penalty = penalty_fields(config, sum(one.num_sampled for one in member)).get("penalty", 0.0)
        learnt = member[0].turn_returns if config.algorithm.credit == "turn" else [member[0].reward]
        groups.setdefault(member[0].group, []).append([reward + penalty for reward in learnt])
    return list(groups.values())


def penalty_metrics(config: Config, lengths: Sequence[int]) -> dict[str, float]:
    """The mean penalty; `reward/mean` is without it."""
    penalties = [penalty for length in lengths for penalty in penalty_fields(config, length).values()]
    return {"reward/penalty_mean": statistics.fmean(penalties)} if penalties else {}


def episode_metrics(played: Sequence[EpisodeResult]) -> dict[str, float]:
    """Means over a batch's episodes; `tool_share`: of their time."""
    if not played:
        return {}
    names = sorted({name for one in played for name in one.metrics})
    own = {name: [one.metrics[name] for one in played if name in one.metrics] for name in names}
    columns: dict[str, Sequence[float]] = {
        "turns_mean": [one.num_turns for one in played],
        "tool_seconds": [one.tool_seconds for one in played],
        "sampled_tokens": [one.num_sampled for one in played],
        "given_tokens": [one.num_given for one in played],
        "branches": [len(one.branches) for one in played],
    }
    found = {f"episode/{name}": statistics.fmean(values) for name, values in columns.items()} | {
        "episode/failures": float(sum(one.num_failures for one in played)),
        "episode/dropped": float(sum(one.is_dropped for one in played)),
        "episode/prefix_hits": sum(one.num_held for one in played) / max(sum(one.num_prompt for one in played), 1),
        "episode/resumed": float(sum(one.num_resumed > 0 for one in played)),
        "episode/restarted": float(sum(one.is_restart for one in played)),
        "episode/tool_share": sum(one.tool_seconds for one in played) / max(sum(one.seconds for one in played), 1e-9),
    }
    keys = {name: f"episode/{name}" if f"episode/{name}" not in found else f"episode/{name}{RETURNED}" for name in own}
    return found | {keys[name]: statistics.fmean(values) for name, values in own.items()}
