"""The samples of each micro-batch, balanced in tokens or in cost. Pure functions of lengths.

Every rank computes the same plan from the same lengths, so that no plan is communicated; a rank needs the tokens of those
samples alone that the plan gives it. Leaves out how they are packed (batch.py).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from engine.batch.costs import attention_costs

Bins = list[list[int]]
Lengths = Sequence[int] | npt.NDArray[np.int64]


def split_evenly(num_items: int, num_parts: int) -> list[range]:
    """Consecutive ranges that cover 0..num_items-1 once; sizes differ by at most one, the longer ones first."""
    base, extra = divmod(num_items, num_parts)
    starts = [part * base + min(part, extra) for part in range(num_parts + 1)]
    return [range(start, end) for start, end in pairwise(starts)]


def split_members(members: npt.NDArray[np.int64], num_parts: int) -> list[range]:
    """Like `split_evenly`, for samples; samples of one member (SampleTable.members) stay together."""
    starts = np.flatnonzero(np.diff(members, prepend=-1)).tolist()
    ends = [*starts, len(members)]
    return [range(ends[part.start], ends[part.stop]) for part in split_evenly(len(starts), num_parts)]


def balance(lengths: Lengths, num_bins: int) -> Bins:
    """Item indices in `num_bins` bins of nearly equal total length: longest first into the emptiest bin.

    Every index is in exactly one bin; no bin is empty when there are at least as many items as bins; indices are sorted
    within a bin. Ties break on the index, so the result is a function of `lengths`.
    """
    lengths = np.asarray(lengths, np.int64)
    bins = _balance(lengths, lengths, num_bins, None)
    assert bins is not None
    return bins


def _balance(
    lengths: npt.NDArray[np.int64], costs: npt.NDArray[np.int64], num_bins: int, limit: int | None
) -> Bins | None:
    """Like `balance`, by `costs`; None as soon as a bin of several items is longer than `limit`."""
    heap = [(0, 0, number) for number in range(num_bins)]
    bins: Bins = [[] for _ in range(num_bins)]
    in_bins = [0] * num_bins
    order = np.argsort(-costs, kind="stable")
    for index, length, cost in zip(order.tolist(), lengths[order].tolist(), costs[order].tolist(), strict=True):
        total, count, number = heap[0]
        in_bins[number] += length
        if limit is not None and count and in_bins[number] > limit:
            return None
        bins[number].append(index)
        heapq.heapreplace(heap, (total + cost, count + 1, number))
    return [sorted(members) for members in bins]


@dataclass(frozen=True)
class Balance:
    """The quantity in which micro-batches are balanced, and the multiple of their number."""

    multiple: int = 1
    attention_length: float = math.inf  # of a sequence whose attention matrices cost as much as all else, without windows
    windows: tuple[int, ...] = ()  # of each layer, 0 where it has none; (): no layer has one

    def costs(self, lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The cost of sequences of these lengths: their tokens or, with a finite `attention_length`, their FLOPs in some unit."""
        if not self.by_cost:
            return lengths
        if not any(self.windows):
            return lengths * (round(self.attention_length) + lengths)
        return lengths * round(self.attention_length) + attention_costs(lengths, self.windows)

    @property
    def by_cost(self) -> bool:
        return math.isfinite(self.attention_length)


BY_TOKENS = Balance()


def plan_microbatches(
    lengths: Lengths, data_size: int, tokens_per_microbatch: int, wanted: Balance = BY_TOKENS
) -> list[Bins]:
    """For each data-parallel rank the same number of micro-batches: all alike in tokens or, by cost, ranks alike in all.

    Every index lies in exactly one micro-batch. A micro-batch holds at most `tokens_per_microbatch` tokens unless it is one
    sample that is longer by itself. With fewer samples than micro-batches some are empty lists.
    """
    lengths = np.asarray(lengths, np.int64)
    if wanted.by_cost:
        return _by_rank(lengths, data_size, tokens_per_microbatch, wanted)
    count = max(1, -(-int(lengths.sum()) // (data_size * tokens_per_microbatch)))
    most = max(1, -(-len(lengths) // data_size))
    num_alone = int((2 * lengths > tokens_per_microbatch).sum())  # no two of these share a micro-batch
    count = max(count, min(most, -(-num_alone // data_size)))
    count += -count % wanted.multiple
    while True:
        bins = _balance(lengths, lengths, data_size * count, tokens_per_microbatch if count < most else None)
        if bins is not None:
            return [bins[rank::data_size] for rank in range(data_size)]
        count += wanted.multiple


def _by_rank(lengths: npt.NDArray[np.int64], data_size: int, tokens_per_microbatch: int, wanted: Balance) -> list[Bins]:
    """Ranks alike in cost, then the micro-batches of each; its costliest first, since ranks may wait for each other at each."""
    costs = wanted.costs(lengths)
    of_ranks = _balance(lengths, costs, data_size, None)
    assert of_ranks is not None
    count = max(1, *(-(-int(lengths[own].sum()) // tokens_per_microbatch) for own in of_ranks))
    count += -count % wanted.multiple
    while True:
        plan = [_cut(lengths, costs, own, count, tokens_per_microbatch) for own in of_ranks]
        if all(plan):
            return plan
        count += wanted.multiple


def _cut(lengths: npt.NDArray[np.int64], costs: npt.NDArray[np.int64], own: list[int], count: int, limit: int) -> Bins:
    """The samples `own` in `count` micro-batches; [] where they do not fit."""
    bins = _balance(lengths[own], costs[own], count, limit if count < len(own) else None) or []
    named = [[own[index] for index in members] for members in bins]
    return sorted(named, key=lambda members: -int(costs[members].sum()))


def padding_fraction(lengths: Lengths, plan: Sequence[Bins], multiple: int, sequence_multiple: int = 1) -> float:
    """The share of all ranks' micro-batches, as `pack` makes them by `plan`, that is padding or a stand-in. 0 without samples."""
    lengths = np.asarray(lengths, np.int64)
    spans = lengths + -lengths % sequence_multiple
    held = [int(spans[members or [0]].sum()) for bins in plan for members in bins] if len(lengths) else []
    total = sum(tokens + -tokens % multiple for tokens in held)
    return 1 - int(lengths.sum()) / total if total else 0.0


def needed_samples(
    lengths: Lengths, parts: Sequence[range], data_size: int, tokens_per_microbatch: int, wanted: Balance = BY_TOKENS
) -> list[list[int]]:
    """For each data-parallel rank the sorted indices of the samples whose tokens it packs, over all mini-batches.

    `parts`: the samples of each mini-batch, as `split_members` cuts them.

    Every index is in at least one list; the first of a mini-batch is also in those of ranks that stand in with it (`pack`).
    """
    lengths = np.asarray(lengths, np.int64)
    needed: list[list[int]] = [[] for _ in range(data_size)]
    for part in parts:
        own_lengths = lengths[part.start : part.stop]
        bins = plan_microbatches(own_lengths, data_size, tokens_per_microbatch, wanted) if len(part) else []
        for own, of_rank in zip(needed, bins, strict=False):
            own += sorted({part.start + index for members in of_rank for index in members or [0]})
    return needed
