"""What a run makes of episodes that have ended: samples of their branches, and metrics; and what it tells those who play them.

Leaves out how they are played (turns.py).
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from engine.sample import Sample
from megasync.episodes.resolve import identity, resolve_episode
from megasync.hf.folder import model_shape
from megasync.rollouts.turns import EpisodeSettings

if TYPE_CHECKING:
    from megasync.config.schema import Config
    from megasync.episodes.task import Played


def episode_samples(played: Played, prompt_ids: npt.NDArray[np.int32], reward: float, place: int, member: int) -> list[Sample]:
    """One for each branch; one without tokens to train where it failed before there were any, none where it was dropped."""
    common: dict[str, Any] = {"reward": reward, "group": place, "member": member, "finish_reason": played.finish_reason}
    if played.is_dropped:
        return []
    if not played.branches:
        return [Sample(prompt_ids, np.empty(0, np.int32), **common)]
    return [
        Sample(
            prompt_ids=branch.token_ids[: branch.prompt_length],
            response_ids=branch.token_ids[branch.prompt_length :],
            rollout_log_probs=branch.log_probs[branch.prompt_length :],
            weight_versions=branch.weight_versions[branch.prompt_length :],
            routed_experts=branch.routed_experts,
            is_sampled=branch.is_sampled[branch.prompt_length :],
            **common,
        )
        for branch in played.branches
    ]


def members_of(samples: Sequence[Sample]) -> list[list[Sample]]:
    """Samples by member: branches of an episode together."""
    found: list[list[Sample]] = []
    for sample in samples:
        last = found[-1][0] if found else None
        if last is None or sample.member < 0 or (sample.group, sample.member) != (last.group, last.member):
            found.append([])
        found[-1].append(sample)
    return found


def episode_settings(config: Config) -> EpisodeSettings:
    rollout = config.rollout
    positions = model_shape(config.model.path).max_position_embeddings
    limits = [config.engine.tokens_per_microbatch, rollout.max_model_len or 0, positions]
    return EpisodeSettings(rollout.episode_max_turns, min(filter(None, limits)), rollout.episode_on_failure)


def episode_identity(config: Config) -> str:
    """What tells the episodes of this config from those of another; empty without any."""
    if not config.rollout.episode:
        return ""
    resolve_episode(config.rollout.episode)
    return f"{identity(config.rollout.episode)} {config.rollout.episode_max_turns}"


def episode_metrics(played: Sequence[Played]) -> dict[str, float]:
    """Means over a batch's episodes; `tool_share`: of their time, that they did not wait for the model."""
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
        **own,
    }
    return {f"episode/{name}": statistics.fmean(values) for name, values in columns.items()} | {
        "episode/failures": float(sum(one.num_failures for one in played)),
        "episode/dropped": float(sum(one.is_dropped for one in played)),
        "episode/prefix_hits": sum(one.num_held for one in played) / max(sum(one.num_prompt for one in played), 1),
        "episode/resumed": float(sum(one.num_resumed > 0 for one in played)),
        "episode/anew": float(sum(one.is_anew for one in played)),
        "episode/tool_share": sum(one.tool_seconds for one in played) / max(sum(one.seconds for one in played), 1e-9),
    }
