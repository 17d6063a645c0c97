"""What a run's metrics say, each sign as a function: the evidence where it holds, else None. Pure functions.

    entropy(Series(record.steps, record.evaluations))   # "0.005 nats in steps 35 to 39, 1.483 at the start"

Metrics that a run does not have, and runs that are too short to tell, give None. Leaves out what to try (advisories.py).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

RECENT = 10  # most conditions look at so many last steps
FEWEST = 5  # and at no run with fewer
START_STEPS = 2  # which compile, allocate and fill the replicas, and say nothing of speed

Lines = Sequence[Mapping[str, Any]]


class Series:
    """A run's metrics by name."""

    def __init__(self, steps: Lines, evaluations: Lines = ()) -> None:
        self.steps, self.evaluations = steps, evaluations

    def all(self, key: str) -> list[float]:
        """Where it is a number, in the order of steps."""
        return [float(line[key]) for line in self.steps if is_number(line.get(key))]

    def recent(self, key: str) -> list[float]:
        """Its last values; none where there are fewer than FEWEST of them."""
        values = self.all(key)
        return values[-RECENT:] if len(values) >= FEWEST else []

    def steady(self, *keys: str) -> list[tuple[float, ...]]:
        """Several together, without the first steps; none where too few are left to speak of speed."""
        lines = self.steps[START_STEPS:]
        rows = [tuple(float(line[key]) for key in keys) for line in lines if all(is_number(line.get(key)) for key in keys)]
        return rows if len(rows) >= 2 * FEWEST else []

    def where(self, number: int = RECENT) -> str:
        """The last `number` steps in words."""
        last = self.steps[-number:]
        return f"steps {last[0]['step']} to {last[-1]['step']}"

    @property
    def is_asynchronous(self) -> bool:
        return any(value > 0 for value in self.all("staleness/max"))


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def above(key: str, limit: float, words: str) -> Callable[[Series], str | None]:
    """Fires where the mean of the recent values is above `limit`; `words` has it as {0}."""
    return lambda run: _told(run, key, words, lambda mean: mean > limit)


def below(key: str, limit: float, words: str) -> Callable[[Series], str | None]:
    return lambda run: _told(run, key, words, lambda mean: mean < limit)


def _told(run: Series, key: str, words: str, is_wrong: Callable[[float], bool]) -> str | None:
    recent = run.recent(key)
    if not recent or not is_wrong(mean := statistics.fmean(recent)):
        return None
    return f"{words.format(mean)}, {run.where(len(recent))}"


# ----------------------------------------------------------------------------------------------------------- learning


def entropy(run: Series) -> str | None:
    values = run.all("entropy/mean")
    if len(values) < 2 * FEWEST:
        return None
    first, last = statistics.fmean(values[:FEWEST]), statistics.fmean(values[-FEWEST:])
    return f"{last:.3f} nats in {run.where(FEWEST)}, {first:.3f} at the start" if last < min(0.1, first / 5) else None


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
    if len(norms) < 4 * FEWEST:
        return None
    median = statistics.median(norms)
    high = [norm for norm in norms if norm > 10 * median > 0]
    told = f"{len(high)} of {len(norms)} steps above 10 times the median {median:.3g}"
    return f"{told}, {max(high):.3g} the most" if len(high) > 2 else None


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
    if len(held_out) < 2 or len(rewards) < 2 * FEWEST:
        return None
    gained = statistics.fmean(rewards[-FEWEST:]) - statistics.fmean(rewards[:FEWEST])
    lost = held_out[0] - held_out[-1]
    return f"held-out {held_out[0]:.3f} to {held_out[-1]:.3f}, sampled {gained:+.3f}" if gained > 0.05 and lost > 0.02 else None


# ----------------------------------------------------------------------------------------------------------- sameness


def gap(run: Series) -> str | None:
    """Tokens of an older version have a gap that is no error, so that an asynchronous run is judged by its canary."""
    gaps = run.all("sync/canary_gap" if run.is_asynchronous else "logprob_gap/mean")
    if len(gaps) < 4 * FEWEST:
        return None
    quarter = len(gaps) // 4
    first, last = statistics.fmean(gaps[:quarter]), statistics.fmean(gaps[-quarter:])
    is_growing = last > 2 * first and last > 0.01
    return f"{first:.2g} nats in the first quarter of the steps, {last:.2g} in the last" if is_growing else None


def large_gap(run: Series) -> str | None:
    if run.is_asynchronous:
        return None
    return _told(run, "logprob_gap/mean", "{0:.2g} nats", lambda mean: mean > 0.1)


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
    """Every other step waits: two batches end together and are trained together, while the replicas have nothing to do."""
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
