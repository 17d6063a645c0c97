"""Packing, the plan of micro-batches, and the way of a batch's tokens to the ranks that train on them.

python -m pytest tests/engine/batch/test_batch.py
"""

from __future__ import annotations

import dataclasses
import pickle
import tempfile
import tracemalloc
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from bridge.generation import Completion, GenerationRequest
from engine.batch.batch import MicroBatch, SampleTable, pack
from engine.batch.plan import Balance, needed_samples, padding_fraction, plan_microbatches, split_members
from engine.batch.packed import NO_EXPERT
from engine.sample import TEACHER_ARRAYS, TOKEN_ARRAYS, Sample
from megasync.run.rank_zero import flatten, with_tokens
from megasync.rewards.pool import Scored
from megasync.rollouts.group import Group
from megasync.rollouts.progress import Progress, SavedGroup, SavedSample, load_progress, save_progress
from megasync.rollouts.metrics import batch_metrics
from megasync.rollouts.samples import samples_of
from tests.support.ranks import run_ranks
from tests.support.tiny_models import write_tiny_model

ROOT = Path(__file__).resolve().parents[3]
CPU = torch.device("cpu")
FAST = settings(derandomize=True, database=None, deadline=None, max_examples=60)
LENGTHS = st.lists(st.integers(2, 60), min_size=1, max_size=40)


@st.composite
def tables(draw: st.DrawFn, *, from_rollouts: bool = False) -> SampleTable:
    """Samples of any lengths, with and without log-probs, experts and given tokens; with advantages."""
    samples = []
    dtype, has_support = draw(st.sampled_from([np.uint8, np.int16, None])), draw(st.booleans())
    top_k = draw(st.sampled_from([None, 0, 3])) if from_rollouts else None
    for _ in range(draw(st.integers(1, 9))):
        generator = np.random.default_rng(draw(st.integers(0, 2**31)))
        prompt, response = draw(st.integers(1, 9)), draw(st.integers(0, 9))
        known = response if from_rollouts or draw(st.booleans()) else 0
        ids = generator.integers(0, 2**31, prompt + response)
        log_probs, versions = -generator.random(known), generator.integers(-1, 100, known)
        reward, group = float(generator.random()), int(generator.integers(0, 3))
        num_rows = prompt + response - 1 if dtype is not None and draw(st.booleans()) else 0
        experts = generator.integers(0, 200, (num_rows, 3, 2)).astype(dtype or np.uint8)
        member, mask = draw(st.sampled_from([-1, 0, 1])), generator.random(response) < draw(st.sampled_from([0.5, 2.0]))
        counts = np.where(mask if not mask.all() else True, generator.integers(1, 5, response), 0)
        kept = generator.permutation(1000)[: counts.sum()] if has_support else None
        support = np.empty(0, np.int32) if kept is None else np.concatenate([counts, kept]).astype(np.int32)
        own: dict[str, Any] = {"member": member, "routed_experts": experts, "is_sampled": mask, "support": support}
        if top_k is not None:
            own["teacher_log_probs"] = -generator.random(response)
        if top_k:
            own["teacher_top_ids"] = generator.integers(0, 2**31, (response, top_k))
            own["teacher_top_log_probs"] = -generator.random((response, top_k))
        samples.append(Sample(ids[:prompt], ids[prompt:], log_probs, versions, reward, group, **own))
    table = SampleTable.from_samples(samples)
    return dataclasses.replace(table, advantages=np.random.default_rng(0).standard_normal(len(samples)))


def packed_token_by_token(table: SampleTable, indices: list[int], multiple: int) -> dict[str, list[Any]]:
    """What `pack` says of each token, in plain words: rows of (token, label, position, mask, segment, advantage, log-prob)."""
    rows: list[tuple[Any, ...]] = []
    for number, index in enumerate(indices or [0]):
        sample, advantage = table.samples[index], table.advantages[index]
        assert sample is not None
        ids, first = [*sample.prompt_ids, *sample.response_ids], len(sample.prompt_ids)
        for position, token in enumerate(ids):
            predicted = position + 1 - first  # which response token this position predicts
            is_response = 0 <= predicted < len(sample.response_ids)
            is_sampled = is_response and (not len(sample.is_sampled) or bool(sample.is_sampled[predicted]))
            label = ids[position + 1] if position + 1 < len(ids) else 0
            log_prob = sample.rollout_log_probs[predicted] if is_response and len(sample.rollout_log_probs) else 0
            mask = float(is_sampled and bool(indices))
            rows.append((token, label, position, mask, number, advantage, log_prob))
    rows += [(0, 0, position, 0, rows[-1][4], 0, 0) for position in range(-len(rows) % multiple)]
    names = ("tokens", "labels", "position_ids", "mask", "segment", "advantages", "rollout_log_probs")
    return dict(zip(names, map(list, zip(*rows, strict=True)), strict=True))


