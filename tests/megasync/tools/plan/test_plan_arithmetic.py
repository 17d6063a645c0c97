"""Invariants of lengths, of the layout's numbers, of counted storages and of seconds."""

from __future__ import annotations

import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megasync.config.load import with_changes
from megasync.config.schema import Config
from megasync.models.model_shape import ModelShape
from megasync.tools.plan.hardware import GIB, hardware
from megasync.tools.plan.layout import Grid, Request, Work
from megasync.tools.plan.lengths import decode_steps, quantiles
from megasync.tools.plan.meta.tracker import ROUNDED_TO, Tracker
from megasync.tools.plan.replicas import WorkerMemory, worker_memory
from megasync.tools.plan.seconds import Generation, Machine, Multiplications, generation_seconds, step_seconds

SHAPE = ModelShape("qwen2", 36, 16, 2, 151936, 11008, 2048)
NUM_PARAMETERS = 3_085_938_688


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
    config = with_changes(Config(), {"engine.tokens_per_microbatch": tokens, "algorithm.num_minibatches": minibatches})
    work, grid = Work.of(config, Request(data, hardware("h100"), 200.0)), Grid(data, 1, 1, 1, 1, 1)
    assert work.num_microbatches(grid) * tokens >= work.tokens / minibatches / data
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
    assert (tracker.restart_peak(), tracker.peak_bytes) == (peak, now)


def replica(**rollout: object) -> Config:
    return with_changes(Config(), {"model.dtype": "bfloat16", **{f"rollout.{key}": value for key, value in rollout.items()}})


@given(share=st.floats(0.2, 0.95), workers=st.sampled_from((1, 2)), is_eager=st.booleans())
def test_a_share_of_the_gpu_bounds_a_worker(share: float, workers: int, is_eager: bool) -> None:
    """But for CUDA's context, NCCL, graphs and the sync."""
    config = replica(gpu_memory_utilization=share, tensor_parallel=workers, enforce_eager=is_eager)
    gpu = hardware("h100")
    found = worker_memory(config, SHAPE, NUM_PARAMETERS, gpu)
    within = sum(found.parts[name] for name in ("weights", "KV cache", "sampling state", "working memory", "kernels"))
    assert within == pytest.approx(share * gpu.memory_bytes, rel=1e-6)
    assert found.total - within < 5 * GIB and ("CUDA graphs" in found.parts) != is_eager
    assert 0 < found.asleep < found.total - found.parts["weights"] - found.parts["KV cache"]


def test_a_given_cache_has_its_size_and_more_workers_take_less() -> None:
    gpu = hardware("h200")
    one, two = (worker_memory(replica(kv_cache_bytes=GIB, tensor_parallel=n), SHAPE, NUM_PARAMETERS, gpu) for n in (1, 2))
    assert one.parts["KV cache"] == two.parts["KV cache"] == GIB and two.cache_tokens == 2 * one.cache_tokens
    assert one.parts["weights"] == 2 * two.parts["weights"] and one.parts["sampling state"] == two.parts["sampling state"]
    few = worker_memory(replica(kv_cache_bytes=GIB, max_num_seqs=32), SHAPE, NUM_PARAMETERS, gpu)
    assert few.parts["working memory"] < one.parts["working memory"]


def test_samples_of_a_group_share_whole_blocks_of_their_prompt() -> None:
    """Of 40 tokens two blocks: each sample has 8 of its own, of 8 tokens all. Weights take no time here."""
    config = with_changes(Config(), {"rollout.group_size": 4, "rollout.max_new_tokens": 8, "data.batch_size": 2})
    model, gpu, found = Multiplications(1e9, 0.0, 1.0, (), 1, 64, 0), hardware("h200"), []
    worker, shape = WorkerMemory({}, 10**9, 0), ModelShape("qwen2", 1, 1, 1, 100, 64, 64)
    for prompt in (32, 40, 8):
        on = Machine(config, gpu, Grid(1, 1, 1, 1, 1, 1), Work.of(config, Request(1, gpu, 4.0, prompt)), model)
        found.append(generation_seconds(on, shape, 0, worker).alone)
    token = 2e9 / on.flops
    assert found[1] - found[0] == pytest.approx(8 * 8 * token, rel=1e-3)
    assert found[0] - found[2] == pytest.approx((2 * 32 - 8 * 8) * token, abs=0.01 * token)


@pytest.mark.parametrize(("staleness", "on_update", "full", "wanted"), [
    (0, "continue", 2.0, (12.0, "generation")),
    (1, "continue", 2.0, (3.0, "training")),
    (1, "continue", 5.0, (5.5, "generation")),
    (1, "drain", 2.0, (9.5, "generation")),
    (2, "drain", 2.0, (3.0, "training")),
])  # fmt: skip
def test_the_longer_of_training_and_generation_is_a_step(
    staleness: int, on_update: str, full: float, wanted: tuple[float, str]
) -> None:
    """With one batch in flight a sync that drains lets replicas run empty."""
    config = with_changes(Config(), {"rollout.max_staleness": staleness, "rollout.on_update": on_update})
    parts = {"train": 2.0, "optimizer": 0.5, "log_probs": 0.0, "sync": 0.5, "moving": 0.0}
    found = step_seconds(config, parts, Generation(9.0, full))
    assert (found.step, found.binding) == wanted
