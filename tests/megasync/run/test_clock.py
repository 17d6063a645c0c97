"""The phases of a step add up to its wall time, whatever is nested in what."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megasync.run.step_log import PHASES, StepTimer

SPANS = st.lists(st.tuples(st.sampled_from(PHASES), st.sampled_from(PHASES), st.integers(0, 50), st.integers(0, 50)), max_size=6)


@given(st.lists(SPANS, max_size=5), st.integers(0, 9), st.integers(0, 9))
def test_start_steps_and_end_are_the_whole(steps: list[list[tuple[str, str, int, int]]], before: int, after: int) -> None:
    now = 0

    def pass_by(seconds: int) -> None:
        nonlocal now
        now += seconds

    timer = StepTimer(0, lambda: now)
    with timer.phase("evaluation"):
        pass_by(before)
    timer.start()
    for spans in steps:
        begin, expected = now, dict.fromkeys(PHASES, 0)
        for outer, inner, own, nested in spans:
            with timer.phase(outer.replace("_", "-")):
                pass_by(own)
                with timer.phase(inner):
                    pass_by(nested)
            expected[outer] += own + nested
            pass_by(1)
        found = timer.flush(generates=True)
        assert found.pop("step/seconds") == now - begin
        assert found.pop("step/other_seconds") == len(spans)
        assert found == {f"step/{name}_seconds": seconds for name, seconds in expected.items()}
    pass_by(after)
    summary = timer.summary()
    assert (summary["seconds_start"], summary["seconds_end"], summary["seconds_total"]) == (before, after, now)
    assert math.isclose(sum(summary.values()), 2 * now)


def test_a_phase_that_fails_counts_and_is_left() -> None:
    now = iter(range(100))
    timer = StepTimer(0, lambda: next(now))
    timer.start()
    with pytest.raises(KeyError), timer.phase("train"):
        raise KeyError
    with timer.phase("sync"):
        pass
    found = timer.flush(generates=False)
    assert found["step/train_seconds"] == 1 and "step/sync_seconds" not in found