@FAST
@given(tables(), st.sampled_from([1, 2, 8]), st.data())
def test_pack_is_what_it_says_token_by_token(table: SampleTable, multiple: int, data: st.DataObject) -> None:
    indices = data.draw(st.lists(st.integers(0, len(table) - 1), unique=True))
    micro = pack(table, indices, multiple, CPU)
    for name, expected in packed_token_by_token(table, indices, multiple).items():
        values = getattr(micro, name).flatten()
        assert values.dtype == (torch.float32 if values.is_floating_point() else torch.int64)
        assert torch.equal(values, torch.tensor(np.array(expected), dtype=values.dtype)), name
    lengths = table.lengths[indices or [0]].tolist()
    ends = np.cumsum([*lengths, *([micro.num_tokens - sum(lengths)] if micro.num_tokens > sum(lengths) else [])])
    assert micro.sequences.cu_seqlens_q.tolist() == [0, *ends]


@FAST
@given(tables(from_rollouts=True), st.integers(1, 3), st.integers(1, 6), st.sampled_from([Balance(), Balance(3, 5.0)]))
def test_what_a_rank_needs_is_what_it_packs(table: SampleTable, num_minibatches: int, data_size: int, wanted: Balance) -> None:
    """Packing works with no other tokens, and every sample is packed somewhere."""
    parts = split_members(table.members, num_minibatches)
    needed = needed_samples(table.lengths, parts, data_size, 20, wanted)
    assert set(chain.from_iterable(needed)) == set(range(len(table)))
    for rank, own in enumerate(needed):
        alone = with_tokens(pickle.loads(pickle.dumps(table.only([]))), own, flatten(table, own))
        used: set[int] = set()
        for part in filter(len, parts):
            for indices in plan_microbatches(table.lengths[part.start : part.stop], data_size, 20, wanted)[rank]:
                assert_same(pack(alone.part(part), indices, 1, CPU), pack(table.part(part), indices, 1, CPU))
                used |= {part.start + index for index in indices or [0]}
        assert sorted(used) == own


@FAST
@given(tables(from_rollouts=True), st.integers(1, 4), st.sampled_from([(1, 1), (4, 1), (4, 4), (8, 4)]))
def test_padding_is_what_is_packed_beside_the_samples(table: SampleTable, data_size: int, multiples: tuple[int, int]) -> None:
    plan = plan_microbatches(table.lengths, data_size, 20)
    held = sum(pack(table, indices, multiples[0], CPU, multiples[1]).num_tokens for bins in plan for indices in bins)
    assert padding_fraction(table.lengths, plan, *multiples) == pytest.approx(1 - int(table.lengths.sum()) / held)


@FAST
@given(tables(from_rollouts=True), st.data())
def test_tokens_travel_whole(table: SampleTable, data: st.DataObject) -> None:
    indices = sorted(data.draw(st.sets(st.integers(0, len(table) - 1), min_size=1)))
    buffer = flatten(table, indices)
    back = with_tokens(table.only([]), indices, buffer)
    assert [index for index, sample in enumerate(back.samples) if sample is not None] == indices
    for index in indices:
        before, after = table.samples[index], back.samples[index]
        assert before is not None and after is not None
        assert (before.reward, before.group, before.member) == (after.reward, after.group, after.member)
        assert after.is_sampled.dtype == bool and np.array_equal(after.is_sampled, before.is_sampled)
        for name, dtype in {**TOKEN_ARRAYS, **TEACHER_ARRAYS}.items():
            assert getattr(after, name).dtype == dtype
            assert np.array_equal(getattr(after, name), getattr(before, name)), name
            assert np.shares_memory(getattr(after, name), buffer.numpy()) or not len(getattr(after, name))
        assert np.array_equal(after.support, before.support) and after.support.dtype == np.int32
        experts = np.empty((0, 0, 0), np.uint8)
        if table.routed is not None:
            unknown = np.zeros((before.num_tokens - 1, *table.routed[:2]), table.routed[2])
            experts = before.routed_experts if len(before.routed_experts) else unknown
        assert after.routed_experts.dtype == experts.dtype and np.array_equal(after.routed_experts, experts)


