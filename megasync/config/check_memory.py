"""Does what a config says about long sequences, recompute and context parallelism, fit the model? No torch in here."""

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
    message = f"engine.recompute_inputs = host: engine.recompute = {engine.recompute} keeps more than the inputs of layers"
    remedy = "write engine.recompute=full, or engine.recompute_inputs=device"
    refuse_if(engine.recompute_inputs == "host" and engine.recompute != "full", message, remedy=remedy)
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
    """engine/context.py:check says the same."""
    parallel, model = config.engine.parallel, config.model.path
    if parallel.context_attention != "ulysses":
        return
    message = "engine.parallel.context_attention = ulysses: needs engine.parallel.context above 1, which is 1"
    refuse_if(parallel.context == 1, message, remedy="leave it out, or write a larger context size")
    heads = shape.num_key_value_heads // parallel.tensor
    message = f"engine.parallel.context_attention = ulysses: engine.parallel.context = {parallel.context} does not divide the"
    message += f" {heads} KV heads of a tensor-parallel rank"
    remedy = "write engine.parallel.context_attention=allgather"
    refuse_if(heads % parallel.context, message, model=model, choices="allgather", remedy=remedy)
