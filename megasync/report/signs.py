"""Signs of trouble in a run's metrics: each function returns the evidence as text if the sign is present, else None. Pure.

    entropy(Series(record.steps, record.evaluations))   # "0.005 nats in steps 35 to 39, 1.483 at the start"

None also if a metric is missing or the run is too short. Leaves out remedies (advisories.py).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

RECENT = 10  # last steps that most conditions read
MIN_VALUES = 5  # values of a metric that most conditions need
START_STEPS = 2  # first steps, which compile and allocate, and are left out of speeds

Lines = Sequence[Mapping[str, Any]]


class Series:
    """A run's metrics by name."""

    def __init__(self, steps: Lines, evaluations: Lines = ()) -> None:
        self.steps, self.evaluations = steps, evaluations

    def all(self, key: str) -> list[float]:
        """The metric's values, in the order of steps, without steps where it is not a number."""
        return [float(line[key]) for line in self.steps if is_number(line.get(key))]

    def recent(self, key: str) -> list[float]:
        """The metric's last RECENT values; empty if there are fewer than MIN_VALUES."""
        values = self.all(key)
        return values[-RECENT:] if len(values) >= MIN_VALUES else []

    def steady(self, *keys: str) -> list[tuple[float, ...]]:
        """Values of several metrics by step, without the first START_STEPS steps; empty if fewer than 2 * MIN_VALUES are left."""
        lines = self.steps[START_STEPS:]
        rows = [tuple(float(line[key]) for key in keys) for line in lines if all(is_number(line.get(key)) for key in keys)]
        return rows if len(rows) >= 2 * MIN_VALUES else []

    def where(self, number: int = RECENT) -> str:
        """The last `number` steps as text."""
        last = self.steps[-number:]
        return f"steps {last[0]['step']} to {last[-1]['step']}"

    @property
    def is_asynchronous(self) -> bool:
        return any(value > 0 for value in self.all("staleness/max"))


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def above(key: str, limit: float, words: str) -> Callable[[Series], str | None]:
    """A sign that is present if the mean of the recent values is above `limit`; `words` is the evidence, with the mean as {0}."""
    return lambda run: _evidence(run, key, words, lambda mean: mean > limit)


def below(key: str, limit: float, words: str) -> Callable[[Series], str | None]:
    return lambda run: _evidence(run, key, words, lambda mean: mean < limit)


def _evidence(run: Series, key: str, words: str, is_wrong: Callable[[float], bool]) -> str | None:
    recent = run.recent(key)
    if not recent or not is_wrong(mean := statistics.fmean(recent)):
        return None
    return f"{words.format(mean)}, {run.where(len(recent))}"


# ----------------------------------------------------------------------------------------------------------- learning


def entropy(run: Series) -> str | None:
    values = run.all("entropy/mean")
    if len(values) < 2 * MIN_VALUES:
        return None
    first, last = statistics.fmean(values[:MIN_VALUES]), statistics.fmean(values[-MIN_VALUES:])
    return f"{last:.3f} nats in {run.where(MIN_VALUES)}, {first:.3f} at the start" if last < min(0.1, first / 5) else None


def constant_reward(run: Series) -> str | None:
    recent = run.recent("reward/std")
    if not recent or any(recent):
        return None
    return f"every response of {run.where(len(recent))} got {run.all('reward/mean')[-1]:.3g}"


def rate(run: Series) -> str | None:
    rates = run.all("learning_rate")
    num_zero = next((number for number, rate in enumerate(reversed(rates)) if rate > 0), len(rates))
    return f"0 in {run.where(num_zero)}" if num_zero >= 3 and num_zero > len(rates) / 10 else None


def gradient(run: Series) -> str | None:
    recent = run.recent("grad_norm")
    return f"gradient norm 0 in {run.where(len(recent))}" if recent and not any(recent) else None


def spikes(run: Series) -> str | None:
    norms = run.all("grad_norm")
    if len(norms) < 4 * MIN_VALUES:
        return None
    median = statistics.median(norms)
    high = [norm for norm in norms if norm > 10 * median > 0]
    evidence = f"{len(high)} of {len(norms)} steps above 10 times the median {median:.3g}"
    return f"{evidence}, {max(high):.3g} the most" if len(high) > 2 else None


