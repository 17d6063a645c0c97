"""Which groups may begin, on which replica, and which make a batch: pure functions of numbers. No torch in here.

A group is a prompt with its samples; its ordinal is its place in the order of the data, counted over the whole run. Step s trains
on version s of the weights and makes version s + 1. Leaves out who generates and what a sample is (stream.py).

The bound of `rollout.max_staleness` = n holds by two rules, without anything thrown away: at most n + 1 batches of groups have
begun and are not trained (the admission of AReaL, arXiv:2505.24298, section 5.1); and a step waits where, without it, more groups
would be left than the steps until version oldest + n can train: earliest deadline first, which leaves as few as any order can.
With these alone replicas that are faster than the trainer would make every sample n versions old: of n + 1 batches as few
begin as keep the trainer from waiting (PrefetchController).

Where the trainer waits for the replicas, batches must not end in pairs: what begins beside the next batch takes slots and tokens
from its last samples, ends with it, and leaves the replicas idle while the trainer works on the first of both. So as many groups
as the replicas end in the time of one training are held back until the next batch is ready (PrefetchController.num_held).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
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


SHORT_WAIT = 0.05  # of the time from one batch to the next: what costs less is not worth older samples
CALM_STEPS = 4


@dataclass
class PrefetchController:
    """How many batches of groups may have begun and are not trained: `batches`, at first `most`, at least min(2, most).

    One more after a step that waited; one fewer after `patience` steps in a row behind which a whole batch was ready. Each time
    that fewer turn out to be too few, the next trial waits twice as long.
    """

    most: int
    patience: int = CALM_STEPS
    busy_share: float = 0.0  # of the trainer's time, that it did not wait for batches: a mean that forgets in a few steps
    _calm: int = 0
    _is_trial: bool = False

    def __post_init__(self) -> None:
        self.batches = self.most

    def observe(self, wait_share: float, spare_batches: float) -> None:
        """A batch was taken. `wait_share`: of the time since the one before, what the trainer waited for it; `spare_batches`: how
        many more were ready.
        """
        self.busy_share += (1.0 - wait_share - self.busy_share) / CALM_STEPS
        if wait_share > SHORT_WAIT:
            self.patience *= 2 if self._is_trial else 1
            self.batches, self._calm, self._is_trial = min(self.most, self.batches + 1), 0, False
            return
        self._calm = self._calm + 1 if spare_batches >= 1 else 0
        if self._calm >= self.patience and self.batches > 2:
            self.batches, self._calm, self._is_trial = self.batches - 1, 0, True

    def num_held(self, batch_size: int) -> int:
        """How many groups wait for the next batch to be ready; none where there is no other batch beside it."""
        return round(self.busy_share * batch_size) if self.batches > 1 else 0


def num_admissible(num_begun: int, step: int, version: int, most: int, batch_size: int, num_steps: int) -> int:
    """How many more groups may begin while `version` is served and `step` is to be trained next, the last one `num_steps` - 1.

    `num_begun`: groups that are neither trained nor discarded. `most`: how many they may be when `step` is `version`, at most
    `rollout.max_staleness` + 1 batches. While `step` - 1 is being trained its batch counts, too, so that what begins then can
    still be trained by step `version` + `rollout.max_staleness`.
    """
    return max(0, min(most - (step - version) * batch_size, (num_steps - step) * batch_size) - num_begun)


def choose_replica(loads: Mapping[int, Load], num_samples: int, limit: int | None) -> int | None:
    """The replica with the fewest tokens to come that has room for `num_samples` more below `limit` samples; None: no one has.

    An idle replica takes a group of any size. Ties go to the lowest number.
    """
    able = [
        replica for replica, load in loads.items() if limit is None or load.samples == 0 or load.samples + num_samples <= limit
    ]
    return min(able, key=lambda replica: (loads[replica].tokens, replica), default=None)


FAR_BUSIER = 2.0  # times the tokens of the least busy replica, and a prompt's more


def choose_for_turn(
    loads: Mapping[int, Load], held_by: int | None, num_held: int, limit: int | None, far_busier: float = FAR_BUSIER
) -> int | None:
    """The replica for a sample whose prompt begins with `num_held` tokens that `held_by` has in its cache; None: no one has room.

    That replica, unless it has no room below `limit` or is far busier than the one that `choose_replica` gives: elsewhere these
    tokens are computed anew.
    """
    least = choose_replica(loads, 1, limit)
    if least is None or held_by is None or held_by not in loads or held_by == least:
        return least
    own = loads[held_by]
    has_room = limit is None or own.samples == 0 or own.samples + 1 <= limit
    return held_by if has_room and own.tokens <= far_busier * loads[least].tokens + num_held else least


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


def trainable(candidates: Iterable[Candidate], step: int, max_staleness: int, batch_size: int, num_steps: int) -> set[int]:
    """Those of a checkpoint that can be trained in time from `step` on, as many as can be; the others have to begin anew.

    By the time that step d takes its batch those that no later step may take are at most (d - `step` + 1) batches. This holds for
    all that `num_admissible` lets begin, and `choose_batch` keeps it: a step always finds a batch once all that runs has ended.
    """
    kept: set[int] = set()
    for one in sorted(candidates, key=lambda candidate: (candidate.oldest, candidate.ordinal)):
        last_step = min(one.oldest + max_staleness, num_steps - 1)
        if len(kept) < (last_step - step + 1) * batch_size:
            kept.add(one.ordinal)
    return kept
