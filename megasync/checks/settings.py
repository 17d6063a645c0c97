"""Keys against each other, the ranks and the model's shape: all that needs neither weights nor data, nor this machine's packages.

What starts a run and what plans one both ask here first. Leaves out keys without effect (unused.py), sizes (sizes.py), files,
rewards and folders (check.py). No torch in here.

    check_settings(config, num_ranks)
    check_layout(config, model_shape(config.model.path), num_ranks)
"""

from __future__ import annotations

from engine.config import BIASED_ROUTERS, AlgorithmConfig
from engine.wrap import ddp_fields
from megasync.checks.exact import check_deterministic, check_exact
from megasync.checks.resume import check_newest_weights
from megasync.checks.sizes import check_engine, check_ranks, check_rollout
from megasync.checks.unused import check_unused
from megasync.config.errors import ConfigError, Found, nearest_name, refuse_if
from megasync.config.schema import Config
from megasync.hf.model_shape import ModelShape
from megasync.launch.devices import visible_devices

ROUTER_KEYS = ("load_balancing", "router_replay", "log_router_gap")


def check_settings(config: Config, num_ranks: int) -> None:
    """ConfigError for all keys that do not go with the others, or with so many trainer ranks."""
    found = Found()
    with found.more():
        check_ranks(config, num_ranks)
    checks = (_check_overrides, _check_gradients, _check_algorithm, check_objective, _check_schedule, check_unused)
    for check in (*checks, check_deterministic, check_newest_weights):
        with found.more():
            check(config)
    with found.more():
        refuse_if(not config.model.path, "model.path is not set", remedy="set model.path to a Hugging Face folder")
    found.stop()


def check_layout(config: Config, shape: ModelShape, num_ranks: int, *, on_gpus: bool | None = None) -> None:
    """ConfigError where a model of this shape cannot be laid out as the config says, on either side.

    `on_gpus`: None where this machine's devices tell.
    """
    on_gpus = bool(visible_devices()) if on_gpus is None else on_gpus
    check_engine(config, shape)
    check_exact(config, shape, on_gpus=on_gpus)
    check_routing(config, shape)
    if config.algorithm.name == "grpo":
        check_rollout(config, shape, num_ranks, on_gpus=on_gpus)


def _check_overrides(config: Config) -> None:
    found = Found()
    for name, value in config.engine.overrides.items():
        if reason := ddp_fields.refusal(config.engine.wrap, name, value):
            near = "" if name in ddp_fields.REFUSED or name in ddp_fields.TAKEN else nearest_name(name, ddp_fields.TAKEN)
            fields = ", ".join(field for field, (_, wraps, _) in ddp_fields.TAKEN.items() if config.engine.wrap in wraps)
            remedy = f"write engine.overrides.{near}" if near else f"leave engine.overrides.{name} out"
            found.errors.append(ConfigError(f"engine.overrides.{name} = {value!r}: {reason}", choices=fields, remedy=remedy))
    found.stop()


def _check_gradients(config: Config) -> None:
    """Under both wraps bfloat16 stands for the dtype of the weights."""
    dtype = config.model.dtype
    message = f"engine.gradient_dtype = bfloat16: model.dtype = {dtype} has its gradients in float32"
    remedy = "write engine.gradient_dtype=float32, or model.dtype=bfloat16"
    refuse_if(config.engine.gradient_dtype != "float32" and dtype != "bfloat16", message, choices="float32", remedy=remedy)


def _check_algorithm(config: Config) -> None:
    is_grpo, run = config.algorithm.name == "grpo", config.run
    factors = "data.batch_size x rollout.group_size" if is_grpo else "data.batch_size"
    group_size = config.rollout.group_size if is_grpo else 1
    num_samples = config.data.batch_size * group_size
    message = f"algorithm.num_minibatches = {config.algorithm.num_minibatches}: more than the samples of a step"
    remedy = f"write algorithm.num_minibatches={num_samples} or less"
    too_many = config.algorithm.num_minibatches > num_samples
    refuse_if(too_many, message, samples=f"{factors} = {num_samples}", remedy=remedy)
    message = "rollout.group_size = 1: a single sample of a prompt has the advantage 0, so that GRPO trains nothing"
    refuse_if(is_grpo and group_size == 1, message, allowed="at least 2", remedy="write for example rollout.group_size=8")
    if run.stop_at_accuracy:
        is_measured = not is_grpo and config.data.eval and config.rollout.evaluate_every_steps
        message = f"run.stop_at_accuracy = {run.stop_at_accuracy:g}: the accuracy is not measured while the run trains"
        needs = "algorithm.name=sft, data.eval, rollout.evaluate_every_steps above 0"
        refuse_if(not is_measured, message, needs=needs, remedy="set what it needs, or write run.stop_at_accuracy=0")


