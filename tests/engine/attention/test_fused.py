"""Each fused function equals the plain one: eagerly on the CPU, compiled with `-m gpu`."""

from __future__ import annotations

import pytest

from tests.support.ranks import run_ranks

LENGTHS = [5, 9, 1, 12]
TOLERANCES = {"float32": 3e-6, "bfloat16": 8e-3}  # one rounding to bfloat16 is 2**-9 = 2e-3 of a value


def check(worst: dict[str, float]) -> None:
    print(worst)
    assert {name.split()[0] for name in worst} == {"rotary", "swiglu", "log-probs", "entropy", "norm", "clipped"}
    for name, difference in worst.items():
        assert difference <= TOLERANCES["bfloat16" if "bfloat16" in name else "float32"], (name, difference)


def test_fused_equals_plain_eagerly() -> None:
    """On two tensor-parallel ranks, so that the log-probs are put together from parts of the vocabulary."""
    for worst in run_ranks(2, "tests.engine.attention.fused_cases:differences", {"lengths": LENGTHS}):
        check(worst)


@pytest.mark.gpu
def test_fused_equals_plain_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "0")
    check(run_ranks(1, "tests.engine.attention.fused_cases:differences", {"lengths": LENGTHS})[0])
    check(run_ranks(1, "tests.engine.attention.fused_cases:differences", {"lengths": [2048, 700, 1300]})[0])


def test_the_outcome_is_reported() -> None:
    from engine.attention import fused

    assert fused.describe("none") == "engine.fusions=none: off"
    assert fused.describe("all").startswith("engine.fusions=all: compiled rotary")