@FAST
@given(tables(from_rollouts=True), st.data())
def test_packed_tokens_keep_their_experts(table: SampleTable, data: st.DataObject) -> None:
    """All but the last of each sample, of which nothing is known."""
    indices = data.draw(st.lists(st.integers(0, len(table) - 1), unique=True, min_size=1))
    packed = pack(table, indices, 4, CPU).routed_experts
    assert (packed is None) == (table.routed is None)
    position = 0
    for index in indices if packed is not None else []:
        sample = table.samples[index]
        assert sample is not None
        last = position + sample.num_tokens - 1
        assert np.array_equal(packed[position:last].numpy(), sample.routed_experts) or not packed[position:last].any()
        assert (packed[last] == NO_EXPERT).all()
        position = last + 1


@FAST
@given(tables(from_rollouts=True), st.data())
def test_packed_tokens_keep_what_the_teacher_says(table: SampleTable, data: st.DataObject) -> None:
    """At the positions that predict response tokens; zeros elsewhere."""
    indices = data.draw(st.lists(st.integers(0, len(table) - 1), unique=True, min_size=1))
    packed = pack(table, indices, 4, CPU)
    assert (packed.teacher_log_probs is None) == (table.teacher_top_k is None)
    assert (packed.teacher_top_ids is None) == (not table.teacher_top_k)
    for name in TEACHER_ARRAYS if table.teacher_top_k else []:
        values = getattr(packed, name).view(packed.num_tokens, -1)
        for index, start in zip(packed.samples, packed.starts, strict=True):
            sample = table.samples[index]
            assert sample is not None
            first, last = start + len(sample.prompt_ids) - 1, start + sample.num_tokens - 1
            assert np.array_equal(values[first:last].numpy().reshape(-1), getattr(sample, name).reshape(-1))
            values[first:last] = 0
        assert not values.any()


@FAST
@given(tables(from_rollouts=True))
def test_saved_rollouts_are_what_was_generated(table: SampleTable) -> None:
    samples = [sample for sample in table.samples if sample is not None]
    done = [
        SavedSample(index, Completion(*arrays_of(s), "stop", s.routed_experts, s.support), s.reward)
        for index, s in enumerate(samples)
    ]
    progress = Progress(3, 5, 2.5, (SavedGroup(7, tuple(done[:2]), 2**63 - 1, -(2**63)), SavedGroup(8, tuple(done[2:]), 1, 2)))
    with tempfile.TemporaryDirectory() as folder:
        save_progress(Path(folder), progress)
        back = load_progress(Path(folder))
    assert back is not None
    heads = [[(one.key, one.request_digest, one.reward_digest, len(one.samples)) for one in of.groups] for of in (back, progress)]
    assert heads[0] == heads[1]
    for kept, saved in zip([one for group in back.groups for one in group.samples], done, strict=True):
        for name in ("token_ids", "log_probs", "weight_versions", "routed_experts", "support"):
            mine, theirs = getattr(kept.completion, name), getattr(saved.completion, name)
            assert mine.dtype == theirs.dtype and np.array_equal(mine, theirs), name


def arrays_of(sample: Sample) -> tuple[Any, ...]:
    return sample.response_ids, sample.rollout_log_probs, sample.weight_versions


@FAST
@given(tables(from_rollouts=True), st.data())
def test_kept_tokens_stand_under_the_label_that_was_drawn_from_them(table: SampleTable, data: st.DataObject) -> None:
    """A label that was not sampled, or of whose sampling nothing is known, stands alone."""
    indices = data.draw(st.lists(st.integers(0, len(table) - 1), unique=True, min_size=1))
    micro = pack(table, indices, 4, CPU)
    expected = [[int(label)] for label in micro.labels[0]]
    for index, start in zip(indices, micro.starts, strict=True):
        sample = table.samples[index]
        assert sample is not None
        number = len(sample.response_ids)
        counts, ids = sample.support[:number].tolist(), sample.support[number:].tolist()
        for place, count in enumerate(counts):
            kept, ids = ids[:count], ids[count:]
            expected[start + len(sample.prompt_ids) - 1 + place] = kept or expected[start + len(sample.prompt_ids) - 1 + place]
    if micro.support is None:
        assert all(len(kept) == 1 for kept in expected) and micro.targets[0] is micro.labels
    else:
        assert [[token for token in column if token >= 0] for column in micro.support.t().tolist()] == expected
        assert micro.targets[0].shape == (1 + max(map(len, expected)), micro.num_tokens)


