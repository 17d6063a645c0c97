"""Samples for the trainer, out of groups that are done. Leaves out which groups make a batch (scheduler.py)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from bridge.generation import TokenScores
from engine.sample import Sample
from megasync.episodes.task import EpisodeResult
from megasync.rollouts.group import Group
from megasync.rollouts.teachers import teacher_fields


def samples_of(group: Group, place: int) -> list[Sample]:
    """Samples of a finished group; `place` is its place in the batch."""
    prompt_ids, found = np.array(group.request.prompt_ids, np.int32), list[Sample]()
    greedy = group.rewards[0] if group.num_greedy else None
    for member, (done, scored) in enumerate(zip(group.completions, group.scored, strict=True)):
        if done is None or scored is None or member < group.num_greedy:
            continue
        reward = scored.total
        if isinstance(done, EpisodeResult):
            own = group.parts(member), scored.teacher, group.turn_returns(member)
            found += episode_samples(done, prompt_ids, reward, place, member, *own)
            continue
        found.append(
            Sample(
                prompt_ids=prompt_ids,
                response_ids=done.token_ids,
                rollout_log_probs=done.log_probs,
                weight_versions=done.weight_versions,
                routed_experts=done.routed_experts,
                support=done.support,
                reward=reward,
                reward_parts=group.parts(member),
                greedy_reward=math.nan if greedy is None else greedy,
                group=place,
                member=member - group.num_greedy,
                finish_reason=done.finish_reason,
                **(teacher_fields(scored.teacher[0]) if scored.teacher else {}),
            )
        )
    return found


def episode_samples(
    played: EpisodeResult,
    prompt_ids: npt.NDArray[np.int32],
    reward: float,
    place: int,
    member: int,
    parts: Sequence[float] = (),
    teacher: Sequence[TokenScores] = (),
    turn_returns: Sequence[float] = (),
) -> list[Sample]:
    """One for each branch; one without tokens to train where it failed before there were any, none where it was dropped."""
    common: dict[str, Any] = {"reward": reward, "reward_parts": parts, "group": place, "member": member}
    common |= {"finish_reason": played.finish_reason, "turn_returns": turn_returns}
    if played.is_dropped:
        return []
    if not played.branches:
        return [Sample(prompt_ids, np.empty(0, np.int32), **common)]
    spans = played.turn_spans if turn_returns else [[] for _ in played.branches]
    return [
        Sample(
            prompt_ids=branch.token_ids[: branch.prompt_length],
            response_ids=branch.token_ids[branch.prompt_length :],
            rollout_log_probs=branch.log_probs[branch.prompt_length :],
            weight_versions=branch.weight_versions[branch.prompt_length :],
            routed_experts=branch.routed_experts,
            support=branch.support[branch.prompt_length :],  # tokens of the prompt have none
            is_sampled=branch.is_sampled[branch.prompt_length :],
            turn_spans=spans[number],
            **(teacher_fields(teacher[number]) if teacher else {}),
            **common,
        )
        for number, branch in enumerate(played.branches)
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
