"""Does what a config says about activations in memory fit the model? No torch in here."""

from __future__ import annotations

from engine.config import EngineConfig
from megasync.config.errors import refuse_if
from megasync.config.model_folder import ModelShape
from megasync.config.schema import Config


def check_recompute(config: Config, shape: ModelShape) -> None:
    """The modules are there, none lies within another, and they are asked for."""
    engine, modules = config.engine, config.engine.recompute_modules
    key = f"engine.recompute_modules = {', '.join(modules)}"
    is_given = modules != EngineConfig().recompute_modules
    message = f"{key}: engine.recompute = {engine.recompute} knows no modules"
    refuse_if(is_given and engine.recompute != "selective", message, remedy="write engine.recompute=selective, or leave them out")
    if engine.recompute != "selective":
        return
    here, missing = ("moe", "mlp") if shape.num_experts else ("mlp", "moe")
    choices = f"layernorm, core_attn, mlp_act, {here}"
    message = f"{key}: {shape.model_type} has no {missing}"
    remedy = f"write {here} in the place of {missing}"
    refuse_if(missing in modules, message, model=config.model.path, choices=choices, remedy=remedy)
    message = f"{key}: mlp_act is a part of {here}"
    refuse_if(here in modules and "mlp_act" in modules, message, choices=choices, remedy=f"leave mlp_act or {here} out")
