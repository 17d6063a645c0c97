"""Advisories: conditions of a run that users should look at, with threshold, evidence and remedies. Pure functions.

Each condition reads only the lines of metrics.jsonl and evaluations.jsonl. Remedies that the run's config has already are left
out. Leaves out how a condition is detected (signs.py) and the report (html/page.html).

    for advisory in advisories(record.steps, record.evaluations, record.get):
        advisory.title, advisory.evidence, advisory.remedy
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megasync.report import learning, signs
from megasync.report.signs import Lines, Series

Setting = Callable[[str], object]  # returns the value of a key of the run's config, None if unknown


class Unless(NamedTuple):
    """A remedy as text, and a function that returns whether the run's config has it already."""

    words: str
    is_set: Callable[[Setting], bool]


@dataclass(frozen=True)
class Advisory:
    """A condition that holds; `evidence` names steps and numbers."""

    name: str
    title: str
    evidence: str
    remedy: str


@dataclass(frozen=True)
class Condition:
    """A condition and its remedies (`tries`). `check` returns the evidence as text if the condition holds, else None. `covers`:
    names of conditions that this one explains, and that are then not reported.
    """

    name: str
    title: str
    threshold: str
    tries: tuple[str | Unless, ...]
    check: Callable[[Series], str | None]
    covers: tuple[str, ...] = ()

    @property
    def remedy(self) -> str:
        """All remedies as text."""
        return _joined([_words(each) for each in self.tries])

    def remedy_for(self, setting: Setting) -> str:
        """The remedies that the run's config does not have, as text."""
        left = [_words(each) for each in self.tries if not (isinstance(each, Unless) and each.is_set(setting))]
        return _joined(left) if left else f"the run already has {self.remedy}"


def _words(each: str | Unless) -> str:
    return each.words if isinstance(each, Unless) else each


def _joined(words: Sequence[str]) -> str:
    return ", or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


# --------------------------------------------------------------------------------------- whether a run has a setting


def _has(key: str, *values: str) -> Callable[[Setting], bool]:
    """Whether the key has one of these values, written as in YAML."""
    return lambda setting: str(setting(key)).lower() in values


def _within(key: str, lowest: float, highest: float) -> Callable[[Setting], bool]:
    return lambda setting: lowest <= value <= highest if isinstance(value := setting(key), int | float) else False


def _clips_higher(setting: Setting) -> bool:
    low, high = (setting(f"algorithm.clip_{end}") for end in ("low", "high"))
    return isinstance(low, int | float) and isinstance(high, int | float) and high > low


def _samples_from_all(setting: Setting) -> bool:
    names = ("top_k", 0), ("top_p", 1), ("min_p", 0)
    return all(setting(f"rollout.{name}") == value for name, value in names)


def _set_to(key: str, value: str) -> Unless:
    return Unless(f"{key}={value}", _has(key, value))


