"""Seconds of generation, and of a step that trains beside it, from facts alone."""

from __future__ import annotations

import pytest

from megasync.config.load import with_changes
from megasync.config.schema import Config
from megasync.hf.model_shape import ModelShape
from megasync.planning.cpu.decoding import least_convex
from megasync.planning.generation import Generation, generation_seconds
from megasync.planning.hardware import hardware, seconds
from megasync.planning.model_costs import ModelCosts
from megasync.planning.replicas import WorkerMemory
from megasync.planning.seconds import step_seconds
from megasync.planning.shapes import Request, Work


def test_products_of_few_rows_take_no_longer_than_those_of_more() -> None:
    assert least_convex([1, 2, 4, 8], [4.0, 9.0, 9.0, 11.0]) == [4.0, 5.0, 7.0, 11.0]
    assert least_convex([1, 2, 4], [8.0, 6.0, 4.0]) == pytest.approx([8.0, 6.0, 4.0])


def test_samples_of_a_group_share_whole_blocks_of_their_prompt() -> None:
    """Of 40 tokens two blocks on a GPU: each sample has 8 of its own, of 8 tokens all. Weights take no time here."""
    config = with_changes(Config(), {"rollout.group_size": 4, "rollout.max_new_tokens": 8, "data.batch_size": 2})
    costs = ModelCosts(1e9, 0.0, 0.0, 1.0, (), 1, 64, 0, {})
    worker, shape, gpu = WorkerMemory({}, 10**9, 0), ModelShape("qwen2", 1, 1, 1, 100, 64, 64), hardware("h200")
    found = []
    for prompt in (32, 40, 8):
        work = Work.of(config, Request(1, gpu, 4.0, prompt))
        found.append(generation_seconds(config, shape, costs, 0, work, worker, gpu).in_turns)
    token = 2e9 / gpu.flops(config.model.dtype)
    assert found[1] - found[0] == pytest.approx(8 * 8 * token, rel=1e-3)
    assert found[0] - found[2] == pytest.approx((2 * 32 - 8 * 8) * token, abs=0.01 * token)


def test_what_takes_longer_binds_a_step_without_turns() -> None:
    """Training or generation, each with what it waits for."""
    config = with_changes(Config(), {"rollout.max_staleness": 1, "rollout.on_update": "continue"})
    parts = {"train": 2.0, "optimizer": 0.5, "log_probs": 0.0, "sync": 0.5, "moving": 0.0}
    found = [step_seconds(config, parts, Generation(9.0, 9.5, full)) for full in (2.0, 5.0)]
    assert [each.step for each in found] == pytest.approx([3.0, 5.5 + seconds("pause")])
    assert [each.binding for each in found] == ["training", "generation"]
    in_turns = step_seconds(with_changes(Config(), {"rollout.max_staleness": 0}), parts, Generation(9.0, 9.5, 2.0))
    assert in_turns.step == in_turns.synchronous == 12.0


@pytest.mark.parametrize(("staleness", "full", "wanted"), [(1, 2.0, 10.0), (2, 2.0, 3.0), (2, 5.0, 10.0)])
def test_replicas_that_each_sync_lets_run_empty_generate_a_batch_alone(staleness: int, full: float, wanted: float) -> None:
    """With one batch in flight always, with several unless replicas, faster than the trainer, are as far ahead as they may be."""
    config = with_changes(Config(), {"rollout.max_staleness": staleness, "rollout.on_update": "drain"})
    parts = {"train": 2.5, "optimizer": 0.0, "log_probs": 0.0, "sync": 0.5, "moving": 0.0}
    assert step_seconds(config, parts, Generation(9.0, 9.5, full)).step == wanted
