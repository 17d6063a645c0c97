"""Keys against each other, the ranks and the model's shape: all that needs neither weights nor data, nor this machine's packages.

The start of a run and a plan both call these first. Leaves out files, rewards and folders (check.py). No torch in here.

    check_settings(config, num_ranks)
    check_layout(config, model_shape(config.model.path), num_ranks)
"""

from __future__ import annotations

from collections.abc import Iterator

from bridge.generation import MAX_SUPPORT
from engine.algorithm import GROUPED, AlgorithmConfig
from engine.config import BIASED_ROUTERS
from engine.wrap import ddp_fields
from megasync.checks.exact import deterministic_errors, exact_errors
from megasync.checks.fp8 import fp8_errors
from megasync.checks.served_sizes import cache_errors, length_errors, placement_errors, served_errors
from megasync.checks.sizes import engine_errors, kernel_errors, rank_errors
from megasync.checks.speculation import speculation_errors
from megasync.checks.teacher import teacher_errors
from megasync.checks.unused import unused_errors
from megasync.config.errors import ConfigError, nearest_name, refuse, shown_value, wrong
from megasync.config.schema import Config
from megasync.launch.devices import visible_devices
from megasync.models.model_shape import ModelShape

KL_IN_REWARD = "algorithm.kl_in=reward"
ROUTER_KEYS = ("load_balancing", "router_replay", "log_router_gap")


def check_settings(config: Config, num_ranks: int) -> None:
    """ConfigError for all keys that do not go with the others, or with so many trainer ranks."""
    parts = (_override_errors, _algorithm_errors, _objective_errors, _schedule_errors, unused_errors, deterministic_errors)
    found = [*rank_errors(config, num_ranks), *(error for part in parts for error in part(config)), *_resume_errors(config)]
    found += teacher_errors(config)
    if not config.model.path:
        found.append(ConfigError("model.path is not set", remedy="set model.path to a Hugging Face folder"))
    refuse(found)


def check_layout(config: Config, shape: ModelShape, num_ranks: int, *, on_gpus: bool | None = None) -> None:
    """ConfigError where a model of this shape cannot be laid out as the config says, by trainer or replicas.

    `on_gpus`: None for whether this machine has any.
    """
    on_gpus = bool(visible_devices()) if on_gpus is None else on_gpus
    found = [*engine_errors(config, shape), *exact_errors(config, shape, on_gpus=on_gpus), *_router_errors(config, shape)]
    found += kernel_errors(config, shape, on_gpus=on_gpus)
    if config.algorithm.name == "grpo":
        found += served_errors(config, shape, on_gpus=on_gpus)
        found += fp8_errors(config, shape, on_gpus=on_gpus)
        drafts = list(speculation_errors(config, shape, on_gpus=on_gpus))
        found += drafts or cache_errors(config, shape)  # the cache is a draft model's, too
        found += [*length_errors(config, shape), *placement_errors(config, num_ranks)]
    refuse(found)


def _override_errors(config: Config) -> Iterator[ConfigError]:
    wrap = config.engine.wrap
    choices = ", ".join(field for field, (_, wraps, _) in ddp_fields.TAKEN.items() if wrap in wraps)
    for name, value in config.engine.overrides.items():
        if reason := ddp_fields.refusal(wrap, name, value):
            near = "" if name in ddp_fields.REFUSED or name in ddp_fields.TAKEN else nearest_name(name, ddp_fields.TAKEN)
            remedy = f"write engine.overrides.{near}" if near else f"leave engine.overrides.{name} out"
            yield ConfigError(f"engine.overrides.{name} = {value!r}: {reason}", choices=choices, remedy=remedy)
    dtype = config.model.dtype
    if config.engine.gradient_dtype != "float32" and dtype != "bfloat16":
        remedy = "write engine.gradient_dtype=float32, or model.dtype=bfloat16"
        problem = f"gradients of model.dtype = {dtype} are in float32"
        yield wrong(config, "engine.gradient_dtype", problem, choices="float32", remedy=remedy)