KL_TERM = Unless("a KL term (algorithm.kl_coefficient)", _within("algorithm.kl_coefficient", 1e-12, float("inf")))
TIS = Unless("algorithm.importance_correction=tis", _has("algorithm.importance_correction", "tis", "mask"))
LESS_STALE = Unless("a smaller rollout.max_staleness", _within("rollout.max_staleness", 0, 0))
LOWER_RATE = "a lower learning rate"
CLIPPED_NORM = Unless("engine.optimizer.clip_grad_norm=1.0", _within("engine.optimizer.clip_grad_norm", 1e-12, 1.0))
LOOK = "look at the samples: the reward may not distinguish good responses from bad ones"
FLAT = ("flat_and_still", "flat_and_moving")
CONDITIONS = (
    Condition("reward_falls", "The reward has fallen", "below its start or its best, by more than its error",
              ("a lower learning rate, a third to a tenth", CLIPPED_NORM, "more warmup_steps", KL_TERM, LESS_STALE),
              learning.falls, covers=("tied_groups", "reward_constant", "no_gradient")),
    Condition("flat_and_still", "The reward is flat, and the policy hardly moves",
              "change within its error, 20 steps or more",
              ("a higher learning rate, three to ten times", "more steps", LOOK, "prompts that are less hard or less easy"),
              learning.flat_and_still),
    Condition("flat_and_moving", "The reward is flat, though the policy moves",
              "the same; entropy has changed by a fifth, 1 % of the tokens are clipped, or the KL is above 0.01",
              (LOWER_RATE, LOOK, "a larger data.batch_size or group_size"), learning.flat_and_moving),
    Condition("entropy_collapse", "The policy's entropy has collapsed", "below 0.1 nats and a fifth of the start's",
              (Unless("algorithm.clip_high above clip_low (0.28 and 0.2)", _clips_higher), LOWER_RATE, "a higher temperature",
               KL_TERM), signs.entropy),
    Condition("reward_constant", "All responses get the same reward", "deviation 0 in the last 10 steps",
              ("look at the samples: the reward may not read what the model writes, or the task may be too hard, or solved",),
              signs.constant_reward, covers=("tied_groups", "no_gradient", *FLAT)),
    Condition("tied_groups", "Most groups teach nothing, their rewards are all equal", "mean above 80 % over the last 10 steps",
              (_set_to("algorithm.filter_groups", "true"), "a higher rollout.temperature", "a larger group_size",
               "prompts that are less hard or less easy"),
              signs.above("groups/tied_fraction", 0.8, "{0:.0%} of the groups"), covers=("no_gradient",)),
    Condition("learning_rate_zero", "The learning rate is 0", "0 for the last 3 steps, a tenth of all",
              ("engine.optimizer.decay_steps, min_learning_rate and warmup_steps against run.steps",), signs.rate,
              covers=FLAT),
    Condition("no_gradient", "Nothing is learnt, the gradient is 0", "norm 0 in the last 10 steps",
              ("look at rewards and advantages: with equal ones, or all responses masked, there is nothing to learn",),
              signs.gradient, covers=FLAT),
    Condition("gradient_spikes", "The gradient norm has spikes", "3 steps above 10 times the median",
              (CLIPPED_NORM, LOWER_RATE, "more warmup_steps"), signs.spikes),
    Condition("skipped_steps", "Optimizer steps were skipped, loss or gradient was not finite", "any",
              (LOWER_RATE, Unless("one run with model.dtype=float32, to see whether precision is the cause",
                                  _has("model.dtype", "float32"))), signs.skipped),
    Condition("reward_failures", "Calls of the reward fail and count as 0", "in 3 steps",
              ("the function, prompt and error in the run's output; a larger rollout.reward_timeout_seconds for timeouts",),
              signs.failures),
    Condition("held_out_falls", "Sampled reward rises while held-out reward falls", "0.05 up and 0.02 down",
              ("compare samples of both: fewer epochs", KL_TERM, "a reward that is harder to please"), signs.held_out),
    Condition("truncation", "Many responses are cut off", "mean above 30 % over the last 10 steps",
              ("a larger rollout.max_new_tokens",
               Unless("algorithm.truncated=mask or penalise", _has("algorithm.truncated", "mask", "penalise"))),
              signs.above("response/truncated_fraction", 0.3, "{0:.0%} of the responses")),
    Condition("clipping", "Much of the policy gradient is clipped", "mean above 20 % of the tokens over the last 10 steps",
              (LOWER_RATE, Unless("fewer algorithm.num_minibatches", _within("algorithm.num_minibatches", 1, 1)),
               Unless("fewer algorithm.num_passes", _within("algorithm.num_passes", 1, 1))),
              signs.above("ratio/clipped_fraction", 0.2, "{0:.0%} of the tokens")),
    Condition("ess_low", "Few samples carry the importance weights", "effective size below 50 % over the last 10 steps",
              (LESS_STALE, _set_to("algorithm.importance_correction", "mask"), LOWER_RATE),
              signs.below("importance/ess", 0.5, "effective size {0:.0%}")),
    Condition("gap_growing", "Trainer and vLLM drift apart",
              "mean gap, with staleness the canary's, twice that of the start and above 0.01 nats",
              (TIS, _set_to("model.dtype", "float32"),
               Unless("sync.verify=digest, to see whether the weights are the cause", _has("sync.verify", "digest"))), signs.gap),
    Condition("gap_large", "Trainer and vLLM disagree about the same tokens",
              "mean gap above 0.1 nats over the last 10 steps, runs without staleness",
              (TIS, _set_to("rollout.dtype", "model"), Unless("no top_k, top_p and min_p", _samples_from_all),
               Unless("with experts algorithm.router_replay=rollout", _has("algorithm.router_replay", "rollout"))),
              signs.large_gap),
    Condition("merge_error", "Merging the adapters loses their update", "above 50 % over the last 10 steps",
              (_set_to("engine.lora.sync", "adapter"), "a higher learning rate", "a higher engine.lora.alpha"),
              signs.above("lora/merge_error", 0.5, "{0:.0%} is lost")),
    Condition("convoy", "Batches come in pairs", "every other step waits for a quarter of its time, asynchronous runs",
              ("rollout.max_num_seqs large enough for two batches", "another rollout.max_staleness"),
              signs.convoy, covers=("trainer_waits",)),
    Condition("trainer_waits", "The trainer waits for rollouts", "above 30 % of the time, asynchronous runs",
              ("more rollout.replicas", "a larger rollout.max_staleness or rollout.max_num_seqs",
               _set_to("rollout.enforce_eager", "false")), signs.trainer_waits),
    Condition("replicas_paused", "The replicas are paused for syncs", "above 20 % of the time, asynchronous runs",
              (Unless("rollout.on_update=continue, which pauses running samples instead of waiting for them",
                      _has("rollout.on_update", "continue")), "a larger data.batch_size, so that syncs are a smaller share"),
              signs.replicas_paused),
    Condition("padding", "A large part of the micro-batches is padding", "above 30 % of their tokens over the last 10 steps",
              (Unless("a smaller engine.parallel.context", _within("engine.parallel.context", 1, 1)), "longer samples",
               "micro-batches that divide among the ranks"),
              signs.above("train/padding_fraction", 0.3, "{0:.0%} of the tokens")),
    Condition("memory_near_limit", "GPU memory is nearly full", "tensors above 90 % of the GPU at a step's peak",
              ("a smaller engine.tokens_per_microbatch", "more shards",
               Unless("engine.recompute=selective", _has("engine.recompute", "selective", "full")),
               _set_to("engine.recompute", "full")), signs.memory),
)  # fmt: skip


def advisories(steps: Lines, evaluations: Lines = (), setting: Setting = lambda key: None) -> list[Advisory]:
    """Advisories of the conditions that hold, in the order of CONDITIONS, without conditions that another one covers. `setting`:
    reads the run's config, to leave out remedies that it has already.
    """
    run = Series(steps, evaluations)
    found = [(each, evidence) for each in CONDITIONS if (evidence := each.check(run)) is not None]
    covered = {name for each, _ in found for name in each.covers}
    chosen = [(each, evidence) for each, evidence in found if each.name not in covered]
    return [Advisory(each.name, each.title, evidence, each.remedy_for(setting)) for each, evidence in chosen]


def console_lines(found: Sequence[Advisory]) -> list[str]:
    """Two lines per advisory, for the terminal."""
    return [line for each in found for line in (f"advisory: {each.title}: {each.evidence}", f"  try: {each.remedy}")]
