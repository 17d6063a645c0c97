"""Invariants of lengths, of the layout's numbers and of counted storages."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import EngineConfig
from megasync.config.schema import Config
from megasync.planning.lengths import decode_steps, quantiles
from megasync.planning.shapes import Busy, Grid, Request, Work
from megasync.planning.cpu import calls, kept, passes, together
from megasync.planning.hardware import hardware, seconds, units
from megasync.planning.meta.activations import Activations
from megasync.planning.meta.ranks import Counts
from megasync.planning.meta.operations import LARGE_BYTES, Operation, Operations, Shape
from megasync.planning.meta.tracker import ROUNDED_TO, Tracker


@given(longest=st.integers(2, 5000), share=st.floats(0.02, 0.9))
def test_quantiles_have_the_mean(longest: int, share: float) -> None:
    mean = max(1.0, longest * share)
    found = quantiles(mean, longest)
    assert list(found) == sorted(found) and found[0] >= 1 and found[-1] <= longest
    assert abs(statistics.fmean(found) - mean) <= max(1.0, 0.02 * mean)


@given(
    lengths=st.lists(st.integers(1, 500), min_size=1, max_size=20),
    samples=st.integers(1, 300),
    at_once=st.integers(1, 300),
)
def test_all_tokens_are_decoded(lengths: list[int], samples: int, at_once: int) -> None:
    steps = decode_steps(lengths, samples, at_once)
    assert all(0 < running <= min(samples, at_once) for _, running in steps)
    total = samples * statistics.fmean(lengths)
    decoded = sum(count * running for count, running in steps)
    assert sum(count for count, _ in steps) >= max(lengths)
    assert 0.98 * total - min(samples, at_once) - max(lengths) <= decoded <= total + max(lengths) * len(lengths) + samples


@given(pipeline=st.integers(1, 8), virtual=st.integers(1, 3), microbatches=st.integers(1, 64))
def test_activations_in_flight(pipeline: int, virtual: int, microbatches: int) -> None:
    grid = Grid(pipeline, 1, pipeline, virtual, 1, 1)
    held = [grid.in_flight(stage, microbatches) for stage in range(pipeline)]
    assert held == sorted(held, reverse=True) and held[-1] > 0 and held[0] <= microbatches


@given(data=st.integers(1, 64), tokens=st.integers(256, 65536), minibatches=st.integers(1, 4))
def test_microbatches_hold_a_rank_s_tokens(data: int, tokens: int, minibatches: int) -> None:
    config = Config()
    engine = config.engine.model_copy(update={"tokens_per_microbatch": tokens})
    algorithm = config.algorithm.model_copy(update={"num_minibatches": minibatches})
    config = config.model_copy(update={"engine": engine, "algorithm": algorithm})
    work, grid = Work.of(config, Request(data, hardware("h100"), 200.0)), Grid(data, 1, 1, 1, 1, 1)
    assert work.num_microbatches(grid) * tokens >= work.tokens_of_rank(grid)
    assert 0 < work.microbatch_tokens(grid) <= tokens
    assert sum(work.sequences(tokens, 8)) % 8 == 0


@settings(deadline=None)
@given(steps=st.lists(st.tuples(st.booleans(), st.integers(1, 5000)), max_size=30))
def test_storages_are_counted_while_they_live(steps: list[tuple[bool, int]]) -> None:
    tracker, alive = Tracker(), list[torch.Tensor]()
    now = peak = 0
    with tracker:
        for is_new, size in steps:
            if is_new or not alive:
                alive.append(torch.empty(size, device="meta"))
                now += -(-4 * size // ROUNDED_TO) * ROUNDED_TO
            else:
                gone = alive.pop(size % len(alive))
                now -= -(-4 * gone.numel() // ROUNDED_TO) * ROUNDED_TO
                del gone
            peak = max(peak, now)
            view = alive[0].view(-1) if alive else None  # a view is no storage of its own
            assert view is None or view.is_meta
    assert (tracker.bytes_now, tracker.peak_bytes) == (now, peak)


sizes = st.integers(1, 4000)


@given(rows=sizes, inner=sizes, columns=sizes, batch=st.none() | st.integers(1, 64))
def test_what_is_timed_of_a_product_stands_for_all_of_it(rows: int, inner: int, columns: int, batch: int | None) -> None:
    many = () if batch is None else (batch,)
    left, right = (Shape.of(torch.empty(*many, *each, device="meta")) for each in ((rows, inner), (inner, columns)))
    (one, other), share = calls._cut("mm" if batch is None else "bmm", (left, right))
    assert one.sizes[-1] == other.sizes[-2] and one.sizes[:-2] == other.sizes[:-2]
    timed = math.prod(one.sizes) * other.sizes[-1]
    assert timed <= calls.MOST_PRODUCTS or max(*one.sizes, *other.sizes) <= calls.LEAST_SIZE
    assert math.isclose(timed * share, math.prod(left.sizes) * columns)
    assert (one.strides, other.strides) == (left.strides, right.strides)


def test_calls_are_counted_by_what_they_compute() -> None:
    """Not views and empty tensors; a product with its shapes, all else with its arguments and the bytes of inputs and results."""
    tracker = Tracker(counts_operations=True)
    with tracker:
        a, b = (torch.empty(*shape, device="meta") for shape in ((8, 16), (4, 16)))
        torch.mm(a, b.t()).add_(1.0)
    left, right, result = (Shape(*each, torch.float32) for each in (((8, 16), (16, 1)), ((16, 4), (1, 16)), ((8, 4), (4, 1))))
    product = Operation("mm", (left, right), 0)
    added = Operation("aten.add_.Tensor", (result, 1.0), 2 * 8 * 4 * 4)
    assert tracker.operations == {product: 1, added: 1}


def test_large_new_tensors_come_from_the_kernel() -> None:
    """Also those that are made empty; not what a call has written to, and nothing small."""
    tracker, large = Tracker(counts_operations=True), LARGE_BYTES // 4
    with tracker:
        one = torch.empty(large, device="meta")
        one.add_(1.0)
        one.view(-1, 2)
        torch.add(one, one)
        torch.add(one[:8], one[:8])
    found = sorted((each.name, each.kernel_bytes) for each in tracker.operations)
    assert found == [("", LARGE_BYTES), ("aten.add.Tensor", 0), ("aten.add.Tensor", LARGE_BYTES), ("aten.add_.Tensor", 0)]


def replayed() -> list[Operation]:
    """Calls with indices, lists, keywords and numbers among their arguments, as a trace has them."""
    tracker = Tracker(counts_operations=True)
    with tracker:
        x, index = torch.empty(4096, 8, device="meta"), torch.empty(4096, dtype=torch.int64, device="meta")
        torch.cat([x[index], x.pow(2)], 1).sum(-1, keepdim=True)
        torch.zeros_like(x).index_put_((index,), x)
        torch.nn.functional.embedding(index, x).to(torch.bfloat16)
    return list(tracker.operations)


@pytest.mark.parametrize("each", replayed(), ids=lambda each: each.name)
def test_what_was_traced_can_be_called_again(each: Operation) -> None:
    call, share = calls.prepare(each)
    call()
    assert share == 1.0


@given(rows=st.integers(1, 2**22), width=st.integers(1, 64))
def test_of_a_large_call_fewer_rows_are_timed(rows: int, width: int) -> None:
    shape = Shape((rows, width), (width, 1), torch.float32)
    whole = Operation("aten.mul.Tensor", (shape, shape), 3 * 4 * rows * width)
    part, share = calls._with_fewer_rows(whole)
    (one, other), most = part.inputs, max(rows, width)
    assert one == other and one.strides[1] in (1, one.sizes[0])
    assert share == most / max(one.sizes) or (one == shape and share == 1.0)
    assert whole.num_bytes <= calls.MOST_BYTES * max(1.0, share) * 1.01


def test_processes_that_compute_at_the_same_time() -> None:
    """Trainer and replicas in turns, or all of them at once."""
    config, grid = Config(), Grid(2, 1, 1, 1, 1, 1)
    rollout = config.rollout.model_copy(update={"replicas": 3, "tensor_parallel": 2, "max_staleness": 0})
    assert Busy.of(config.model_copy(update={"rollout": rollout}), grid) == Busy(2, 6)
    rollout = rollout.model_copy(update={"max_staleness": 1})
    assert Busy.of(config.model_copy(update={"rollout": rollout}), grid) == Busy(8, 8)
    supervised = config.algorithm.model_copy(update={"name": "sft"})
    assert Busy.of(config.model_copy(update={"rollout": rollout, "algorithm": supervised}), grid).training == 2


@pytest.mark.parametrize("is_cold", [False, True])
def test_calls_are_timed_in_every_process_and_each_process_answers(is_cold: bool) -> None:
    """As many answers as processes, each with one number a call; a call that cannot be made again goes by its bytes."""
    known = calls.moved(2**16)
    unknown = Operation("aten.no_such.operator", (), 2**16)
    answers = together._run([known, unknown], together.Way(2, is_cold))
    assert [len(answer) for answer in answers] == [2, 2] and all(seconds > 0 for answer in answers for seconds in answer)


def test_a_pass_is_its_calls_and_what_python_takes_around_them() -> None:
    """Calls grow with the tokens, what is around them with the micro-batches."""
    one, other = calls.moved(2**16), calls.moved(2**18)
    operations, found = Operations({one: 3, other: 2}), {one: 1.0, other: 10.0, calls.host(): 100.0}
    around = 5 * units("host_call") * 100.0
    assert passes.pass_seconds(operations, found, 8, 8, 1) == pytest.approx(23.0 + around)
    assert passes.pass_seconds(operations, found, 8, 16, 3) == pytest.approx(2 * 23.0 + 3 * around)


@given(sizes=st.lists(st.integers(0, 2**27), max_size=30), most=st.integers(0, 2**28))
def test_groups_have_all_calls_in_order_and_more_than_caches_hold(sizes: list[int], most: int) -> None:
    groups = list(together.in_groups([Operation("", (), size) for size in sizes], most))
    assert [place for group in groups for place in group] == list(range(len(sizes)))
    taken = [sum(min(sizes[place], calls.MOST_BYTES) for place in group) for group in groups]
    assert all(group for group in groups) and all(size >= most for size in taken[:-1])


def test_models_that_caches_hold_are_timed_warm() -> None:
    """By the weights of the largest stage of a pipeline."""
    small, large = (Counts(dense=whole) for whole in (passes.CACHED_BYTES // 4, passes.CACHED_BYTES // 4 + 1))
    assert not passes.is_cold([small, small]) and passes.is_cold([small, large])


def test_backward_passes_find_warm_what_was_computed_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """With full recompute, of a model that caches do not hold: a call takes 2 s where its arguments are in memory, else 1."""
    forward, backward = calls.moved(2**16), calls.moved(2**18)

    def seconds_of(operations: Iterable[Operation], *_: int, is_cold: bool = False, **__: int) -> dict[Operation, float]:
        return {each: (2.0 if is_cold else 1.0) if each.name.startswith("aten") else 0.0 for each in operations}

    monkeypatch.setattr(passes, "seconds_of", seconds_of)
    grid, work = Grid(1, 1, 1, 1, 1, 1), Work(8, (8,), 1, 1, 16, 16)
    counts = Counts(dense=passes.CACHED_BYTES)
    for recompute, taken in (("none", 2 * 3 + 2 * 4), ("full", 2 * 2 * 3 + 4)):
        computed = 2 if recompute == "full" else 1
        operations = Operations({forward: 3 * computed, backward: 4}), Operations({forward: 3})
        traced = Activations(0, 0, passes=operations[0], forward=operations[1], tokens=16)
        found = passes.train_seconds([(counts, traced)], EngineConfig(recompute=recompute), grid, work, 1)
        assert found == pytest.approx((taken * units("in_step"), 6 * units("in_step"))), recompute


def test_memory_that_rested_is_planned_by_what_it_takes_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Timed once for about as long a rest, at most 8 s."""
    taken, rests = iter((0.75, 0.25, 0.25, 0.75)), list[float]()
    monkeypatch.setattr(passes, "timed", lambda _: next(taken))
    monkeypatch.setattr(passes.time, "sleep", rests.append)
    monkeypatch.setattr(passes, "RESTED_BYTES", 2**20)
    passes._rested.cache_clear()
    assert [passes.rested_seconds(2**22, rest) for rest in (3.0, 2.5, 4.0)] == pytest.approx([2.0, 2.0, 2.0])
    assert passes.rested_seconds(2**22, 100.0) == 0.0
    assert rests == [4, 8]
    passes._rested.cache_clear()


