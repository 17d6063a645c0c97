"""Do the keys of `algorithm` go together, and with the model? Refuses choices that would do nothing but harm. No torch in here.

Leaves out keys without effect (unused.py), sizes (sizes.py) and what the keys mean (engine/config.py).
"""

from __future__ import annotations

from engine.config import BIASED_ROUTERS, AlgorithmConfig
from megasync.config.errors import refuse_if
from megasync.config.schema import Config
from megasync.hf.model_shape import ModelShape

ROUTER_KEYS = ("load_balancing", "router_replay", "log_router_gap")


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
