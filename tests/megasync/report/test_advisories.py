"""Advisories: each fires on a series made for it, none on healthy runs, whose metrics are in tests/data/runs.json."""

from __future__ import annotations

import functools
import json
import math
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megasync.config.load import load_config
from megasync.report.advisories import CONDITIONS, Condition, Unless, advisories, console_lines
from megasync.report.registry import METRICS
from tests.support.config_files import write

RUNS = json.loads((Path(__file__).resolve().parents[2] / "data" / "runs.json").read_text())
SHORT = 4  # steps, too few for any advisory
AT_ONCE = ("skipped_steps", "memory_near_limit")  # but these
Metrics = dict[str, Callable[[int], float | None]]


def lines_of(name: str) -> list[dict[str, Any]]:
    """A run that was measured: two on H200s, one of a real model there, the quickstart on two CPU cores."""
    columns = RUNS[name]
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def made(metrics: Metrics, steps: int = 40) -> list[dict[str, Any]]:
    """The quickstart's metrics with these in their place."""
    lines = lines_of("quickstart_cpu")[:steps]
    return [{**line, **{key: value(line["step"]) for key, value in metrics.items()}} for line in lines]


def always(value: float) -> Callable[[int], float]:
    return lambda _: value


LATE: Metrics = {"staleness/max": always(1)}  # an asynchronous run
FLAT: Metrics = {"reward/mean": lambda step: 0.17 + 0.01 * (step * 7 % 5 - 2), "entropy/mean": always(1.4)}
COLLAPSE: Metrics = {  # as with a learning rate that is too high: then all responses of most groups are equally wrong
    "reward/mean": lambda step: (0.5 if step < 15 else 0.02) + 0.01 * (step * 7 % 5 - 2),
    "groups/tied_fraction": lambda step: 0.1 if step < 15 else 0.95,
}
CASES: dict[str, tuple[Metrics, str]] = {
    "reward_falls": (COLLAPSE, "sampled reward fell from 0.500 to 0.02"),
    "flat_and_still": (FLAT, "sampled reward is flat, 0.170 to 0.172, +0.003 ± 0.00"),
    "flat_and_moving": ({**FLAT, "entropy/mean": lambda step: 2.0 - step / 30}, "entropy 1.933 to 0.767 nats"),
    "entropy_collapse": ({"entropy/mean": lambda step: 2.0 * 0.85**step}, "0.005 nats in steps 35 to 39, 1.483 at the start"),
    "reward_constant": ({"reward/std": always(0), "reward/mean": always(0), "grad_norm": always(0)}, "steps 30 to 39 got 0"),
    "tied_groups": ({"groups/tied_fraction": always(0.9)}, "90% of the groups, steps 30 to 39"),
    "learning_rate_zero": ({"learning_rate": lambda step: max(0.0, 1e-4 * (1 - step / 34))}, "0 in steps 34 to 39"),
    "no_gradient": ({"grad_norm": lambda step: float(step < 5)}, "gradient norm 0 in steps 30 to 39"),
    "gradient_spikes": ({"grad_norm": lambda step: 50.0 if step % 10 == 9 else 1.0}, "4 of 40 steps above 10 times"),
    "skipped_steps": ({"train/skipped_steps": lambda step: float(step == 7)}, "1 optimizer steps, the first in step 7"),
    "reward_failures": ({"reward/failures": lambda step: 2.0 * (step % 4 == 0)}, "20 calls in 10 of 40 steps"),
    "truncation": ({"response/truncated_fraction": always(0.5)}, "50% of the responses, steps 30 to 39"),
    "clipping": ({"ratio/clipped_fraction": always(0.3)}, "30% of the tokens"),
    "ess_low": ({"importance/ess": always(0.2)}, "effective size 20%"),
    "gap_growing": ({"logprob_gap/mean": lambda step: 0.004 * 1.06**step}, "nats in the first quarter of the steps"),
    "gap_large": ({"logprob_gap/mean": always(0.4)}, "0.4 nats, steps 30 to 39"),
    "merge_error": ({"lora/merge_error": always(0.7)}, "70% is lost"),
    "convoy": (
        {**LATE, "rollout/wait_seconds": lambda step: 2.5 * (step % 2), "step/seconds": lambda step: 1.0 + 2.5 * (step % 2)},
        "every other step waits, 3.5 s and 1 s in turn, steps 2 to 39",
    ),
    "trainer_waits": ({**LATE, "rollout/wait_seconds": always(4), "step/seconds": always(8)}, "50% of the time, steps 2 to 39"),
    "replicas_paused": ({**LATE, "sync/pause_seconds": always(3), "step/seconds": always(10)}, "30% of the time"),
    "padding": ({"train/padding_fraction": always(0.4)}, "40% of the tokens"),
    "memory_near_limit": (
        {"memory/device_total_bytes": always(80 * 2**30), "memory/tensors_peak_bytes": always(77 * 2**30)},
        "77.0 of 80.0 GiB",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_condition_is_reported_where_it_holds_and_no_other(name: str) -> None:
    metrics, evidence = CASES[name]
    (found,) = advisories(made(metrics))
    assert found.name == name and evidence in found.evidence, found
    if name not in AT_ONCE:
        assert advisories(made(metrics, SHORT)) == [], "too short a run to say"


def test_held_out_reward_that_falls_while_the_sampled_rises_is_reported() -> None:
    steps = made({"reward/mean": lambda step: 0.2 + step / 80})
    for key in ("eval/reward", "eval/accuracy"):
        (found,) = advisories(steps, [{"step": 0, key: 0.4}, {"step": 40, key: 0.3}])
        assert found.name == "held_out_falls" and found.evidence == "held-out 0.400 to 0.300, sampled +0.438"
        assert advisories(steps, [{"step": 0, key: 0.4}, {"step": 40, key: 0.5}]) == []


def test_of_a_flat_or_fallen_reward_the_learning_rate_is_named_first() -> None:
    for name, begin in (
        ("reward_falls", "a lower learning rate"),
        ("flat_and_still", "a higher learning rate"),
        ("flat_and_moving", "a lower learning rate"),
    ):
        found = advisories(made(CASES[name][0]))
        assert found[0].remedy.startswith(begin)


def test_a_fall_of_sampled_and_held_out_reward_is_reported_once() -> None:
    evaluations = [{"step": step, "eval/reward": reward, "eval/reward_error": 0.02} for step, reward in ((0, 0.5), (40, 0.02))]
    (found,) = advisories(made(COLLAPSE), evaluations)
    assert found.name == "reward_falls"
    assert found.evidence.startswith("held-out reward fell from 0.500 to 0.020, -0.480 ± 0.028; sampled reward fell from 0.500")


def test_a_flat_reward_is_no_sign_where_groups_are_filtered_or_nothing_is_left_to_gain() -> None:
    assert advisories(made({**FLAT, "rollout/filtered_groups": always(3)})) == []
    assert advisories(made({**FLAT, "reward/mean": always(0.99), "reward/std": always(0.05)})) == []


def test_a_flat_accuracy_is_no_sign_where_the_supervised_loss_falls() -> None:
    evaluations = [{"step": step, "eval/accuracy": 0.0, "eval/accuracy_error": 0.01} for step in (0, 40)]
    for lost, names in ((0.0, ["flat_and_still"]), (0.025, [])):
        steps = [{"step": step, "loss/sft": 3.5 - lost * step + 0.01 * (step % 3)} for step in range(1, 41)]
        assert [each.name for each in advisories(steps, evaluations)] == names


def test_every_condition_has_a_case() -> None:
    assert {each.name for each in CONDITIONS} == {*CASES, "held_out_falls"}
    keys = {row.key for row in METRICS}
    assert {key for metrics, _ in CASES.values() for key in metrics} <= keys


@pytest.mark.parametrize("name", RUNS)
def test_healthy_runs_get_no_advice(name: str) -> None:
    """But for the convoy that one of them really had: it was measured to find out why its steps took 1 and 3 s in turn."""
    found = advisories(lines_of(name))
    assert [each.name for each in found] == (["convoy"] if name == "smollm2_h200" else []), found


def test_a_gap_of_stale_tokens_is_no_error_but_the_canarys_is() -> None:
    large: Metrics = {**LATE, "logprob_gap/mean": lambda step: 0.01 * 1.1**step}
    assert advisories(made({**large, "sync/canary_gap": always(0.06)})) == []
    (found,) = advisories(made({**large, "sync/canary_gap": lambda step: 0.01 * 1.1**step}))
    assert found.name == "gap_growing"


def test_what_explains_another_is_reported_alone() -> None:
    tied: Metrics = {"reward/std": always(0), "groups/tied_fraction": always(1), "grad_norm": always(0)}
    assert [each.name for each in advisories(made(tied))] == ["reward_constant"]


def test_the_terminal_gets_two_lines_each() -> None:
    lines = console_lines(advisories(made({"importance/ess": always(0.2), "response/truncated_fraction": always(0.5)})))
    assert len(lines) == 4 and lines[0] == "advisory: Many responses are cut off: 50% of the responses, steps 30 to 39"
    assert lines[1].startswith("  try: a larger rollout.max_new_tokens")
    assert all("\n" not in line for line in lines)


VALUES = st.one_of(st.none(), st.integers(-3, 3), st.floats(-10, 10), st.just(math.nan), st.booleans(), st.just("text"))
KEYS = sorted({row.key for row in METRICS if row.key == row.key.lower()})


@settings(deadline=None, max_examples=40, derandomize=True, database=None)
@given(st.lists(st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=12), max_size=25), st.data())
def test_any_metrics_are_taken(values: list[dict[str, Any]], data: st.DataObject) -> None:
    """Those that are missing, null, texts or not finite fire nothing by themselves and stop nothing."""
    lines = [{"step": step, **line} for step, line in enumerate(values)]
    for each in advisories(lines, data.draw(st.sampled_from([lines, []]))):
        assert each.evidence and each.remedy


REMEDIES: dict[str, tuple[dict[str, Any], str]] = {
    "reward_falls": (
        {"engine.optimizer.clip_grad_norm": 1.0, "algorithm.kl_coefficient": 0.01, "rollout.max_staleness": 0},
        "a lower learning rate, a third to a tenth, or more warmup_steps",
    ),
    "entropy_collapse": (
        {"algorithm.clip_low": 0.2, "algorithm.clip_high": 0.28, "algorithm.kl_coefficient": 0.01},
        "a lower learning rate, or a higher temperature",
    ),
    "tied_groups": (
        {"algorithm.filter_groups": True},
        "a higher rollout.temperature, a larger group_size, or prompts that are less hard or less easy",
    ),
    "gradient_spikes": ({"engine.optimizer.clip_grad_norm": 0.5}, "a lower learning rate, or more warmup_steps"),
    "skipped_steps": ({"model.dtype": "float32"}, "a lower learning rate"),
    "truncation": ({"algorithm.truncated": "penalise"}, "a larger rollout.max_new_tokens"),
    "clipping": ({"algorithm.num_minibatches": 1, "algorithm.num_passes": 1}, "a lower learning rate"),
    "ess_low": ({"rollout.max_staleness": 0, "algorithm.importance_correction": "mask"}, "a lower learning rate"),
    "gap_growing": (
        {"algorithm.importance_correction": "tis", "model.dtype": "float32"},
        "sync.verify=digest, to see whether the weights are the cause",
    ),
    "gap_large": (
        {"rollout.top_k": 0, "rollout.top_p": 1.0, "rollout.min_p": 0.0, "algorithm.router_replay": "rollout"}
        | {"rollout.dtype": "model"},
        "algorithm.importance_correction=tis",
    ),
    "merge_error": ({"engine.lora.sync": "adapter"}, "a higher learning rate, or a higher engine.lora.alpha"),
    "trainer_waits": (
        {"rollout.enforce_eager": False},
        "more rollout.replicas, or a larger rollout.max_staleness or rollout.max_num_seqs",
    ),
    "replicas_paused": ({"rollout.on_update": "continue"}, "a larger data.batch_size, so that syncs are a smaller share"),
    "padding": ({"engine.parallel.context": 1}, "longer samples, or micro-batches that divide among the ranks"),
    "memory_near_limit": (
        {"engine.recompute": "selective"},
        "a smaller engine.tokens_per_microbatch, more shards, or engine.recompute=full",
    ),
}


@pytest.mark.parametrize("name", REMEDIES)
def test_what_a_run_has_already_is_not_among_what_to_try(name: str) -> None:
    config, left = REMEDIES[name]
    lines = made(CASES[name][0])
    (found,) = advisories(lines, (), config.get)
    assert found.remedy == left
    (condition,) = [each for each in CONDITIONS if each.name == name]
    assert advisories(lines)[0].remedy == condition.remedy != left, "all of it where the config is not known"


def test_every_condition_whose_remedy_can_be_there_already_has_a_case() -> None:
    able = {each.name for each in CONDITIONS if any(isinstance(one, Unless) for one in each.tries)}
    assert able == {*REMEDIES, "held_out_falls"}


def test_remedies_look_at_keys_that_there_are(tmp_path: Path) -> None:
    """And a run with all defaults of the config gets no remedy that it has already."""
    config = load_config(write(tmp_path / "run.yaml", "{}")).model_dump()
    asked: list[str] = []

    def setting(key: str) -> object:
        asked.append(key)
        return functools.reduce(operator.getitem, key.split("."), config)

    remedies = {each.name: each.remedy_for(setting) for each in CONDITIONS}
    assert asked and all(f"{key}={str(setting(key)).lower()}" not in remedy for remedy in remedies.values() for key in set(asked))


def test_where_all_of_it_is_set_something_else_is_advised() -> None:
    condition = Condition("x", "X", "any", (Unless("a.b=1", lambda _: True),), lambda _: "seen")
    assert condition.remedy_for(lambda _: None) == "the run already has a.b=1"
