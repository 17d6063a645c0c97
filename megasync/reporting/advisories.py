"""Advisories: what a run's metrics say is going wrong, with the threshold, the evidence and what to try. Pure functions.

Each condition looks at the lines of metrics.jsonl and evaluations.jsonl alone. Metrics that a run does not have, and runs that
are too short to tell, fire nothing. What to try says which of it the run has already. Leaves out the report (sections.py).

    for advisory in advisories(record.steps, record.evaluations, record.get):
        advisory.title, advisory.evidence, advisory.remedy
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

RECENT = 10  # most conditions look at so many last steps
FEWEST = 5  # and at no run with fewer
SETTING = re.compile(r"\b([a-z]+(?:\.[a-z_]+)+)=([a-z0-9]+(?:\.\d+)?)")  # in a remedy: a key of the config and its value
START_STEPS = 2  # which compile, allocate and fill the replicas, and say nothing of speed

Lines = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Advisory:
    """A condition that holds; `evidence` names steps and numbers."""

    name: str
    title: str
    evidence: str
    remedy: str


@dataclass(frozen=True)
class Condition:
    """`check`: the evidence where it holds, else None. `covers`: those that it explains, which are then not told."""

    name: str
    title: str
    threshold: str
    remedy: str
    check: Callable[[Series], str | None]
    covers: tuple[str, ...] = ()


class Series:
    """A run's metrics by name."""

    def __init__(self, steps: Lines, evaluations: Lines = ()) -> None:
        self.steps, self.evaluations = steps, evaluations

    def all(self, key: str) -> list[float]:
        """Where it is a number, in the order of steps."""
        return [float(line[key]) for line in self.steps if _is_number(line.get(key))]

    def recent(self, key: str) -> list[float]:
        """Its last values; none where there are fewer than FEWEST of them."""
        values = self.all(key)
        return values[-RECENT:] if len(values) >= FEWEST else []

    def steady(self, *keys: str) -> list[tuple[float, ...]]:
        """Several together, without the first steps; none where too few are left to speak of speed."""
        lines = self.steps[START_STEPS:]
        rows = [tuple(float(line[key]) for key in keys) for line in lines if all(_is_number(line.get(key)) for key in keys)]
        return rows if len(rows) >= 2 * FEWEST else []

    def where(self, number: int = RECENT) -> str:
        """The last `number` steps in words."""
        last = self.steps[-number:]
        return f"steps {last[0]['step']} to {last[-1]['step']}"

    @property
    def is_asynchronous(self) -> bool:
        return any(value > 0 for value in self.all("staleness/max"))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _above(key: str, limit: float, words: str) -> Callable[[Series], str | None]:
    """Fires where the mean of the recent values is above `limit`; `words` has it as {0}."""
    return lambda run: _told(run, key, words, lambda mean: mean > limit)


def _below(key: str, limit: float, words: str) -> Callable[[Series], str | None]:
    return lambda run: _told(run, key, words, lambda mean: mean < limit)


def _told(run: Series, key: str, words: str, is_wrong: Callable[[float], bool]) -> str | None:
    recent = run.recent(key)
    if not recent or not is_wrong(mean := statistics.fmean(recent)):
        return None
    return f"{words.format(mean)}, {run.where(len(recent))}"


# ----------------------------------------------------------------------------------------------------------- learning


def _entropy(run: Series) -> str | None:
    values = run.all("entropy/mean")
    if len(values) < 2 * FEWEST:
        return None
    first, last = statistics.fmean(values[:FEWEST]), statistics.fmean(values[-FEWEST:])
    return f"{last:.3f} nats in {run.where(FEWEST)}, {first:.3f} at the start" if last < min(0.1, first / 5) else None


def _constant_reward(run: Series) -> str | None:
    recent = run.recent("reward/std")
    if not recent or any(recent):
        return None
    return f"every response of {run.where(len(recent))} got {run.all('reward/mean')[-1]:.3g}"


def _rate(run: Series) -> str | None:
    rates = run.all("learning_rate")
    num_zero = next((number for number, rate in enumerate(reversed(rates)) if rate > 0), len(rates))
    return f"0 in {run.where(num_zero)}" if num_zero >= 3 and num_zero > len(rates) / 10 else None


def _gradient(run: Series) -> str | None:
    recent = run.recent("grad_norm")
    return f"gradient norm 0 in {run.where(len(recent))}" if recent and not any(recent) else None


