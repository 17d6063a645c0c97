"""Does what a config says about long sequences, recompute and context parallelism, fit the model? No torch in here."""

from __future__ import annotations

from engine import rules
from megasync.config.errors import ConfigError, refuse_if
from megasync.config.schema import Config
from megasync.hf.model_shape import ModelShape


def check_recompute(config: Config, shape: ModelShape) -> None:
    """The modules are there, and none lies within another."""
    engine, modules = config.engine, config.engine.recompute_modules
    key = f"engine.recompute_modules = {', '.join(modules)}"
    if engine.recompute != "selective":
        return
    here, missing = ("moe", "mlp") if shape.num_experts else ("mlp", "moe")
    choices = f"layernorm, core_attn, mlp_act, {here}"
    message = f"{key}: {shape.model_type} has no {missing}"
    remedy = f"write {here} in the place of {missing}"
    refuse_if(missing in modules, message, model=config.model.path, choices=choices, remedy=remedy)
    message = f"{key}: in stages the routers no longer know the micro-batch that is computed again"
    remedy = "leave moe out, or write engine.recompute=full"
    refuse_if("moe" in modules and engine.parallel.pipeline > 1, message, choices="layernorm, core_attn, mlp_act", remedy=remedy)
    message = f"{key}: mlp_act is a part of {here}"
    refuse_if(here in modules and "mlp_act" in modules, message, choices=choices, remedy=f"leave mlp_act or {here} out")


def check_context(config: Config, shape: ModelShape) -> None:
    """`ulysses` is for several context ranks, and divides KV heads among them."""
    parallel = config.engine.parallel
    message = "engine.parallel.context_attention = ulysses: needs engine.parallel.context above 1, which is 1"
    is_alone = parallel.context_attention == "ulysses" and parallel.context == 1
    refuse_if(is_alone, message, remedy="leave it out, or write a larger context size")
    refuse(config, rules.context_problem(shape.num_key_value_heads, parallel))


def refuse(config: Config, found: rules.Problem | None) -> None:
    if found:
        raise ConfigError(found.message, model=config.model.path, allowed=found.allowed, remedy=found.remedy)
