"""Invariants of lengths, of the layout's numbers and of counted storages."""

from __future__ import annotations

import math
import statistics

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megasync.config.schema import Config
from megasync.planning.lengths import decode_steps, quantiles
from megasync.planning.shapes import Grid, Request, Work
from megasync.planning import cpu
from megasync.planning.hardware import hardware
from megasync.planning.meta.operations import Operation, Shape
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
    (one, other), share = cpu._cut("mm" if batch is None else "bmm", (left, right))
    assert one.sizes[-1] == other.sizes[-2] and one.sizes[:-2] == other.sizes[:-2]
    timed = math.prod(one.sizes) * other.sizes[-1]
    assert timed <= cpu.MOST_PRODUCTS or max(*one.sizes, *other.sizes) <= cpu.LEAST_SIZE
    assert math.isclose(timed * share, math.prod(left.sizes) * columns)
    assert (one.strides, other.strides) == (left.strides, right.strides)


def test_calls_are_counted_by_what_they_compute() -> None:
    """Views and empty tensors cost nothing but their call; a product has its shapes, all else the bytes of inputs and results."""
    tracker = Tracker(counts_operations=True)
    with tracker:
        a, b = (torch.empty(*shape, device="meta") for shape in ((8, 16), (4, 16)))
        torch.mm(a, b.t()).add_(1.0)
    products = {each.inputs: count for each, count in tracker.operations.items() if each.name}
    assert products == {(Shape((8, 16), (16, 1), torch.float32), Shape((16, 4), (1, 16), torch.float32)): 1}
    assert {each: count for each, count in tracker.operations.items() if not each.name} == {Operation("", (), 2 * 8 * 4 * 4): 1}


def test_more_of_the_same_takes_longer() -> None:
    one = Operation("", (), 2**20)
    assert 0 < cpu.memory_seconds(2**20) < cpu.memory_seconds(2**28)
    operations = type(Tracker().operations)({one: 3})
    assert 0 < cpu.pass_seconds(operations, 10, 10, 1) < cpu.pass_seconds(operations, 10, 40, 4)
