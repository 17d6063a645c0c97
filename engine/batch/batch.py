"""A batch's samples as a table, and some of them packed into a micro-batch. `pack` alone makes tensors.

Samples of a micro-batch are concatenated (thd) and padded at the end only, to the multiple that sequence parallelism needs.
Leaves out the choice of samples (plan.py), the loss (loss.py) and the transport of tokens.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from engine.batch.packed import NO_EXPERT, PackedSequences
from engine.sample import TEACHER_ARRAYS, TOKEN_ARRAYS, BoolArray, FloatArray, Sample

ARRAYS = (*TOKEN_ARRAYS, *TEACHER_ARRAYS, "routed_experts", "support", "is_sampled")
PADDING = {"turn_returns": math.nan, "turn_spans": (0, 0, 0)}  # of columns whose rows differ in length
COLUMNS = tuple(field.name for field in fields(Sample) if field.name not in ARRAYS)
NO_TOKEN = -1


@dataclass(frozen=True, eq=False)
class SampleTable:
    """A batch of n samples: small fields of all of them, as arrays [n], and the tokens of the samples that this rank needs."""

    prompt_lengths: npt.NDArray[np.int64]
    response_lengths: npt.NDArray[np.int64]
    sampled_lengths: npt.NDArray[np.int64]  # of the responses, without given tokens
    support_lengths: npt.NDArray[np.int64]  # of Sample.support
    advantages: npt.NDArray[np.float64]  # 0 until they are known; with algorithm.credit=turn [n, turns]
    columns: dict[str, npt.NDArray[Any]]  # by the name of the Sample's field, all that are no arrays themselves
    samples: Sequence[Sample | None]  # None: another data-parallel rank has its tokens
    routed: tuple[int, int, str] | None = None  # layers, experts of a token, dtype of their `routed_experts`, where there are any
    teacher_top_k: int | None = None  # k of the teacher's arrays, 0: of sampled tokens alone; None: no sample has any

    @staticmethod
    def from_samples(samples: Sequence[Sample] | SampleTable) -> SampleTable:
        """The table of samples that this rank has; a table is returned unchanged."""
        if isinstance(samples, SampleTable):
            return samples
        return SampleTable(
            prompt_lengths=np.array([len(sample.prompt_ids) for sample in samples], np.int64),
            response_lengths=np.array([len(sample.response_ids) for sample in samples], np.int64),
            sampled_lengths=np.array([sample.num_sampled for sample in samples], np.int64),
            support_lengths=_support_lengths(samples),
            advantages=np.zeros(len(samples)),
            columns={name: _column(name, [getattr(sample, name) for sample in samples]) for name in COLUMNS},
            samples=samples,
            routed=_routed(samples),
            teacher_top_k=_teacher_top_k(samples),
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
        """The member of each sample, counted over all groups from 0; consecutive samples of one group and member share it."""
        group, member = self.columns["group"], self.columns["member"]
        is_next = (group[1:] != group[:-1]) | (member[1:] != member[:-1]) | (member[1:] < 0)
        return np.concatenate([np.zeros(min(1, len(self)), np.int64), np.cumsum(is_next, dtype=np.int64)])

    def token_advantages(self, index: int) -> FloatArray:
        """A sample's advantages, each at the position that predicts its token, float32 [tokens]."""
        own, num_prompt = self.advantages[index], self.prompt_lengths[index]
        found = np.zeros(num_prompt + self.response_lengths[index], np.float32)
        if own.ndim == 0:
            found[:] = own
            return found
        for turn, first, number in self.columns["turn_spans"][index].tolist():
            found[num_prompt + first - 1 :][:number] = own[turn]
        return found

    def part(self, part: range) -> SampleTable:
        """The consecutive samples `part` as a table of their own."""
        cut = slice(part.start, part.stop)
        return dataclasses.replace(
            self,
            prompt_lengths=self.prompt_lengths[cut],
            response_lengths=self.response_lengths[cut],
            sampled_lengths=self.sampled_lengths[cut],
            support_lengths=self.support_lengths[cut],
            advantages=self.advantages[cut],
            columns={name: column[cut] for name, column in self.columns.items()},
            samples=self.samples[cut],
        )

    def only(self, indices: Iterable[int]) -> SampleTable:
        """With the tokens of these samples only."""
        kept: list[Sample | None] = [None] * len(self)
        for index in indices:
            kept[index] = self.samples[index]
        return dataclasses.replace(self, samples=kept)