def _algorithm_errors(config: Config) -> Iterator[ConfigError]:
    is_grpo, rollout, size = config.algorithm.name == "grpo", config.rollout, config.data.batch_size
    num_samples = size * rollout.group_size if is_grpo else size
    if config.algorithm.num_minibatches > num_samples:
        factors = f"data.batch_size x rollout.group_size = {num_samples}" if is_grpo else f"data.batch_size = {size}"
        remedy = f"write algorithm.num_minibatches={num_samples} or less"
        yield wrong(config, "algorithm.num_minibatches", "more than the samples of a step", samples=factors, remedy=remedy)
    is_grouped = config.algorithm.advantage in (*GROUPED, "gdpo")
    if is_grpo and rollout.group_size == 1 and is_grouped and not config.teacher.is_set:
        problem, remedy = "GRPO trains nothing: the advantage of a single sample is 0", "write for example rollout.group_size=8"
        yield wrong(config, "rollout.group_size", problem, allowed="at least 2", remedy=remedy)
    is_measured = not is_grpo and config.data.eval and rollout.evaluate_every_steps
    if is_grpo and rollout.oversample > 1 and (rollout.max_staleness or rollout.episode):
        key = "max_staleness" if rollout.max_staleness else "episode"
        needs = "rollout.max_staleness=0, and no rollout.episode"
        given = f"rollout.{key} = {shown_value(getattr(rollout, key))}"
        problem = f"{given}: prompts are aborted in synchronous runs of responses alone"
        yield wrong(config, "rollout.oversample", problem, needs=needs, remedy="write rollout.oversample=1, or change those keys")
    if config.run.stop_at_accuracy and not is_measured:
        needs = "algorithm.name=sft, data.eval, rollout.evaluate_every_steps above 0"
        lines = {"needs": needs, "remedy": "set the keys that it needs, or write run.stop_at_accuracy=0"}
        yield wrong(config, "run.stop_at_accuracy", "the accuracy is not measured during training", **lines)


def _objective_errors(config: Config) -> Iterator[ConfigError]:
    """Keys of the objective whose values cannot work."""
    algorithm, most = config.algorithm, config.rollout.max_new_tokens
    if algorithm.name == "sft":
        if algorithm.loss_aggregation == "constant_length":
            lines = {"choices": "token_mean, sequence_mean", "remedy": "write algorithm.loss_aggregation=token_mean"}
            problem = "supervised steps have no rollout.max_new_tokens to divide by"
            yield wrong(config, "algorithm.loss_aggregation", problem, **lines)
        return
    yield from _advantage_errors(config)
    yield from _credit_errors(config)
    if algorithm.kl_coefficient and algorithm.kl_in == "loss" and algorithm.kl_estimator == "k1":
        problem = "the gradient of k1 is 0 on average, so that in the loss it does not hold the policy near the start model"
        yield wrong(config, "algorithm.kl_estimator", problem, choices="k2, k3", remedy=f"write k2 or k3, or {KL_IN_REWARD}")
    if algorithm.importance_correction == "mask" and algorithm.importance_cap < 1:
        problem = "algorithm.importance_correction = mask would mask tokens of the current policy, whose ratio is 1"
        remedy = "write for example algorithm.importance_cap=2"
        yield wrong(config, "algorithm.importance_cap", problem, allowed="at least 1", remedy=remedy)
    if algorithm.support_replay and not 1 <= config.rollout.top_k <= MAX_SUPPORT:
        remedy = "write for example rollout.top_k=64, or algorithm.support_replay=false"
        problem = "algorithm.support_replay needs a limit to the tokens that the sampler keeps"
        yield wrong(config, "rollout.top_k", problem, allowed=f"1 to {MAX_SUPPORT}", remedy=remedy)
    if algorithm.truncated == "penalise" and not 0 < algorithm.overlong_buffer < most:
        allowed = f"at least 1 and below rollout.max_new_tokens = {most}"
        remedy = f"write for example algorithm.overlong_buffer={max(1, most // 5)}"
        problem = "algorithm.truncated = penalise needs a span of lengths"
        yield wrong(config, "algorithm.overlong_buffer", problem, allowed=allowed, remedy=remedy)


def _advantage_errors(config: Config) -> Iterator[ConfigError]:
    algorithm, rollout, key = config.algorithm, config.rollout, "algorithm.advantage"
    remedy = "write algorithm.advantage=group"
    if algorithm.advantage in ("remax", "gdpo") and rollout.episode:
        problem = "have no greedy response" if algorithm.advantage == "remax" else "may return one reward alone"
        yield wrong(config, key, f"rollout.episode is set, and episodes {problem}", remedy=remedy)
    if algorithm.advantage == "gdpo" and (isinstance(rollout.reward, str) or len(rollout.reward) < 2):
        yield wrong(config, key, "rollout.reward names one reward alone", needs="two rewards or more", remedy=remedy)
    for chosen in config.data.chosen_rewards if algorithm.advantage == "gdpo" else ():
        yield wrong(config, key, f"normalises every reward over the batch, and {chosen} leaves some out", remedy=remedy)
    if algorithm.advantage == "gdpo" and (algorithm.truncated == "penalise" or algorithm.penalises_kl):
        penalty = "algorithm.kl_in = reward" if algorithm.penalises_kl else "algorithm.truncated = penalise"
        yield wrong(config, key, f"{penalty} changes the sum of rewards, which is not used", remedy=remedy)
    if algorithm.advantage == "pass_at_k" and algorithm.pass_k > rollout.group_size:
        problem = f"more than rollout.group_size = {rollout.group_size}"
        yield wrong(config, "algorithm.pass_k", problem, remedy=f"write algorithm.pass_k={max(2, rollout.group_size // 2)}")