def assert_same(first: MicroBatch, second: MicroBatch) -> None:
    for field in dataclasses.fields(MicroBatch):
        a, b = getattr(first, field.name), getattr(second, field.name)
        if field.name == "sequences":
            a, b = a.cu_seqlens_q, b.cu_seqlens_q
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b, field.name


def scattered_batches(path: str, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A batch that rank 0 alone has, through TokenScatter to engine.prepare, against one that every rank has."""
    from megasync.run.rank_zero import TokenScatter, on_rank_zero
    from tests.engine.engine_cases import engine, random_samples
    from tests.engine.turn_cases import as_turns

    results = []
    for number, case in enumerate(cases):
        with engine(path, name="grpo", **case) as built:
            scatter = TokenScatter.from_layout(built.layout)
            samples = [
                dataclasses.replace(sample, weight_versions=np.arange(len(sample.response_ids)))
                for sample in random_samples(18, seed=number)
            ]
            samples = as_turns(samples) if "credit" in case else samples
            table = on_rank_zero(partial(SampleTable.from_samples, samples), lambda table: table.only([]))
            table = scatter(table, built.needed_samples(table))
            own, whole = built.prepare(table), built.prepare(samples)
            for first, second in zip(own, whole, strict=True):
                assert (first.num_tokens, first.num_members) == (second.num_tokens, second.num_members)
                for micro, same in zip(first.microbatches, second.microbatches, strict=True):
                    assert_same(micro, same)
            held = [index for index, sample in enumerate(table.samples) if sample is not None]
            results.append({"data_rank": built.layout.data_rank, "held": held, "metrics": built.update(own)})
    return results


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_ranks_get_their_own_tokens_alone_and_train_as_with_all(tmp_path: Path, num_ranks: int) -> None:
    """Every micro-batch is bit for bit the one that is packed where all samples are."""
    path = str(write_tiny_model(tmp_path / "model", "qwen3", True, num_hidden_layers=2))
    cases: list[dict[str, Any]] = [{"num_minibatches": 2, "credit": "turn"}, {"tokens": 60, "kl_coefficient": 0.1}]
    if num_ranks > 1:
        cases += [{"tensor": 2, "sequence": True}, {"pipeline": 2}]
    ranks = run_ranks(num_ranks, "tests.engine.batch.test_batch:scattered_batches", {"path": path, "cases": cases})
    for number, case in enumerate(cases):
        data_size = num_ranks // case.get("tensor", 1) // case.get("pipeline", 1)
        held = {results[number]["data_rank"]: results[number]["held"] for results in ranks}
        assert len(held) == data_size
        assert all(results[number]["held"] == held[results[number]["data_rank"]] for results in ranks)
        assert set(chain.from_iterable(held.values())) == set(range(18))
        assert all(len(own) < 18 for own in held.values()) or data_size == 1
        assert all(results[number]["metrics"] == ranks[0][number]["metrics"] for results in ranks)


def test_a_batch_is_prepared_without_copies_of_its_tokens() -> None:
    """From groups to the table and the rank's own part: no array of tokens is copied before micro-batches are packed."""
    length, num_samples = 4096, 4
    groups = []
    for key in range(8):
        group = Group(key, GenerationRequest((1, 2, 3), num_samples=num_samples))
        for sample in range(num_samples):
            arrays = np.full(length, 7, np.int32), np.full(length, -1.0, np.float32), np.zeros(length, np.int32)
            group.completions[sample], group.scored[sample] = Completion(*arrays, "stop"), Scored(float(sample), {})
        groups.append(group)
    num_bytes = len(groups) * num_samples * length * 12
    tracemalloc.start()
    try:
        samples = [sample for place, group in enumerate(groups) for sample in samples_of(group, place)]
        batch_metrics(samples, 0, 1.0, 0.0)
        table = SampleTable.from_samples(samples)
        needed = needed_samples(table.lengths, split_members(table.members, 2), 4, 2 * length)
        own = table.only(needed[0])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(own) == len(samples) and peak < num_bytes / 10, (peak, num_bytes)
