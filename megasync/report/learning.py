"""Whether a run has learned: each figure rose, was flat or fell, with the change and its standard error. Pure functions.

A held-out figure compares its first evaluation with its last; the standard error is over the prompts of both. A sampled one
compares the means of the first and the last steps, a fifth of all and at most 10; the standard error is that of the residuals
about the run's course, two lines, widened by their autocorrelation. Leaves out what to try (advisories.py).

    for trend in trends(Series(record.steps, record.evaluations)):
        trend.word, trend.change, trend.error
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megasync.report.registry import label
from megasync.report.signs import MIN_VALUES, Series, is_number

MIN_STEPS = 10  # of a sampled figure; with fewer the noise cannot be estimated
MIN_STEPS_FOR_ADVICE = 20
MAX_WINDOW, MIN_WINDOW = 10, 3  # steps whose means are compared
MIN_LINE_POINTS, MAX_BREAKS = 4, 100  # of noise_variance
SURE_SAMPLED, SURE_HELD_OUT, SURE_PEAK = 2.5, 2.0, 4.0  # standard errors; higher for a peak, the best of many values
MIN_EFFECT = 0.05  # in standard deviations of the rewards: a smaller change is flat, even if it is significant
SAMPLED = ("reward/mean", "loss/sft")
LOSSES = ("loss/sft", "eval/loss")
HELD_OUT = ("eval/reward", "eval/accuracy", "eval/loss")


@dataclass(frozen=True)
class Trend:
    """The change of one metric from `first` to `last`. `error`: the standard error of the change. `best`, reached in `best_step`:
    a value significantly better than both ends, else None.
    """

    key: str
    first: float
    last: float
    error: float
    word: str  # rose, flat or fell
    best: float | None = None
    best_step: int = 0

    @property
    def change(self) -> float:
        return self.last - self.first

    @property
    def has_worsened(self) -> bool:
        """Whether the metric is worse than at the start, or than its best."""
        return self.best is not None or self.word == ("rose" if self.key in LOSSES else "fell")

    @property
    def has_improved(self) -> bool:
        return self.best is None and self.word == ("fell" if self.key in LOSSES else "rose")

    @property
    def words(self) -> str:
        """Such as `held-out reward rose from 0.211 to 0.744, +0.533 ± 0.037`."""
        name = label(self.key)
        name = name if "@" in name else name[:1].lower() + name[1:]
        figures = f"{self.first:.3f} to {self.last:.3f}, {self.change:+.3f} ± {self.error:.3f}"
        if self.best is not None:
            there, back = ("fell", "rose") if self.key in LOSSES else ("rose", "fell")
            return f"{name} {there} to {self.best:.3f} in step {self.best_step} and {back} again, {figures}"
        return f"{name} is flat, {figures}" if self.word == "flat" else f"{name} {self.word} from {figures}"


def trends(run: Series) -> list[Trend]:
    """Trends of the figures with enough values: held-out figures first, then sampled ones."""
    keys = dict.fromkeys(key for line in run.evaluations for key in line if key in HELD_OUT or "/avg@" in key)
    found = [_held_out(run, key) for key in keys] + [_sampled(run, key) for key in SAMPLED]
    return [trend for trend in found if trend is not None]


def verdict(run: Series) -> str:
    """One line for the end of a run and the head of its report; empty if no step was done."""
    if not run.steps:
        return ""
    if not (found := trends(run)):
        return f"too early to tell whether it learns: {MIN_STEPS} steps or two evaluations of data.eval are needed"
    return "; ".join(trend.words for trend in found) + " (± one standard error)"


def num_compared(num_steps: int) -> int:
    """Number of first steps that are compared with as many last steps."""
    return min(MAX_WINDOW, max(MIN_WINDOW, num_steps // 5), -(-num_steps // 2))


def _held_out(run: Series, key: str) -> Trend | None:
    of = f"{key.rpartition('/')[0]}/error" if "@" in key else f"{key}_error"
    lines = {line["step"]: line for line in run.evaluations if is_number(line.get(key)) and is_number(line.get(of))}
    steps = sorted(lines)
    if len(steps) < 2:
        return None
    first, last = lines[steps[0]], lines[steps[-1]]
    sign = -1.0 if key in LOSSES else 1.0
    best = max((lines[step] for step in steps), key=lambda line: sign * float(line[key]))
    error, since_best = (math.hypot(one[of], last[of]) for one in (first, best))
    from_last, from_first = (sign * (best[key] - one[key]) for one in (last, first))
    has_peaked = from_last > SURE_PEAK * since_best and from_first > SURE_HELD_OUT * since_best
    peak = (best[key], best["step"]) if has_peaked else (None, 0)
    return Trend(key, first[key], last[key], error, _word(last[key] - first[key], SURE_HELD_OUT * error), *peak)


def _sampled(run: Series, key: str) -> Trend | None:
    rows = [(line["step"], float(line[key])) for line in run.steps if is_number(line.get(key))]
    if len(rows) < MIN_STEPS:
        return None
    values = np.array([value for _, value in rows])
    window = num_compared(len(values))
    error = math.sqrt(2 * noise_variance(values) / window)
    means = np.convolve(values, np.full(window, 1 / window), "valid")
    first, last = float(means[0]), float(means[-1])
    min_effect = MIN_EFFECT * statistics.fmean(run.all("reward/std") or [0.0]) if key == "reward/mean" else 0.0
    best, sure = int(np.argmin(means) if key in LOSSES else np.argmax(means)), max(SURE_SAMPLED * error, min_effect)
    from_first, from_last = abs(float(means[best]) - first), abs(float(means[best]) - last)
    has_peaked = from_first > sure and from_last > max(SURE_PEAK * error, min_effect)
    peak = (float(means[best]), rows[best + window // 2][0]) if has_peaked else (None, 0)
    return Trend(key, first, last, error, _word(last - first, sure), *peak)


def _word(change: float, threshold: float) -> str:
    return "flat" if abs(change) <= threshold else "rose" if change > 0 else "fell"


def noise_variance(values: npt.NDArray[np.float64]) -> float:
    """Variance of the residuals about the run's course, times (1 + r) / (1 - r), by which autocorrelation r increases the
    variance of a mean.

    The course is two lines with a break at the best of up to MAX_BREAKS places, so that neither a fast rise nor a collapse counts
    as noise. r is the lag-1 autocorrelation of the residuals, limited to 0 to 0.9, corrected for the bias of short series
    (Kendall 1954).
    """
    number = len(values)
    breaks = np.unique(np.linspace(MIN_LINE_POINTS, number - MIN_LINE_POINTS, MAX_BREAKS).astype(int)).tolist()
    courses = [np.concatenate([_about_line(values[:place]), _about_line(values[place:])]) for place in breaks]
    residuals = min(courses, key=lambda each: float(each @ each))
    squares = float(residuals @ residuals)
    if squares <= 1e-12 * float(values @ values):
        return 0.0
    found = float(residuals[1:] @ residuals[:-1]) / squares
    r = min(0.9, max(0.0, found + (1 + 3 * found + 4) / number))
    return squares / (number - 5) * (1 + r) / (1 - r)


def _about_line(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Residuals of a least-squares line through the values."""
    places, about = np.arange(len(values)) - (len(values) - 1) / 2, values - values.mean()
    residuals: npt.NDArray[np.float64] = about - (places @ about) / (places @ places) * places
    return residuals