def _column(name: str, rows: list[Any]) -> npt.NDArray[Any]:
    if name in PADDING:
        size = max(map(len, rows), default=0)
        rows = [[*row, *[PADDING[name]] * (size - len(row))] for row in rows]
    return np.array(rows)


def _support_lengths(samples: Sequence[Sample]) -> npt.NDArray[np.int64]:
    known = {bool(len(sample.support)) for sample in samples if len(sample.response_ids)}
    assert len(known) <= 1, "the support of all samples is known, or of none"
    return np.array([len(sample.support) for sample in samples], np.int64)


def _routed(samples: Sequence[Sample]) -> tuple[int, int, str] | None:
    arrays = [sample.routed_experts for sample in samples if len(sample.routed_experts)]
    forms = {(*array.shape[1:], str(array.dtype)) for array in arrays}
    assert len(forms) <= 1, "all samples come from one model"
    return next(iter(forms), None)


def _teacher_top_k(samples: Sequence[Sample]) -> int | None:
    found = {sample.teacher_top_ids.shape[1] for sample in samples if len(sample.teacher_log_probs)}
    assert len(found) <= 1, "all teachers are asked for as many tokens"
    return next(iter(found), None)


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
    # int64 [most kept tokens, T]: tokens that the sampler kept where labels[t] was sampled, then NO_TOKEN; else the label alone
    support: torch.Tensor | None = None
    old_log_probs: torch.Tensor | None = None  # float32 [T], where they are computed before the update
    policy_log_probs: torch.Tensor | None = None  # float32 [T]: the old log-probs that the update has used
    reference_log_probs: torch.Tensor | None = None  # float32 [T]
    own_choice_log_probs: torch.Tensor | None = None  # float32 [T], with the experts that the trainer's routers choose
    teacher_log_probs: torch.Tensor | None = None  # float32 [T], of the labels
    # int64 and float32 [1, T, k], the teacher's most likely tokens after each one; shared among context ranks as `labels` are
    teacher_top_ids: torch.Tensor | None = None
    teacher_top_log_probs: torch.Tensor | None = None
    teacher_hidden: torch.Tensor | None = None  # [1, T, size], inputs of the teacher's output layer; shared likewise

    @property
    def num_tokens(self) -> int:
        return len(self.mask)

    @property
    def targets(self) -> tuple[torch.Tensor, ...]:
        """Tensors that the loss reads beside the logits: the labels, int64 [1, T], and below them the support, if there is one;
        then a teacher's hidden states or most likely tokens.
        """
        labels = self.labels if self.support is None else torch.cat([self.labels, self.support])
        teacher = (self.teacher_hidden, self.teacher_top_ids, self.teacher_top_log_probs)
        return labels, *(each for each in teacher if each is not None)


