"""Which keys that a config gives have no effect beside its other keys: two tables of rules. No torch in here.

What can only be a mistake is refused; keys that a config may have for another phase, or for a longer run, get a note.
A key counts as given where its value is not the default. Leaves out what a model has no use for (settings.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import Any

from bridge.config import SyncConfig
from engine.algorithm import PRESETS, AlgorithmConfig
from engine.config import is_own
from megasync.config.errors import ConfigError, shown_value, wrong
from megasync.config.schema import Config, RolloutConfig

SUPERVISED = (
    "name",
    "num_minibatches",
    "num_passes",
    "non_finite",
    "loss_aggregation",
    "load_balancing",
    "router_bias_update_rate",
)
POLICY_KEYS = tuple(f"algorithm.{name}" for name in AlgorithmConfig.model_fields if name not in SUPERVISED)
EVALUATION_KEYS = ("rollout.evaluate_every_steps", "rollout.evaluate_at_start")
ROLLOUT_KEYS = (
    *(key for name in RolloutConfig.model_fields if (key := f"rollout.{name}") not in (*EVALUATION_KEYS, "rollout.ray_address")),
    *(f"sync.{name}" for name in SyncConfig.model_fields),
    *("run.log_samples", "engine.lora.sync"),
)
LOSS, ADVANTAGE, FILTER = "algorithm.loss", "algorithm.advantage", "algorithm.filter_groups"
CORRECTION, DECAY = "algorithm.importance_correction", ("engine.optimizer.decay_steps", "engine.optimizer.min_learning_rate")
METHOD = "rollout.speculation.method"
LOOKUP_KEYS = ("rollout.speculation.prompt_lookup_max", "rollout.speculation.prompt_lookup_min")
TEMPLATE_KEYS = ("data.system_prompt", "data.chat_template_arguments")

# keys, the key that they are for, its values with which they have an effect, the reason for its other values
REFUSED: tuple[tuple[Sequence[str], str, tuple[Any, ...], str], ...] = (
    (POLICY_KEYS, "algorithm.name", ("grpo",), "has no rollouts"),
    (("data.sampler",), "algorithm.name", ("grpo",), "takes all examples in turn"),
    (("algorithm.importance_level", "algorithm.importance_cap"), CORRECTION, ("tis", "mask"), "has no weights"),
    (("algorithm.sapo_temperature_positive", "algorithm.sapo_temperature_negative"), LOSS, ("sapo",), "has no gate"),
    (("algorithm.clip_low", "algorithm.clip_high"), LOSS, ("clip", "cispo", "gmpo", "dppo_tv", "dppo_kl"), "clips nothing"),
    (("algorithm.dual_clip", "algorithm.ratio_level"), LOSS, ("clip",), "takes each token's own ratio, without a dual clip"),
    (("algorithm.pass_k",), ADVANTAGE, ("pass_at_k",), "has no k"),
    (("algorithm.baseline", "algorithm.normalize_advantage_by_std"), ADVANTAGE, ("group",), "has a baseline of its own"),
    (("algorithm.importance_floor",), CORRECTION, ("mask",), "masks nothing"),
    (("algorithm.overlong_buffer",), "algorithm.truncated", ("penalise",), "does not use it"),
    (("algorithm.filter_factor",), FILTER, (True,), "takes no other prompts"),
    (("algorithm.log_router_gap",), "algorithm.router_replay", ("rollout",), "records no routes to compare with"),
    (DECAY, "engine.optimizer.decay", ("cosine", "linear"), "lowers no learning rate"),
    (("engine.optimizer.loss_scale",), "model.dtype", ("float16",), "scales no loss"),
    (("engine.recompute_modules",), "engine.recompute", ("selective",), "knows no modules"),
    (("engine.recompute_inputs",), "engine.recompute", ("full",), "keeps more than the inputs of layers"),
    (("sync.lanes",), "sync.transport", ("auto", "nccl"), "has no lanes"),
    (("sync.log_full_every",), "sync.log", ("deltas",), "keeps no weights"),
    (("sync.log_keep",), "sync.log", ("deltas", "digests"), "keeps no log"),
    (("rollout.cache_on_update",), "rollout.on_update", ("continue",), "holds no samples"),
    (("rollout.speculation.num_tokens",), METHOD, ("ngram", "draft_model"), "drafts nothing"),
    (LOOKUP_KEYS, METHOD, ("ngram",), "looks nothing up"),
    (("rollout.speculation.path",), METHOD, ("draft_model",), "has no draft model"),
    (("rollout.offload_trainer",), "rollout.placement", ("colocated",), "leaves the trainer where it is"),
    (("teacher.divergence",), "teacher.objective", ("top_k", "full"), "is the reverse KL's policy gradient"),
    (("teacher.top_k",), "teacher.objective", ("top_k",), "compares no most likely tokens"),
    (("teacher.jsd_beta",), "teacher.divergence", ("jsd",), "has no mixture"),
    (TEMPLATE_KEYS, "data.chat_template", (True,), "does not use it"),
)
CUT_KEYS = ("rollout.top_p", "rollout.top_k", "rollout.min_p")
BIAS = "the trainer normalises over all tokens, vLLM over those that it kept, so that importance weights are too small"
RATIO_KEYS = ("algorithm.clip_low", "algorithm.clip_high", "algorithm.dual_clip", "algorithm.ratio_level")
# keys, whether they have an effect, why not
NOTED: tuple[tuple[Sequence[str], Callable[[Config], object], str], ...] = (
    (ROLLOUT_KEYS, lambda config: config.algorithm.name == "grpo", "supervised steps have neither rollouts nor replicas"),
    (
        RATIO_KEYS,
        lambda config: config.algorithm.steps_per_batch > 1 or config.algorithm.loss.startswith("dppo"),
        "with one optimizer step a batch every ratio is 1",
    ),
    (
        ("rollout.on_update", "rollout.cache_on_update"),
        lambda config: config.algorithm.name == "sft" or config.rollout.max_staleness or config.algorithm.filter_groups,
        "rollout.max_staleness = 0 leaves no samples running at a sync",
    ),
    (("engine.head_dtype",), lambda config: config.model.dtype != "float32", "model.dtype = float32 has it anyway"),
    (("data.split",), lambda config: isinstance(config.data.train, str), "each source of data.train has its own"),
    (("data.shuffle",), lambda config: not config.data.sampler, "data.sampler chooses the prompts"),
    (
        ("algorithm.kl_estimator", "algorithm.kl_in"),
        lambda config: config.algorithm.kl_coefficient,
        "algorithm.kl_coefficient = 0 has no KL",
    ),
    (EVALUATION_KEYS, lambda config: config.data.eval, "data.eval is empty"),
    (
        ("checkpoint.keep", "checkpoint.asynchronous"),
        lambda config: config.checkpoint.every_steps,
        "checkpoint.every_steps = 0 writes no checkpoint",
    ),
)
DEFAULTS = Config()


def unused_errors(config: Config) -> Iterator[ConfigError]:
    """Errors for keys that have no effect and can only be a mistake."""
    for keys, owner, values, why in REFUSED:
        given = shown_value(attrgetter(owner)(config))
        if attrgetter(owner)(config) in values or _uses_own(config, owner):
            continue
        for key in _given(config, keys):
            is_of_preset = key.removeprefix("algorithm.") in PRESETS.get(config.algorithm.preset, {})
            leave_out = f"{key}={shown_value(attrgetter(key)(DEFAULTS))}" if is_of_preset else f"leave {key} out"
            lines = {
                "needs": ", ".join(map(shown_value, values)),
                "remedy": f"write {owner}={shown_value(values[0])}, or {leave_out}",
            }
            yield wrong(config, key, f"{owner} = {given} {why}", **lines)


def _uses_own(config: Config, owner: str) -> bool:
    """Whether a user-defined function, which may read any key, replaces a built-in choice of `owner`."""
    own = {LOSS: config.algorithm.loss, ADVANTAGE: config.algorithm.advantage, FILTER: config.rollout.filter}
    return is_own(own.get(owner, ""))


def unused_keys(config: Config) -> list[str]:
    """Notes on keys that have no effect here and may well have one in another phase, or a biased one; a line a reason."""
    found = [(", ".join(_given(config, keys)), why) for keys, has_effect, why in NOTED if not has_effect(config)]
    notes = [f"without effect: {keys}: {why}" for keys, why in found if keys]
    weights = [f"data.train.{name}.weight" for name, each in config.data.train_sources.items() if each.weight != 1]
    if weights and is_own(config.data.sampler):
        notes.append(f"without effect: {', '.join(weights)}: data.sampler chooses the prompts")
    warmup, num_steps = config.engine.optimizer.warmup_steps, config.run.steps * config.algorithm.steps_per_batch
    if warmup > num_steps:
        reached = f"optimizer step {num_steps} of engine.optimizer.warmup_steps = {warmup}"
        notes.append(f"engine.optimizer.learning_rate is not reached: the run ends after {reached}")
    cuts = ", ".join(_given(config, CUT_KEYS))
    has_bias = config.algorithm.importance_correction != "none" and not config.algorithm.support_replay
    if cuts and has_bias and config.algorithm.name == "grpo":
        notes.append(f"{cuts}: {BIAS}; algorithm.support_replay=true takes the bias away")
    return notes


def _given(config: Config, keys: Sequence[str]) -> Iterator[str]:
    return (key for key in keys if attrgetter(key)(config) != attrgetter(key)(DEFAULTS))
