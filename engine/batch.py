"""Samples become packed, balanced micro-batches. Pure functions, except for `pack`, which makes tensors.

No padding: the samples of a micro-batch lie one after another (thd), only filled up to a multiple that sequence parallelism
needs. Every rank works the same plan out of the same samples, so nothing has to be sent but the samples themselves.
Leaves out the loss (loss.py).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

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
    """Packed samples of one forward pass. All per-token tensors are [tokens]; T counts the filling at the end.

    `labels[t]` is the token after t within the same sample; `mask[t]` is 1 where that is a response token, so that every
    log-prob of the engine lives at the position that predicts it.
    """

    samples: list[int]  # indices in the mini-batch; empty: a filler with no weight
    tokens: torch.Tensor  # int64 [1, T]
    labels: torch.Tensor  # int64 [1, T]
    position_ids: torch.Tensor  # int64 [1, T]
    sequences: PackedSequences
    mask: torch.Tensor  # float32 [T]
    segment: torch.Tensor  # int64 [T]: which sample of `samples`; filling counts as the last
    advantages: torch.Tensor  # float32 [T]
    rollout_log_probs: torch.Tensor  # float32 [T], 0 where not known
    old_log_probs: torch.Tensor | None = None  # float32 [T]
    reference_log_probs: torch.Tensor | None = None  # float32 [T]

    @property
    def num_tokens(self) -> int:
        return self.tokens.shape[1]


def pack(
    samples: Sequence[Sample], indices: list[int], multiple: int, device: torch.device, filler: Sample | None = None
) -> MicroBatch:
    """Lay `samples[i] for i in indices` one after another; fill with token 0 up to a multiple of `multiple`.

    An empty `indices` gives a micro-batch of the `filler` with no weight, so that every rank runs as many passes.
    """
    chosen = [samples[i] for i in indices] if indices else [filler or samples[0]]
    weight = 1.0 if indices else 0.0
    tokens: list[int] = []
    labels: list[int] = []
    mask: list[float] = []
    advantages: list[float] = []
    rollout: list[float] = []
    lengths: list[int] = []
    for sample in chosen:
        ids = [*sample.prompt_ids, *sample.response_ids]
        before, answer = len(sample.prompt_ids) - 1, len(sample.response_ids)
        tokens += ids
        labels += [*ids[1:], 0]
        mask += [0.0] * before + [weight] * answer + [0.0]
        advantages += [sample.advantage] * len(ids)
        rollout += [0.0] * before + list(sample.rollout_log_probs or [0.0] * answer) + [0.0]
        lengths.append(len(ids))
    filling = -len(tokens) % multiple
    segment = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    if filling:
        lengths.append(filling)
        segment = torch.cat([segment, torch.full((filling,), int(segment[-1]))])
        tokens, labels = tokens + [0] * filling, labels + [0] * filling
        mask, advantages, rollout = mask + [0.0] * filling, advantages + [0.0] * filling, rollout + [0.0] * filling
    positions = torch.cat([torch.arange(length) for length in lengths])

    def per_token(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32, device=device)

    return MicroBatch(
        samples=indices,
        tokens=torch.tensor([tokens], device=device),
        labels=torch.tensor([labels], device=device),
        position_ids=positions[None].to(device),
        sequences=PackedSequences.from_lengths(lengths, device),
        mask=per_token(mask),
        segment=segment.to(device),
        advantages=per_token(advantages),
        rollout_log_probs=per_token(rollout),
    )
