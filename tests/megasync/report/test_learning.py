"""Whether a run has learned: rose, flat or fell, with its error, on courses made for it and on runs that were recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from megasync.report.learning import Trend, noise_variance, trends, verdict
from megasync.report.signs import Series

ROOT = Path(__file__).resolve().parents[3]
RECORDED = json.loads((ROOT / "tests" / "data" / "runs.json").read_text())
SEEDS = json.loads((ROOT / "tests" / "data" / "seeds_h100.json").read_text())
Curve = npt.NDArray[np.float64]


def noise(number: int, rng: np.random.Generator, r: float = 0.0) -> Curve:
    """Of deviation 1, with the autocorrelation r."""
    drawn = rng.normal(size=number + 50)
    for place in range(1, len(drawn)):
        drawn[place] = r * drawn[place - 1] + np.sqrt(1 - r**2) * drawn[place]
    return drawn[50:]


def steps_of(curve: Curve, **others: float) -> list[dict[str, Any]]:
    return [{"step": step, "reward/mean": float(value), **others} for step, value in enumerate(curve, start=1)]


def trend_of(curve: Curve, **others: float) -> Trend:
    (found,) = trends(Series(steps_of(curve, **others)))
    return found


T = np.linspace(0, 1, 60)
COURSES: dict[str, tuple[Curve, str, bool, bool]] = {  # values; word; has it improved, worsened
    "flat": (0.168 + 0.004 * T, "flat", False, False),
    "rise": (0.17 + 0.13 * T, "rose", True, False),
    "fast rise that levels off": (0.9 - 0.8 * np.exp(-12 * T), "rose", True, False),
    "collapse": (np.where(T < 0.4, 0.5, 0.02), "fell", False, True),
    "rise, then collapse to the start": (np.where(T < 0.6, 0.2 + 0.6 * T, 0.24), "flat", False, True),
    "rise, then collapse half of the way": (np.where(T < 0.6, 0.2 + T, 0.45), "rose", False, True),
}


@pytest.mark.parametrize("name", COURSES)
def test_a_course_gets_its_word_whatever_the_noise(name: str) -> None:
    curve, word, improved, worsened = COURSES[name]
    rng = np.random.default_rng(0)
    found = [trend_of(curve + 0.02 * noise(60, rng), **{"reward/std": 0.37}) for _ in range(100)]
    assert sum((each.word, each.has_improved, each.has_worsened) == (word, improved, worsened) for each in found) >= 95


@pytest.mark.parametrize(("number", "r", "most"), [(20, 0.0, 6), (60, 0.0, 4), (60, 0.3, 6), (100, 0.5, 6)])
def test_noise_alone_is_seldom_more_than_flat(number: int, r: float, most: float) -> None:
    """In so many of 100 runs."""
    rng = np.random.default_rng(1)
    assert sum(trend_of(0.17 + 0.02 * noise(number, rng, r)).word != "flat" for _ in range(200)) <= 2 * most


@pytest.mark.parametrize("r", [0.0, 0.5])
def test_the_error_is_that_of_repeated_runs(r: float) -> None:
    """The mean of what is estimated is the deviation of the change over many runs, to a fifth."""
    rng = np.random.default_rng(2)
    found = [trend_of(0.2 + 0.3 * T + 0.02 * noise(60, rng, r)) for _ in range(200)]
    deviation = float(np.std([each.change for each in found]))
    assert np.mean([each.error for each in found]) == pytest.approx(deviation, rel=0.2)
    assert noise_variance(np.full(20, 0.3)) == noise_variance(np.arange(20.0)) == 0.0


@pytest.mark.parametrize(
    ("values", "word", "improved", "worsened"),
    [([6.7, 2.7, 1.8], "fell", True, False), ([2.0, 1.2, 1.9], "flat", False, True), ([2.0, 2.3, 2.6], "rose", False, True)],
)
def test_held_out_loss_is_better_where_it_falls(values: list[float], word: str, improved: bool, worsened: bool) -> None:
    """Also of runs whose accuracy stays 0, as that of free text does. The second run has trained for too long."""
    lines = [{"step": 4 * step, "eval/loss": loss, "eval/loss_error": 0.05} for step, loss in enumerate(values)]
    (found,) = trends(Series([], lines))
    assert (found.word, found.has_improved, found.has_worsened) == (word, improved, worsened)


def test_a_change_too_small_to_matter_is_flat_however_certain() -> None:
    curve = 0.168 + 0.004 * T
    assert trend_of(curve).word == "rose" and trend_of(curve, **{"reward/std": 0.37}).word == "flat"


def test_held_out_figures_come_first_and_have_the_error_of_their_prompts() -> None:
    evaluations = [{"step": step, "eval/reward": value, "eval/reward_error": 0.03} for step, value in ((0, 0.21), (60, 0.75))]
    run = Series(steps_of(0.05 + 0.6 * T), evaluations)
    assert [trend.key for trend in trends(run)] == ["eval/reward", "reward/mean"]
    assert verdict(run).startswith("held-out reward rose from 0.210 to 0.750, +0.540 ± 0.042; sampled reward rose from 0.096")
    (few,) = trends(Series([{"step": 1}], evaluations))
    assert few.word == "rose", "one step is enough, where there are evaluations"
    sets = [{"step": step, "eval/math/avg@4": 0.3 + step / 1e3, "eval/math/error": 0.02} for step in (0, 5, 10)]
    assert verdict(Series([{"step": 1}], sets)).startswith("math avg@4 is flat, 0.300 to 0.310, +0.010 ± 0.028")


def test_a_held_out_best_that_is_lost_again_is_reported() -> None:
    values = [(0, 0.2), (10, 0.6), (20, 0.21)]
    (found,) = trends(Series([], [{"step": step, "eval/accuracy": v, "eval/accuracy_error": 0.03} for step, v in values]))
    assert (found.best, found.best_step, found.has_worsened) == (0.6, 10, True)
    assert found.words == "held-out accuracy rose to 0.600 in step 10 and fell again, 0.200 to 0.210, +0.010 ± 0.042"


def test_of_a_loss_falling_is_learning() -> None:
    (found,) = trends(Series([{"step": step, "loss/sft": 2.0 - float(t)} for step, t in enumerate(T)]))
    assert (found.word, found.has_improved, found.words[:21]) == ("fell", True, "supervised loss fell ")


NINE: list[dict[str, Any]] = [{"step": step, "reward/mean": 0.3} for step in range(9)]
NULLS: list[dict[str, Any]] = [{"step": step, "reward/mean": None} for step in range(20)]


@pytest.mark.parametrize("lines", [[], NINE, NULLS])
def test_nothing_is_claimed_of_too_few_steps(lines: list[dict[str, Any]]) -> None:
    assert trends(Series(lines)) == []
    assert bool(verdict(Series(lines))) == bool(lines)


def test_recorded_runs() -> None:
    """Those that learned did, and of those with five steps nothing is claimed."""
    runs = {name: [dict(zip(of, row, strict=True)) for row in zip(*of.values(), strict=True)] for name, of in RECORDED.items()}
    words = {name: [trend.word for trend in trends(Series(lines))] for name, lines in runs.items()}
    learned = {"smollm2_h200", "quickstart_cpu", "quickstart_cpu_one_step_off"}
    assert words == {name: ["rose"] if name in learned else [] for name in runs}
    for run in SEEDS.values():
        (found,) = trends(Series(run["metrics"], run["evaluations"]))
        assert found.word == "rose" and found.error < 0.1 * found.change