def _check_schedule(config: Config) -> None:
    """megatron-core/core/optimizer_param_scheduler.py asserts the same."""
    optimizer = config.engine.optimizer
    least, rate = optimizer.min_learning_rate, optimizer.learning_rate
    message = f"engine.optimizer.min_learning_rate = {least:g}: above engine.optimizer.learning_rate = {rate:g}"
    refuse_if(least > rate, message, remedy=f"write engine.optimizer.min_learning_rate={rate:g} or less")
    end, warmup = optimizer.decay_steps, optimizer.warmup_steps
    message = f"engine.optimizer.decay_steps = {end}: the decay would end before engine.optimizer.warmup_steps = {warmup}"
    is_over = end is not None and end <= warmup
    refuse_if(is_over, message, remedy=f"write engine.optimizer.decay_steps={warmup + 1} or more, or null for run.steps")


def check_objective(config: Config) -> None:
    """ConfigError for the first key of the objective that has nothing to work on, or whose value cannot work."""
    algorithm = config.algorithm
    if algorithm.name == "sft":
        message = "algorithm.loss_aggregation = constant_length: supervised steps have no rollout.max_new_tokens to divide by"
        lines = {"choices": "token_mean, sequence_mean", "remedy": "write algorithm.loss_aggregation=token_mean"}
        refuse_if(algorithm.loss_aggregation == "constant_length", message, **lines)
        return
    _check_correction(algorithm)
    _check_truncated(algorithm, config.rollout.max_new_tokens)


def check_routing(config: Config, shape: ModelShape) -> None:
    """ConfigError for keys about routers that this model has none for."""
    algorithm = config.algorithm
    for key in ROUTER_KEYS:
        value = getattr(algorithm, key)
        message = f"algorithm.{key} = {value}: {shape.model_type} has no experts"
        is_unused = value != AlgorithmConfig.model_fields[key].default and not shape.num_experts
        refuse_if(is_unused, message, model=config.model.path, remedy=f"leave algorithm.{key} out")
    _check_bias(config, shape)


def _check_bias(config: Config, shape: ModelShape) -> None:
    rate = config.algorithm.router_bias_update_rate
    given, remedy = f"algorithm.router_bias_update_rate = {rate:g}", "leave algorithm.router_bias_update_rate out"
    message = f"{given}: the routers of {shape.model_type} have no bias"
    is_unused = rate > 0 and shape.model_type not in BIASED_ROUTERS
    refuse_if(is_unused, message, model=config.model.path, needs=", ".join(BIASED_ROUTERS), remedy=remedy)
    message = f"{given}: with engine.lora.rank = {config.engine.lora.rank} checkpoints hold adapters alone, and no biases"
    refuse_if(rate > 0 and config.engine.lora.rank > 0, message, choices="0", remedy=remedy)


def _check_correction(algorithm: AlgorithmConfig) -> None:
    is_mask, cap = algorithm.importance_correction == "mask", algorithm.importance_cap
    message = f"algorithm.importance_cap = {cap:g}: with algorithm.importance_correction = mask even tokens of the trainer's own "
    message += "policy, at 1, would be masked"
    refuse_if(is_mask and cap < 1, message, allowed="at least 1", remedy="write for example algorithm.importance_cap=2")


def _check_truncated(algorithm: AlgorithmConfig, max_new_tokens: int) -> None:
    buffer, example = algorithm.overlong_buffer, max(1, max_new_tokens // 5)
    message = f"algorithm.overlong_buffer = {buffer}: no span of lengths for algorithm.truncated = penalise"
    allowed = f"at least 1 and below rollout.max_new_tokens = {max_new_tokens}"
    is_wrong = algorithm.truncated == "penalise" and not 0 < buffer < max_new_tokens
    refuse_if(is_wrong, message, allowed=allowed, remedy=f"write for example algorithm.overlong_buffer={example}")