def skipped(run: Series) -> str | None:
    key = "train/skipped_steps"
    counts = [(line["step"], float(line[key])) for line in run.steps if is_number(line.get(key)) and line[key] > 0]
    return f"{sum(n for _, n in counts):g} optimizer steps, the first in step {counts[0][0]}" if counts else None


def failures(run: Series) -> str | None:
    failures = [value for value in run.all("reward/failures") if value]
    return f"{sum(failures):g} calls in {len(failures)} of {len(run.steps)} steps" if len(failures) > 2 else None


def held_out(run: Series) -> str | None:
    rewards = run.all("reward/mean")
    held_out = [v for line in run.evaluations if is_number(v := line.get("eval/reward", line.get("eval/accuracy")))]
    if len(held_out) < 2 or len(rewards) < 2 * MIN_VALUES:
        return None
    gained = statistics.fmean(rewards[-MIN_VALUES:]) - statistics.fmean(rewards[:MIN_VALUES])
    lost = held_out[0] - held_out[-1]
    return f"held-out {held_out[0]:.3f} to {held_out[-1]:.3f}, sampled {gained:+.3f}" if gained > 0.05 and lost > 0.02 else None


# ----------------------------------------------------------------------------------------------------------- sameness


def gap(run: Series) -> str | None:
    """Reads the canary's gap in asynchronous runs, where tokens of older versions have a gap that is not an error."""
    gaps = run.all("sync/canary_gap" if run.is_asynchronous else "logprob_gap/mean")
    if len(gaps) < 4 * MIN_VALUES:
        return None
    quarter = len(gaps) // 4
    first, last = statistics.fmean(gaps[:quarter]), statistics.fmean(gaps[-quarter:])
    is_growing = last > 2 * first and last > 0.01
    return f"{first:.2g} nats in the first quarter of the steps, {last:.2g} in the last" if is_growing else None


def large_gap(run: Series) -> str | None:
    if run.is_asynchronous:
        return None
    return _evidence(run, "logprob_gap/mean", "{0:.2g} nats", lambda mean: mean > 0.1)


# -------------------------------------------------------------------------------------------------------------- speed


def _share(run: Series, key: str, limit: float) -> str | None:
    rows = run.steady(key, "step/seconds")
    if not rows:
        return None
    share = sum(row[0] for row in rows) / max(sum(row[1] for row in rows), 1e-9)
    return f"{share:.0%} of the time, {run.where(len(rows))}" if share > limit else None


def trainer_waits(run: Series) -> str | None:
    return _share(run, "rollout/wait_seconds", 0.3) if run.is_asynchronous else None


def replicas_paused(run: Series) -> str | None:
    return _share(run, "sync/pause_seconds", 0.2) if run.is_asynchronous else None


def convoy(run: Series) -> str | None:
    """Every other step waits: two batches finish together and are trained one after the other, while the replicas are idle."""
    rows = run.steady("rollout/wait_seconds", "step/seconds")
    if not rows or not run.is_asynchronous:
        return None
    waits = [wait > 0.25 * seconds for wait, seconds in rows]
    turns = sum(before != after for before, after in pairwise(waits))
    if turns < 0.7 * (len(waits) - 1):
        return None
    long, short = (
        statistics.fmean(row[1] for row, wait in zip(rows, waits, strict=True) if wait is kind) for kind in (True, False)
    )
    return f"every other step waits, {long:.2g} s and {short:.2g} s in turn, {run.where(len(rows))}"


def memory(run: Series) -> str | None:
    totals, peaks = run.all("memory/device_total_bytes"), run.all("memory/tensors_peak_bytes")
    if not totals or not peaks or max(peaks) < 0.9 * totals[-1]:
        return None
    return f"tensors of rank 0 took up to {max(peaks) / 2**30:.1f} of {totals[-1] / 2**30:.1f} GiB"
