"""A batch's samples as a table, and some of them packed into a micro-batch. `pack` alone makes tensors.

Samples of a micro-batch are concatenated (thd) and padded at the end only, to the multiple that sequence parallelism needs.
Leaves out which samples those are (plan.py), the loss (loss.py) and who sends the tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine.batch.packed import NO_EXPERT, PackedSequences
from engine.sample import TOKEN_ARRAYS, BoolArray, Sample

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
