"""Samples become packed, balanced micro-batches. Pure functions; `pack` alone makes tensors.

Samples of a micro-batch are concatenated (thd) and padded at the end only, to the multiple that sequence parallelism needs.
Every rank computes the same plan from the same lengths, so that no plan is communicated; a rank needs the tokens of those
samples alone that the plan gives it. Leaves out the loss (loss.py) and who sends the tokens.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine.batch.costs import attention_costs
from engine.batch.packed import NO_EXPERT, PackedSequences
from engine.sample import TOKEN_ARRAYS, BoolArray, Sample

Bins = list[list[int]]
Lengths = Sequence[int] | npt.NDArray[np.int64]
COLUMNS = tuple(field.name for field in fields(Sample) if field.name not in (*TOKEN_ARRAYS, "routed_experts", "is_sampled"))


@dataclass(frozen=True, eq=False)
class SampleTable:
    """A batch of n samples: what is small is there of all of them, as arrays [n]; tokens of those that this rank needs."""

    prompt_lengths: npt.NDArray[np.int64]
    response_lengths: npt.NDArray[np.int64]
    sampled_lengths: npt.NDArray[np.int64]  # of the responses, without given tokens
    advantages: npt.NDArray[np.float64]  # 0 until they are known
    columns: dict[str, npt.NDArray[Any]]  # by the name of the Sample's field, all that are no arrays themselves
    samples: Sequence[Sample | None]  # None: another data-parallel rank has its tokens
    routed: tuple[int, int, str] | None = None  # layers, experts of a token, dtype of their `routed_experts`, where there are any

    @staticmethod
    def from_samples(samples: Sequence[Sample] | SampleTable) -> SampleTable:
        """The table of samples that are all here; a table stays as it is."""
        if isinstance(samples, SampleTable):
            return samples
        return SampleTable(
            prompt_lengths=np.array([len(sample.prompt_ids) for sample in samples], np.int64),
            response_lengths=np.array([len(sample.response_ids) for sample in samples], np.int64),
            sampled_lengths=np.array([sample.num_sampled for sample in samples], np.int64),
            advantages=np.zeros(len(samples)),
            columns={name: np.array([getattr(sample, name) for sample in samples]) for name in COLUMNS},
            samples=samples,
            routed=_routed(samples),
        )

    def __len__(self) -> int:
        return len(self.samples)

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        return self.prompt_lengths + self.response_lengths

    @property
    def has_mask(self) -> BoolArray:
        """Whether each sample has given tokens in its response."""
        return self.sampled_lengths < self.response_lengths

    @property
    def members(self) -> npt.NDArray[np.int64]:
        """Which member of all groups each sample is of, from 0: consecutive samples that share group and member are of one."""
        group, member = self.columns["group"], self.columns["member"]
        is_next = (group[1:] != group[:-1]) | (member[1:] != member[:-1]) | (member[1:] < 0)
        return np.concatenate([np.zeros(min(1, len(self)), np.int64), np.cumsum(is_next, dtype=np.int64)])

    def part(self, part: range) -> SampleTable:
        """The consecutive samples `part` as a table of their own."""
        cut = slice(part.start, part.stop)
        return dataclasses.replace(
            self,
            prompt_lengths=self.prompt_lengths[cut],
            response_lengths=self.response_lengths[cut],
            sampled_lengths=self.sampled_lengths[cut],
            advantages=self.advantages[cut],
            columns={name: column[cut] for name, column in self.columns.items()},
            samples=self.samples[cut],
        )

    def only(self, indices: Iterable[int]) -> SampleTable:
        """Without the tokens of all samples but these."""
        kept: list[Sample | None] = [None] * len(self)
        for index in indices:
            kept[index] = self.samples[index]
        return dataclasses.replace(self, samples=kept)


def _routed(samples: Sequence[Sample]) -> tuple[int, int, str] | None:
    arrays = [sample.routed_experts for sample in samples if len(sample.routed_experts)]
    forms = {(*array.shape[1:], str(array.dtype)) for array in arrays}
    assert len(forms) <= 1, "all samples come of one model"
    return next(iter(forms), None)


def split_evenly(num_items: int, num_parts: int) -> list[range]:
    """Consecutive ranges that cover 0..num_items-1 once; sizes differ by at most one, the longer ones first."""
    base, extra = divmod(num_items, num_parts)
    starts = [part * base + min(part, extra) for part in range(num_parts + 1)]
    return [range(start, end) for start, end in pairwise(starts)]


def split_members(members: npt.NDArray[np.int64], num_parts: int) -> list[range]:
    """As `split_evenly`, of samples, by their members (SampleTable.members), whose samples stay together."""
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
    """As `balance`, of `costs`; None where a bin of several items would be longer than `limit`, as soon as that is known."""
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
    """What micro-batches have the same of, and of what their number is a multiple."""

    multiple: int = 1
    attention_length: float = math.inf  # of a sequence whose attention matrices cost as much as all else, without windows
    windows: tuple[int, ...] = ()  # of each layer, 0 where it has none; (): no layer has one

    def costs(self, lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """What sequences of these lengths cost: their tokens or, with a finite `attention_length`, their FLOPs in some unit."""
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


@dataclass
class MicroBatch:
    """Packed samples of one forward pass. T counts its tokens with the padding at the end.

    `labels[t]` is the token after t within the same sample; `mask[t]` is 1 where that is a sampled token of the response, so that
    every log-prob of the engine lives at the position that predicts it.
    """

    samples: list[int]  # indices in the mini-batch; empty: a stand-in with no weight
    tokens: torch.Tensor  # int64 [1, T]
    labels: torch.Tensor  # int64 [1, T]
    position_ids: torch.Tensor  # int64 [1, T]
    sequences: PackedSequences
    mask: torch.Tensor  # float32 [T]
    starts: list[int]  # of each of `samples`, in the packing
    segment: torch.Tensor  # int64 [T]: which sample of `samples`; padding counts as the last
    advantages: torch.Tensor  # float32 [T]
    rollout_log_probs: torch.Tensor  # float32 [T], 0 where not known
    member_tokens: torch.Tensor  # float32 [samples, at least 1]: sampled tokens of all samples of each one's member
    routed_experts: torch.Tensor | None = None  # int16 [T, layers, experts of a token]; NO_EXPERT or all 0: not known
    old_log_probs: torch.Tensor | None = None  # float32 [T], where they are computed before the update
    policy_log_probs: torch.Tensor | None = None  # float32 [T]: those that the update has taken for the old ones
    reference_log_probs: torch.Tensor | None = None  # float32 [T]
    own_choice_log_probs: torch.Tensor | None = None  # float32 [T], with the experts that the trainer's routers choose

    @property
    def num_tokens(self) -> int:
        return len(self.mask)


def pack(
    table: SampleTable, indices: list[int], multiple: int, device: torch.device, sequence_multiple: int = 1
) -> MicroBatch:
    """Concatenate the samples `indices`, whose tokens must be here; pad with token 0 to a multiple of `multiple`.

    Each sample is padded to one of `sequence_multiple`, of which `multiple` has to be one: its sequence then ends in padding.
    Empty `indices` give a micro-batch of the first sample with no weight, so that every rank runs the same number of passes.
    """
    chosen = indices or [0]
    lengths = table.lengths[chosen].tolist()
    spans = [length + -length % sequence_multiple for length in lengths]
    padding = -sum(spans) % multiple
    starts = [0, *np.cumsum(spans).tolist()]
    members = table.members
    member_tokens = np.bincount(members, table.sampled_lengths)[members[chosen]].astype(np.float32)
    positions = np.concatenate([np.arange(span) for span in (*spans, padding)])
    tokens, labels = np.zeros_like(positions), np.zeros_like(positions)
    segment = np.repeat([*range(len(spans)), len(spans) - 1], [*spans, padding])
    mask, advantages, rollout_log_probs = (np.zeros(len(positions), np.float32) for _ in range(3))
    routed = None if table.routed is None else np.full((len(positions), *table.routed[:2]), NO_EXPERT, np.int16)
    for index, begin, length in zip(chosen, starts, lengths, strict=False):
        sample, end = table.samples[index], begin + length
        assert sample is not None, f"the tokens of sample {index} are on another rank"
        tokens[begin:end] = np.concatenate([sample.prompt_ids, sample.response_ids])
        labels[begin : end - 1] = tokens[begin + 1 : end]
        advantages[begin:end] = table.advantages[index]
        predictions = slice(end - len(sample.response_ids) - 1, end - 1)
        if indices:
            mask[predictions] = sample.is_sampled if len(sample.is_sampled) else 1.0
        if len(sample.rollout_log_probs):
            rollout_log_probs[predictions] = sample.rollout_log_probs
        if routed is not None:
            routed[begin : end - 1] = sample.routed_experts if len(sample.routed_experts) else 0

    def on_device(values: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(values).to(device)

    return MicroBatch(
        samples=indices,
        tokens=on_device(tokens)[None],
        labels=on_device(labels)[None],
        position_ids=on_device(positions)[None],
        sequences=PackedSequences.from_lengths([*spans, *([padding] if padding else [])], device),
        mask=on_device(mask),
        starts=starts[:-1],
        segment=on_device(segment),
        advantages=on_device(advantages),
        rollout_log_probs=on_device(rollout_log_probs),
        member_tokens=on_device(member_tokens),
        routed_experts=None if routed is None else on_device(routed),
    )
