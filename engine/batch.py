"""Samples become packed, balanced micro-batches. Pure functions, except for `pack`, which makes tensors.

Samples of a micro-batch are concatenated (thd) and padded at the end only, to the multiple that sequence parallelism needs.
Every rank computes the same plan from the same samples, so that no plan is communicated.
Leaves out the loss (loss.py).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

import torch

from engine.attention import PackedSequences
from engine.sample import Sample

Bins = list[list[int]]


def split_evenly(num_items: int, num_parts: int) -> list[range]:
    """Consecutive ranges that cover 0..num_items-1 once; sizes differ by at most one, the longer ones first."""
    base, extra = divmod(num_items, num_parts)
    starts = [part * base + min(part, extra) for part in range(num_parts + 1)]
    return [range(start, end) for start, end in pairwise(starts)]


def balance(lengths: Sequence[int], num_bins: int) -> Bins:
    """Item indices in `num_bins` bins of nearly equal total length: longest first into the emptiest bin.

    Every index is in exactly one bin; no bin is empty when there are at least as many items as bins; indices are sorted
    within a bin. Ties break on the index, so the result is a function of `lengths`.
    """
    heap = [(0, 0, number) for number in range(num_bins)]
    bins: Bins = [[] for _ in range(num_bins)]
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        total, count, number = heapq.heappop(heap)
        bins[number].append(index)
        heapq.heappush(heap, (total + lengths[index], count + 1, number))
    return [sorted(members) for members in bins]


def plan_microbatches(lengths: Sequence[int], data_size: int, tokens_per_microbatch: int) -> list[Bins]:
    """For each data-parallel rank the same number of micro-batches, balanced in tokens.

    Every index lies in exactly one micro-batch. A micro-batch holds at most `tokens_per_microbatch` tokens unless it is one
    sample that is longer by itself. With fewer samples than ranks some micro-batches are empty lists.
    """
    count = max(1, -(-sum(lengths) // (data_size * tokens_per_microbatch)))
    most = max(1, -(-len(lengths) // data_size))
    while True:
        bins = balance(lengths, data_size * count)
        fits = all(sum(lengths[i] for i in b) <= tokens_per_microbatch or len(b) == 1 for b in bins)
        if fits or count >= most:
            break
        count += 1
    return [bins[rank::data_size] for rank in range(data_size)]


@dataclass
class MicroBatch:
    """Packed samples of one forward pass. T counts its tokens with the padding at the end.

    `labels[t]` is the token after t within the same sample; `mask[t]` is 1 where that is a response token, so that every
    log-prob of the engine lives at the position that predicts it.
    """

    samples: list[int]  # indices in the mini-batch; empty: a stand-in with no weight
    tokens: torch.Tensor  # int64 [1, T]
    labels: torch.Tensor  # int64 [1, T]
    position_ids: torch.Tensor  # int64 [1, T]
    sequences: PackedSequences
    mask: torch.Tensor  # float32 [T]
    segment: torch.Tensor  # int64 [T]: which sample of `samples`; padding counts as the last
    advantages: torch.Tensor  # float32 [T]
    rollout_log_probs: torch.Tensor  # float32 [T], 0 where not known
    old_log_probs: torch.Tensor | None = None  # float32 [T]
    reference_log_probs: torch.Tensor | None = None  # float32 [T]

    @property
    def num_tokens(self) -> int:
        return self.tokens.shape[1]


def pack(samples: Sequence[Sample], indices: list[int], multiple: int, device: torch.device) -> MicroBatch:
    """Concatenate `samples[i] for i in indices`; pad with token 0 to a multiple of `multiple`.

    Empty `indices` give a micro-batch of the first sample with no weight, so that every rank runs the same number of passes.
    """
    chosen = [samples[i] for i in indices] or [samples[0]]
    weight = 1.0 if indices else 0.0
    lengths = [sample.num_tokens for sample in chosen]
    padding = -sum(lengths) % multiple
    segment = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    if padding:
        lengths.append(padding)
        segment = torch.cat([segment, segment[-1:].expand(padding)])
    positions = torch.cat([torch.arange(length) for length in lengths])

    def packed(values: Iterable[Sequence[float]], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.tensor([*chain.from_iterable(values), *[0] * padding], dtype=dtype, device=device)

    return MicroBatch(
        samples=indices,
        tokens=packed(((*s.prompt_ids, *s.response_ids) for s in chosen), torch.int64)[None],
        labels=packed(((*s.prompt_ids[1:], *s.response_ids, 0) for s in chosen), torch.int64)[None],
        position_ids=positions[None].to(device),
        sequences=PackedSequences.from_lengths(lengths, device),
        mask=packed(_at_predictions(s, (weight,) * len(s.response_ids)) for s in chosen),
        segment=segment.to(device),
        advantages=packed((s.advantage,) * s.num_tokens for s in chosen),
        rollout_log_probs=packed(_at_predictions(s, s.rollout_log_probs) for s in chosen),
    )


def _at_predictions(sample: Sample, values: tuple[float, ...]) -> tuple[float, ...]:
    """A value for each token of the sample: `values`, one a response token, at the positions that predict those; else 0."""
    before = (0.0,) * (len(sample.prompt_ids) - 1)
    return (*before, *(values or (0.0,) * len(sample.response_ids)), 0.0)
