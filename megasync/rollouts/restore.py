"""Which groups of its checkpoint a resumed run continues. Pure. No torch in here.

A group continues where it would be asked the same question today and a step can still train it in time; all others start again.
Where only its answer or its reward has changed it is scored again. Leaves out the checkpoint's file (progress.py).

    restored = restore_groups(progress, step, settings, make_group)
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import astuple, dataclass

from megasync.data.data import PromptOrder
from megasync.rollouts.group import Group, StreamSettings
from megasync.rollouts.progress import Progress
from megasync.rollouts.scheduler import Candidate, trainable


@dataclass(frozen=True)
class Restored:
    """Groups that continue, ordinals of groups that start again, and notes for the user."""

    groups: list[Group]
    again: list[int]
    notes: list[str]


def restore_groups(progress: Progress, step: int, settings: StreamSettings, make_group: Callable[[int], Group]) -> Restored:
    """The groups of a checkpoint, in order, when `step` is trained next."""
    own, again, other, rescored = settings, list[int](), 0, set[int]()
    groups: dict[int, Group] = {}
    for saved in progress.groups:
        group = make_group(saved.key)
        if is_same := saved.request_digest == group.request_digest:
            group.restore(saved)
        if group.oldest is None:
            again.append(saved.key)
            other += not is_same and bool(saved.samples)
            continue
        groups[saved.key] = group
        if saved.reward_digest != group.reward_digest:
            rescored.add(saved.key)
    candidates = [Candidate(key, group.oldest, group.is_done) for key, group in groups.items() if group.oldest is not None]
    kept = trainable(candidates, step, own.max_staleness, own.batch_size, own.num_steps)
    counts = other, len(groups) - len(kept), len(rescored & kept)
    again = sorted([*again, *(groups.keys() - kept)])
    return Restored([groups[key] for key in sorted(kept)], again, _notes(len(progress.groups), own, *counts))


def order_notes(progress: Progress, order: PromptOrder, sampler: str) -> list[str]:
    """A note where the prompts that are left come in another order than the trained ones. Pure.

    Leaves out changes of a sampler, which notes them itself.
    """
    then, effect = progress.order, "some of them are trained twice in this epoch, and others not at all"
    if progress.sampler and not sampler and progress.num_trained:
        return [f"data.sampler was {json.loads(progress.sampler)['name']!r}, and is empty: {effect}"]
    if then is None or then == order or not progress.num_trained:
        return []
    keys = (
        "data.train has {} examples that fit, then {}",
        "run.seed is {}, then {}",
        "data.shuffle is {}, then {}",
        "examples and weights of its sources are {}, then {}",
    )
    values = zip(keys, astuple(order), astuple(then), strict=True)
    changes = "; ".join(text.format(str(now).lower(), str(before).lower()) for text, now, before in values if now != before)
    return [f"the prompts come in another order than before the checkpoint ({changes}): {effect}"]


def _notes(num_groups: int, own: StreamSettings, num_other: int, num_late: int, num_rescored: int) -> list[str]:
    limits = f"rollout.max_staleness={own.max_staleness}, data.batch_size={own.batch_size} and run.steps={own.num_steps}"
    parts = [f"{num_other} start again, since their prompt, sampling parameters or episode have changed"] if num_other else []
    parts += [f"{num_late} start again, since with {limits} no step could train them in time"] if num_late else []
    parts += [f"{num_rescored} are scored again, since their answer or rollout.reward has changed"] if num_rescored else []
    return [f"of {num_groups} prompts that had begun and were not trained " + "; ".join(parts)] if parts else []
