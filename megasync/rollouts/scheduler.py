"""Which groups may begin, on which replica, and which make a batch: pure functions of numbers. No torch in here.

    s    the step that is trained next; it trains weights v = s and makes v = s + 1
    v    the version that the replicas serve
    n    rollout.max_staleness
    b    groups of a batch; a group is a prompt with its samples
    o    the version of a group's oldest token: a step trains it only if s - o <= n

The bound holds by two rules, and nothing that was generated is thrown away:

1. Admission (`num_admissible`): at most n + 1 batches of groups have begun and are not trained (AReaL, arXiv:2505.24298, 5.1).
2. Earliest deadline first (`choose_batch`): a step takes the groups with the lowest o. It waits where the groups left over would
   be more than the steps until o + n can train.

An example with n = 1, b = 2, 3 steps and 2 replicas that have room for one group each:

    time            0       1       2       3       4
    v served        0               1       2       3
    admitted        g0..g3          g4 g5
    replica 0       [ g0  ] [ g2  ] [ g4  ]
    replica 1       [ g1  ] [ g3  ] [ g5  ]
    trainer                 [ s=0 ] [ s=1 ] [ s=2 ]
    batch                     g0 g1   g2 g3   g4 g5
    s - o                     0       1       1

At time 1 the step s = 0 takes g0 and g1; g2 and g3 fill the other batch that n = 1 allows, so nothing new begins until v = 1.

These rules alone would make every sample n versions old where replicas are faster than the trainer. PrefetchController therefore
lets only as many of the n + 1 batches begin as keep the trainer from waiting. Where the trainer waits for the replicas, it also
prevents pairing: groups that begin beside the next batch take slots from its last samples and end with it, so that two batches
end together and the replicas idle while the trainer works on the first. As many groups as the replicas finish during one training
are held back until the next batch is ready (`num_held`).

    with pairing      generate s, s+1 ........ | train s | train s+1 | generate ...    replicas idle during both
    held back         generate s ... | s+1 begins, train s | s+2 begins, train s+1     replicas always busy

Leaves out who generates and what a sample is (stream.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Candidate:
    """A group that has begun and is not trained. `oldest`: no token of it is of an earlier version."""

    ordinal: int  # its place in the order of the data, over the whole run
    oldest: int
    is_done: bool


@dataclass(frozen=True, slots=True)
class Load:
    """The load of a replica: unfinished samples, and the tokens that they are expected to have."""

    samples: int = 0
    tokens: float = 0.0


SHORT_WAIT = 0.05  # share of the time from one batch to the next; a shorter wait is not worth older samples
CALM_STEPS = 4


@dataclass
class PrefetchController:
    """How many batches of groups may have begun and not be trained: `batches`, at first `most`, at least min(2, most).

    One more after a step that waited; one fewer after `patience` steps in a row behind which a whole batch was ready. Each time
    that fewer turn out to be too few, the next trial waits twice as long.
    """

    most: int
    patience: int = CALM_STEPS
    busy_share: float = 0.0  # of its time, in which the trainer did not wait for batches: an exponential mean
    _calm: int = 0
    _is_trial: bool = False

    def __post_init__(self) -> None:
        self.batches = self.most

    def observe(self, wait_share: float, spare_batches: float) -> None:
        """A batch was taken. `wait_share`: share of the time since the one before in which the trainer waited; `spare_batches`:
        how many more were ready.
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
    """The replica with the fewest expected tokens that has room for `num_samples` more below `limit` samples; None: no room.

    An idle replica takes a group of any size. Ties go to the lowest number.
    """
    able = [
        replica for replica, load in loads.items() if limit is None or load.samples == 0 or load.samples + num_samples <= limit
    ]
    return min(able, key=lambda replica: (loads[replica].tokens, replica), default=None)


FAR_BUSIER = 2.0  # times the tokens of the least busy replica, and a prompt's more


def choose_for_turn(
    loads: Mapping[int, Load], held_by: int | None, num_held: int, limit: int | None
) -> int | None:
    """The replica for a sample whose prompt begins with `num_held` tokens in the cache of `held_by`; None: no room.

    `held_by`, unless it has no room below `limit` or is far busier than the choice of `choose_replica`, where these tokens are
    computed again.
    """
    least = choose_replica(loads, 1, limit)
    if least is None or held_by is None or held_by not in loads or held_by == least:
        return least
    own = loads[held_by]
    has_room = limit is None or own.samples == 0 or own.samples + 1 <= limit
    return held_by if has_room and own.tokens <= FAR_BUSIER * loads[least].tokens + num_held else least


def choose_batch(
    candidates: Sequence[Candidate], step: int, max_staleness: int, batch_size: int, *, may_grow: bool = True
) -> list[int] | None:
    """The ordinals that `step` trains on, in order; None while it has to wait.

    It takes groups that are done, the oldest first, and waits where too many would be left for the steps until they are too old.
    `may_grow`: whether more groups may still become done; if not, a batch may be short.
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


def choose_first(done: AbstractSet[int], owed: AbstractSet[int], batch_size: int, *, may_grow: bool = True) -> list[int] | None:
    """Like `choose_batch`, where more groups have begun than a batch has; the groups left over are aborted.

    `owed`: groups that were aborted once. The batch waits for them, as many as it has room for, so that none is aborted for ever.
    """
    waited_for = set(sorted(owed)[:batch_size])
    if may_grow and (len(done) < batch_size or not waited_for <= done):
        return None
    return sorted(sorted(done, key=lambda ordinal: (ordinal not in waited_for, ordinal))[:batch_size])


def trainable(candidates: Iterable[Candidate], step: int, max_staleness: int, batch_size: int, num_steps: int) -> set[int]:
    """The ordinals of a checkpoint's groups that can be trained in time from `step` on, as many as possible; others start again.

    When step d takes its batch, at most (d - `step` + 1) batches of groups may be due by d. `num_admissible` guarantees this for
    all groups, and `choose_batch` keeps it: a step always finds a batch once all running groups have ended.
    """
    kept: set[int] = set()
    for one in sorted(candidates, key=lambda candidate: (candidate.oldest, candidate.ordinal)):
        last_step = min(one.oldest + max_staleness, num_steps - 1)
        if len(kept) < (last_step - step + 1) * batch_size:
            kept.add(one.ordinal)
    return kept