def _credit_errors(config: Config) -> Iterator[ConfigError]:
    algorithm, key = config.algorithm, "algorithm.credit"
    if algorithm.credit == "episode":
        return
    without = "or write algorithm.credit=episode"
    if not config.rollout.episode:
        problem = "a sample has one turn, since rollout.episode is empty"
        yield wrong(config, key, problem, needs="rollout.episode", remedy=f"set rollout.episode, {without}")
    if algorithm.advantage != "group":
        problem = f"algorithm.advantage = {algorithm.advantage} makes one advantage of an episode's reward"
        remedy = f"write algorithm.advantage=group, {without}"
        yield wrong(config, key, problem, needs="algorithm.advantage=group", remedy=remedy)
    if config.teacher.is_set and not config.teacher.reward_weight:
        problem = "teacher.reward_weight = 0 learns from the teacher alone"
        yield wrong(config, key, problem, needs="teacher.reward_weight above 0", remedy=f"set it, {without}")


def _schedule_errors(config: Config) -> Iterator[ConfigError]:
    """megatron-core/core/optimizer_param_scheduler.py asserts the same."""
    optimizer = config.engine.optimizer
    rate, end, warmup = optimizer.learning_rate, optimizer.decay_steps, optimizer.warmup_steps
    lowest = "engine.optimizer.min_learning_rate"
    if optimizer.min_learning_rate > rate:
        problem, remedy = f"above engine.optimizer.learning_rate = {rate:g}", f"write {lowest}={rate:g} or less"
        yield wrong(config, lowest, problem, remedy=remedy)
    if end is not None and end <= warmup:
        remedy = f"write engine.optimizer.decay_steps={warmup + 1} or more, or null for run.steps"
        yield wrong(config, "engine.optimizer.decay_steps", f"not after engine.optimizer.warmup_steps = {warmup}", remedy=remedy)


def _resume_errors(config: Config) -> Iterator[ConfigError]:
    """The run keeps the weights between checkpoints that checkpoint.resume = newest_weights resumes from."""
    key, remedy, rank = "checkpoint.resume", "or write checkpoint.resume=auto", config.engine.lora.rank
    if config.checkpoint.resume != "newest_weights":
        return
    if not config.keeps_versions:
        lines = {"needs": "algorithm.name=grpo, sync.log=deltas", "remedy": f"write sync.log=deltas, {remedy}"}
        yield wrong(config, key, "the run keeps no weights between checkpoints", **lines)
    if rank:
        problem = f"the log has weights with merged adapters, which cannot be separated (engine.lora.rank = {rank})"
        yield wrong(config, key, problem, needs="engine.lora.rank=0", remedy="write checkpoint.resume=auto")
    if config.checkpoint.every_steps == 0:
        lines = {"needs": "checkpoint.every_steps above 0", "remedy": f"write checkpoint.every_steps=50, {remedy}"}
        yield wrong(config, key, "it needs a checkpoint, and checkpoint.every_steps = 0 writes none", **lines)


def _router_errors(config: Config, shape: ModelShape) -> Iterator[ConfigError]:
    """Keys about routers that this model does not have."""
    algorithm, model = config.algorithm, {"model": config.model.path}
    for name in ROUTER_KEYS:
        key, value = f"algorithm.{name}", getattr(algorithm, name)
        if value != AlgorithmConfig.model_fields[name].default and not shape.num_experts:
            yield wrong(config, key, f"{shape.model_type} has no experts", **model, remedy=f"leave {key} out")
    key, rank = "algorithm.router_bias_update_rate", config.engine.lora.rank
    if algorithm.router_bias_update_rate and shape.model_type not in BIASED_ROUTERS:
        lines = {"needs": ", ".join(BIASED_ROUTERS), "remedy": f"leave {key} out"}
        yield wrong(config, key, f"the routers of {shape.model_type} have no bias", **model, **lines)
    elif algorithm.router_bias_update_rate and rank:
        problem = f"checkpoints with engine.lora.rank = {shown_value(rank)} have adapters only, and no biases"
        yield wrong(config, key, problem, choices="0", remedy=f"leave {key} out")