def _spikes(run: Series) -> str | None:
    norms = run.all("grad_norm")
    if len(norms) < 4 * FEWEST:
        return None
    median = statistics.median(norms)
    high = [norm for norm in norms if norm > 10 * median > 0]
    told = f"{len(high)} of {len(norms)} steps above 10 times the median {median:.3g}"
    return f"{told}, {max(high):.3g} the most" if len(high) > 2 else None


def _skipped(run: Series) -> str | None:
    key = "train/skipped_steps"
    counts = [(line["step"], float(line[key])) for line in run.steps if _is_number(line.get(key)) and line[key] > 0]
    return f"{sum(n for _, n in counts):g} optimizer steps, the first in step {counts[0][0]}" if counts else None


def _failures(run: Series) -> str | None:
    failures = [value for value in run.all("reward/failures") if value]
    return f"{sum(failures):g} calls in {len(failures)} of {len(run.steps)} steps" if len(failures) > 2 else None


def _held_out(run: Series) -> str | None:
    rewards = run.all("reward/mean")
    held_out = [v for line in run.evaluations if _is_number(v := line.get("eval/reward", line.get("eval/accuracy")))]
    if len(held_out) < 2 or len(rewards) < 2 * FEWEST:
        return None
    gained = statistics.fmean(rewards[-FEWEST:]) - statistics.fmean(rewards[:FEWEST])
    lost = held_out[0] - held_out[-1]
    return f"held-out {held_out[0]:.3f} to {held_out[-1]:.3f}, sampled {gained:+.3f}" if gained > 0.05 and lost > 0.02 else None


# ----------------------------------------------------------------------------------------------------------- sameness


def _gap(run: Series) -> str | None:
    """Tokens of an older version have a gap that is no error, so that an asynchronous run is judged by its canary."""
    gaps = run.all("sync/canary_gap" if run.is_asynchronous else "logprob_gap/mean")
    if len(gaps) < 4 * FEWEST:
        return None
    quarter = len(gaps) // 4
    first, last = statistics.fmean(gaps[:quarter]), statistics.fmean(gaps[-quarter:])
    is_growing = last > 2 * first and last > 0.01
    return f"{first:.2g} nats in the first quarter of the steps, {last:.2g} in the last" if is_growing else None


def _large_gap(run: Series) -> str | None:
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


def _trainer_waits(run: Series) -> str | None:
    return _share(run, "rollout/wait_seconds", 0.3) if run.is_asynchronous else None


def _replicas_paused(run: Series) -> str | None:
    return _share(run, "sync/pause_seconds", 0.2) if run.is_asynchronous else None


def _convoy(run: Series) -> str | None:
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


def _memory(run: Series) -> str | None:
    totals, peaks = run.all("memory/device_total_bytes"), run.all("memory/tensors_peak_bytes")
    if not totals or not peaks or max(peaks) < 0.9 * totals[-1]:
        return None
    return f"tensors of rank 0 took up to {max(peaks) / 2**30:.1f} of {totals[-1] / 2**30:.1f} GiB"