class _Arrays(NamedTuple):
    """The values of a packing for each of its T tokens."""

    tokens: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64]
    mask: FloatArray
    advantages: FloatArray
    rollout_log_probs: FloatArray
    routed_experts: npt.NDArray[np.int16] | None
    support: npt.NDArray[np.int64]  # [most kept tokens, T]
    teacher: dict[str, npt.NDArray[Any]]  # by the name of the Sample's field, where there are any

    @staticmethod
    def empty(num_tokens: int, table: SampleTable, num_kept: int) -> _Arrays:
        tokens, labels = (np.zeros(num_tokens, np.int64) for _ in range(2))
        mask, advantages, log_probs = (np.zeros(num_tokens, np.float32) for _ in range(3))
        experts = None if table.routed is None else np.full((num_tokens, *table.routed[:2]), NO_EXPERT, np.int16)
        support = np.full((num_kept, num_tokens), NO_TOKEN, np.int64)
        support[:1] = 0  # the label of padding
        teacher: dict[str, npt.NDArray[Any]] = {}
        if table.teacher_top_k is not None:
            teacher["teacher_log_probs"] = np.zeros(num_tokens, np.float32)
        if table.teacher_top_k:
            teacher["teacher_top_ids"] = np.zeros((num_tokens, table.teacher_top_k), np.int64)
            teacher["teacher_top_log_probs"] = np.zeros((num_tokens, table.teacher_top_k), np.float32)
        return _Arrays(tokens, labels, mask, advantages, log_probs, experts, support, teacher)

    def put(self, sample: Sample, begin: int, advantages: FloatArray, *, has_weight: bool) -> None:
        """Write a sample's values, beginning at token `begin`."""
        end = begin + sample.num_tokens
        self.tokens[begin:end] = np.concatenate([sample.prompt_ids, sample.response_ids])
        self.labels[begin : end - 1] = self.tokens[begin + 1 : end]
        self.advantages[begin:end] = advantages
        predictions = slice(end - len(sample.response_ids) - 1, end - 1)
        if has_weight:
            self.mask[predictions] = sample.is_sampled if len(sample.is_sampled) else 1.0
        if len(sample.rollout_log_probs):
            self.rollout_log_probs[predictions] = sample.rollout_log_probs
        if self.routed_experts is not None:
            self.routed_experts[begin : end - 1] = sample.routed_experts if len(sample.routed_experts) else 0
        for name, values in self.teacher.items():
            values[predictions] = getattr(sample, name)
        if len(self.support):
            self.support[0, begin:end] = self.labels[begin:end]
            self._put_support(sample, predictions.start)

    def _put_support(self, sample: Sample, begin: int) -> None:
        """`begin`: the position that predicts the first response token."""
        number = len(sample.response_ids)
        counts, ids = sample.support[:number], sample.support[number:]
        row = np.arange(len(ids)) - np.repeat(np.cumsum(counts) - counts, counts)
        self.support[row, begin + np.repeat(np.arange(len(counts)), counts)] = ids


def pack(
    table: SampleTable, indices: list[int], multiple: int, device: torch.device, sequence_multiple: int = 1
) -> MicroBatch:
    """Concatenate the samples `indices`, whose tokens this rank must have; pad with token 0 to a multiple of `multiple`.

    Each sample is padded to a multiple of `sequence_multiple`, which divides `multiple`: its sequence then ends in padding.
    Empty `indices` give a micro-batch of the first sample with no weight, so that every rank runs the same number of passes.
    """

    def on_device(values: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(values).to(device)

    chosen = indices or [0]
    spans = [length + -length % sequence_multiple for length in table.lengths[chosen].tolist()]
    padding = -sum(spans) % multiple
    starts = [0, *np.cumsum(spans).tolist()]
    member_tokens = np.bincount(table.members, table.sampled_lengths)[table.members[chosen]].astype(np.float32)
    num_kept = max((_most_kept(table.samples[index]) for index in chosen), default=0)
    arrays = _Arrays.empty(sum(spans) + padding, table, num_kept)
    for index, begin in zip(chosen, starts, strict=False):
        sample = table.samples[index]
        assert sample is not None, f"the tokens of sample {index} are on another rank"
        arrays.put(sample, begin, table.token_advantages(index), has_weight=bool(indices))
    teacher = {name: on_device(values) for name, values in arrays.teacher.items()}
    return MicroBatch(
        samples=indices,
        tokens=on_device(arrays.tokens)[None],
        labels=on_device(arrays.labels)[None],
        position_ids=on_device(np.concatenate([np.arange(span) for span in (*spans, padding)]))[None],
        sequences=PackedSequences.from_lengths([*spans, *([padding] if padding else [])], device),
        mask=on_device(arrays.mask),
        starts=starts[:-1],
        segment=on_device(np.repeat([*range(len(spans)), len(spans) - 1], [*spans, padding])),
        advantages=on_device(arrays.advantages),
        rollout_log_probs=on_device(arrays.rollout_log_probs),
        member_tokens=on_device(member_tokens),
        routed_experts=None if arrays.routed_experts is None else on_device(arrays.routed_experts),
        support=on_device(arrays.support) if num_kept else None,
        **{name: values[None] if values.dim() == 2 else values for name, values in teacher.items()},
    )


def _most_kept(sample: Sample | None) -> int:
    """At a token of the sample."""
    return 0 if sample is None else int(sample.support[: len(sample.response_ids)].max(initial=0))