def test_what_ranks_exchange_grows_with_their_number() -> None:
    grids = [Grid(ranks, 1, 1, 1, 1, 1) for ranks in (1, 2, 8)]
    assert [passes.gather_seconds(2**18, grid) / seconds("gloo_gathered_mib") for grid in grids] == [0.0, 0.5, 0.875]
    assert [passes.reduce_seconds(2**18, grid) / seconds("gloo_reduced_mib") for grid in grids] == [0.0, 0.5, 0.875]


def test_a_rank_alone_has_all_cores_unless_the_environment_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(together, "usable_cores", lambda: 8)
    for text, wanted in {"": (8, 1), "3": (3, 3), "none": (8, 1), "0": (8, 1)}.items():
        monkeypatch.setenv(together.THREADS, text)
        assert (together.rank_threads(1), together.rank_threads(2)) == wanted
    monkeypatch.delenv(together.THREADS)
    assert (together.rank_threads(1), together.rank_threads(2)) == (8, 1)


def test_calls_are_timed_with_as_many_threads_as_a_rank_will_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's threads do not survive a fork: this process has some, and a forked one would hang in its first call."""
    monkeypatch.setattr(together, "usable_cores", lambda: 2)
    monkeypatch.setattr(together, "_KNOWN", {})
    operation = calls.moved(2**24)
    torch.set_num_threads(2)
    try:
        calls.prepare(operation)[0]()
        found = [together.seconds_of([operation], 1, threads=threads)[operation] for threads in (1, 2)]
    finally:
        torch.set_num_threads(1)
    assert all(0 < seconds < 10 for seconds in found)
    assert sorted(together.known()) == sorted(
        [f"1 x {several}{tuple(each)}" for several in ("", "2 threads ") for each in (operation, calls.fresh())]
    )


