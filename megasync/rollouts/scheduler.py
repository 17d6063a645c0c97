"""Which groups may begin, on which replica, and which make a batch: pure functions of numbers. No torch in here.

A group is a prompt with its samples; its ordinal is its place in the order of the data, counted over the whole run. Step s trains
on version s of the weights and makes version s + 1. Leaves out who generates and what a sample is (stream.py).

The bound of `rollout.max_staleness` = n holds by two rules, without anything thrown away: at most n + 1 batches of groups have
begun and are not trained (the admission of AReaL, arXiv:2505.24298, section 5.1); and a step waits where, without it, more groups
would be left than the steps until version oldest + n can train: earliest deadline first, which leaves as few as any order can.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Candidate:
    """A group that has begun and is not trained. `oldest`: no token of it is of an earlier version."""

    ordinal: int
    oldest: int
    is_done: bool


@dataclass(frozen=True, slots=True)
class Load:
    """What a replica works on: samples that have not ended, and the tokens that they are expected to have."""

    samples: int = 0
    tokens: float = 0.0


def num_admissible(num_trained: int, max_staleness: int, batch_size: int, steps_left: int, num_replaced: int = 0) -> int:
    """How many groups may have begun, in all, when `num_trained` of them are trained and `steps_left` steps follow.

    `num_replaced`: those that have begun and will not be trained, each of which makes room for another.
    """
    return num_trained + min(max_staleness + 1, steps_left) * batch_size + num_replaced


def choose_replica(loads: Mapping[int, Load], num_samples: int, limit: int | None) -> int | None:
    """The replica with the fewest tokens to come that has room for `num_samples` more below `limit` samples; None: no one has.

    An idle replica takes a group of any size. Ties go to the lowest number.
    """
    able = [
        replica for replica, load in loads.items() if limit is None or load.samples == 0 or load.samples + num_samples <= limit
    ]
    return min(able, key=lambda replica: (loads[replica].tokens, replica), default=None)


def choose_batch(
    candidates: Sequence[Candidate], step: int, max_staleness: int, batch_size: int, *, may_grow: bool = True
) -> list[int] | None:
    """The ordinals that `step` trains on, in order; None while it has to wait.

    It takes those that are done, the oldest first, and waits where too many would be left for the steps until they are too old.
    `may_grow`: whether more groups can still be done than are now; otherwise the batch is what there is.
    """
    done = sorted((candidate for candidate in candidates if candidate.is_done), key=lambda c: (c.oldest, c.ordinal))
    batch = {candidate.ordinal for candidate in done[:batch_size]}
    if len(batch) < batch_size and may_grow:
        return None
    left = Counter(candidate.oldest + max_staleness for candidate in candidates if candidate.ordinal not in batch)
    num_due = 0
    for last_step in sorted(left):
        num_due += left[last_step]
        if num_due > max(0, last_step - step) * batch_size:
            return None
    return sorted(batch)


def expired(candidates: Sequence[Candidate], step: int, max_staleness: int) -> list[int]:
    """Groups that are too old for `step`: after a resume by another config. They have to begin anew."""
    return [candidate.ordinal for candidate in candidates if candidate.oldest < step - max_staleness]