TIED_REMEDY = "algorithm.filter_groups=true, a higher rollout.temperature, a larger group_size, or prompts less hard or easy"
CONDITIONS = (
    Condition("entropy_collapse", "The policy's entropy has collapsed", "below 0.1 nats and a fifth of the start's",
              "algorithm.clip_high above clip_low (0.28 and 0.2), a lower learning rate, a higher temperature, or a KL term",
              _entropy),
    Condition("reward_constant", "All responses get the same reward", "deviation 0 in the last 10 steps",
              "look at the samples: the reward may not read the answer as the model writes it, or the task may be too hard",
              _constant_reward, covers=("tied_groups", "no_gradient")),
    Condition("tied_groups", "Most groups teach nothing, their rewards are all equal", "mean above 80 % over the last 10 steps",
              TIED_REMEDY, _above("groups/tied_fraction", 0.8, "{0:.0%} of the groups"), covers=("no_gradient",)),
    Condition("learning_rate_zero", "The learning rate is 0", "0 for the last 3 steps, a tenth of all",
              "engine.optimizer.decay_steps, min_learning_rate and warmup_steps against run.steps", _rate),
    Condition("no_gradient", "Nothing is learnt, the gradient is 0", "norm 0 in the last 10 steps",
              "look at rewards and advantages: with equal ones, or all responses masked, there is nothing to learn", _gradient),
    Condition("gradient_spikes", "The gradient norm has spikes", "3 steps above 10 times the median",
              "engine.optimizer.clip_grad_norm=1.0, a lower learning rate, more warmup_steps", _spikes),
    Condition("skipped_steps", "Optimizer steps were left out, loss or gradient was not finite", "any",
              "a lower learning rate; model.dtype=float32 for one run tells whether it is precision", _skipped),
    Condition("reward_failures", "Calls of the reward fail and count as 0", "in 3 steps",
              "the run's output names function, prompt and error; rollout.reward_timeout_seconds where it is late", _failures),
    Condition("held_out_falls", "Sampled reward rises while held-out reward falls", "0.05 up and 0.02 down",
              "compare samples of both: fewer epochs, a KL term (algorithm.kl_coefficient), or a reward that is harder to please",
              _held_out),
    Condition("truncation", "Many responses are cut off", "mean above 30 % over the last 10 steps",
              "a larger rollout.max_new_tokens, or algorithm.truncated=mask or penalise",
              _above("response/truncated_fraction", 0.3, "{0:.0%} of the responses")),
    Condition("clipping", "Much of the policy gradient is clipped", "mean above 20 % of the tokens over the last 10 steps",
              "a lower learning rate or fewer algorithm.num_minibatches",
              _above("ratio/clipped_fraction", 0.2, "{0:.0%} of the tokens")),
    Condition("ess_low", "Few samples carry the importance weights", "effective size below 50 % over the last 10 steps",
              "a smaller rollout.max_staleness, algorithm.importance_correction=mask, or a lower learning rate",
              _below("importance/ess", 0.5, "effective size {0:.0%}")),
    Condition("gap_growing", "Trainer and vLLM drift apart",
              "mean gap, with staleness the canary's, twice that of the start and above 0.01 nats",
              "algorithm.importance_correction=tis, model.dtype=float32; sync.verify=digest shows whether it is the weights",
              _gap),
    Condition("gap_large", "Trainer and vLLM disagree about the same tokens",
              "mean gap above 0.1 nats over the last 10 steps, runs without staleness",
              "algorithm.importance_correction=tis; without top_k, top_p and min_p; with experts algorithm.router_replay=rollout",
              _large_gap),
    Condition("merge_error", "Merging the adapters loses their update", "above 50 % over the last 10 steps",
              "engine.lora.sync=adapter, a higher learning rate or engine.lora.alpha",
              _above("lora/merge_error", 0.5, "{0:.0%} is lost")),
    Condition("convoy", "Batches come in pairs", "every other step waits for a quarter of its time, asynchronous runs",
              "rollout.max_num_seqs large enough for two batches, or another rollout.max_staleness",
              _convoy, covers=("trainer_waits",)),
    Condition("trainer_waits", "The trainer waits for rollouts", "above 30 % of the time, asynchronous runs",
              "more rollout.replicas, a larger rollout.max_staleness or rollout.max_num_seqs, or rollout.enforce_eager=false",
              _trainer_waits),
    Condition("replicas_paused", "The replicas stand still for syncs", "above 20 % of the time, asynchronous runs",
              "rollout.on_update=continue, which holds running samples in the place of waiting for them", _replicas_paused),
    Condition("padding", "Micro-batches are padding for a good part", "above 30 % of their tokens over the last 10 steps",
              "a smaller engine.parallel.context, longer samples, or micro-batches that divide among the ranks",
              _above("train/padding_fraction", 0.3, "{0:.0%} of the tokens")),
    Condition("memory_near_limit", "GPU memory is nearly full", "tensors above 90 % of the GPU at a step's peak",
              "a smaller engine.tokens_per_microbatch, engine.recompute=selective or full, more shards", _memory),
)  # fmt: skip


def advisories(steps: Lines, evaluations: Lines = (), setting: Callable[[str], object] = lambda key: None) -> list[Advisory]:
    """Those whose condition holds, in the order of CONDITIONS, without those that another one explains.

    `setting`: the value of a key of the run's config, None where it is not known.
    """
    run = Series(steps, evaluations)
    found = [(each, evidence) for each in CONDITIONS if (evidence := each.check(run)) is not None]
    covered = {name for each, _ in found for name in each.covers}
    chosen = [(each, said) for each, said in found if each.name not in covered]
    return [Advisory(each.name, each.title, said, each.remedy + _already(each.remedy, setting)) for each, said in chosen]


def _already(remedy: str, setting: Callable[[str], object]) -> str:
    """Of what a remedy says to write, what the run has; empty where that is nothing."""
    there = [f"{key}={value}" for key, value in SETTING.findall(remedy) if str(setting(key)).lower() == value]
    return f" (of these the run has {', '.join(there)} already)" if there else ""


def console_lines(found: Sequence[Advisory]) -> list[str]:
    """Two lines each, for the end of a run."""
    return [line for each in found for line in (f"advisory: {each.title}: {each.evidence}", f"  try: {each.remedy}")]