def test_what_one_run_has_timed_the_next_does_not_where_it_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of as many processes."""
    timed = list[tuple[int, int]]()

    def run(operations: Sequence[Operation], way: together.Way) -> list[list[float]]:
        timed.append((len(operations), way.at_once))
        return [[float(len(timed))] * len(operations)] * way.at_once

    def plan(*operations: Operation) -> list[float]:
        monkeypatch.setattr(together, "_KNOWN", {})  # as in another process
        with kept.kept():
            found = together.seconds_of(operations, 1)
        return [found[each] for each in operations]

    monkeypatch.setattr(together, "_run", run)
    one, other = calls.moved(2**20), calls.moved(2**21)
    monkeypatch.delenv(kept.FILE, raising=False)
    assert [plan(one), plan(one)] == [[1.0], [2.0]] and timed == 2 * [(2, 1)], "it, and a byte of new memory"
    monkeypatch.setenv(kept.FILE, str(tmp_path / "calls.json"))
    assert [plan(one), plan(one)] == [[3.0], [3.0]] and timed == 3 * [(2, 1)]
    assert plan(one, other) == [3.0, 4.0] and timed[3:] == [(1, 1)]
    monkeypatch.setattr(together, "_KNOWN", {})
    assert together.seconds_of([one], 1)[one] == 5.0, "not by a run"