# ------------------------------------------------------------------------------------------------- signs for advisories


def falls(run: Series) -> str | None:
    """Sampled or held-out reward has fallen. None if one rises while the other falls, which `held_out` of signs.py reports."""
    found = _rewards(run)
    if not any(trend.has_worsened for trend in found) or any(trend.has_improved for trend in found):
        return None
    return "; ".join([trend.words for trend in found] + _movement(run)[1])


def flat_and_still(run: Series) -> str | None:
    moves, seen = _movement(run)
    return _flat(run, seen) if not moves else None


def flat_and_moving(run: Series) -> str | None:
    moves, seen = _movement(run)
    return _flat(run, seen) if moves else None


def _rewards(run: Series) -> list[Trend]:
    return [trend for trend in trends(run) if trend.key not in LOSSES]


def _flat(run: Series, seen: Sequence[str]) -> str | None:
    """None also if groups are filtered, since the mean reward is then biased, if all responses get nearly the same reward, or if
    a loss of supervised training has fallen.
    """
    found, rewards, spread = _rewards(run), run.recent("reward/mean"), run.recent("reward/std")
    is_filtered = bool(run.all("rollout/filtered_groups")) and all(trend.key == "reward/mean" for trend in found)
    is_alike = bool(rewards and spread) and statistics.fmean(spread) < 0.1 * abs(statistics.fmean(rewards))
    is_flat = bool(found) and all(trend.word == "flat" and trend.best is None for trend in found)
    is_fitted = any(trend.has_improved for trend in trends(run) if trend.key in LOSSES)
    if not is_flat or is_filtered or is_alike or is_fitted or len(run.steps) < MIN_STEPS_FOR_ADVICE:
        return None
    return "; ".join([trend.words for trend in found] + list(seen))


def _movement(run: Series) -> tuple[bool, list[str]]:
    """Whether entropy, clipping, KL or gradients show that the policy has changed, and their values as text."""
    moves, seen = False, list[str]()
    entropies, clipped = run.all("entropy/mean"), run.recent("ratio/clipped_fraction")
    kl, norms, rates = run.recent("loss/kl"), run.all("grad_norm"), run.all("learning_rate")
    if len(entropies) >= 2 * MIN_VALUES:
        first, last = statistics.fmean(entropies[:MIN_VALUES]), statistics.fmean(entropies[-MIN_VALUES:])
        moves |= abs(last - first) > 0.2 * first
        seen.append(f"entropy {first:.3f} to {last:.3f} nats")
    if clipped:
        moves |= statistics.fmean(clipped) > 0.01
        seen.append(f"{statistics.fmean(clipped):.1%} of the tokens clipped")
    if any(kl):
        moves |= statistics.fmean(kl) > 0.01
        seen.append(f"KL {statistics.fmean(kl):.2g} nats")
    if changed := run.recent("sync/changed_fraction"):
        seen.append(f"{statistics.fmean(changed):.1%} of the weights change in a step")
    seen += [f"gradient norm {statistics.median(norms):.2g}"] if norms else []
    seen += [f"learning rate {max(rates):.2g}"] if rates else []
    return moves, seen
