"""Keys against the model's sizes and the number of ranks: one generator of errors for each part. No torch in here.

Leaves out replicas (served_sizes.py), names, files and data (check.py), and keys against each other (settings.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path

from engine import rules
from engine.config import GPT_OSS
from engine.model import stages
from engine.peft.fields import AdapterError
from engine.peft.folder import check_peft_folder
from megasync.config.errors import ConfigError, wrong
from megasync.config.schema import Config
from megasync.models.model_shape import ModelShape

DELTA_HEADS = ("linear_num_key_heads", "linear_num_value_heads")
MAX_SERVED_RANK = 512  # vllm/config/lora.py:MaxLoRARanks


def rank_errors(config: Config, world_size: int) -> Iterator[ConfigError]:
    """The parallel sizes divide the ranks."""
    parallel, nodes = config.engine.parallel, config.run.trainer_nodes
    if parallel.sequence and parallel.tensor == 1:
        remedy = "write engine.parallel.sequence=false, or a larger tensor size"
        yield wrong(config, "engine.parallel.sequence", "needs engine.parallel.tensor above 1, which is 1", remedy=remedy)
    if world_size < 1:
        yield ConfigError(f"--num-ranks = {world_size}: at least 1 rank is needed", remedy="start at least 1 rank")
        return
    yield from rule_errors(config, rules.ranks_problem(parallel, world_size))
    if nodes and world_size % nodes:
        problem, choices = f"does not divide the {world_size} trainer ranks", ", ".join(map(str, rules.divisors(world_size)))
        remedy = "write one of the choices, or start another --num-ranks"
        yield wrong(config, "run.trainer_nodes", problem, choices=choices, remedy=remedy)


def engine_errors(config: Config, shape: ModelShape) -> Iterator[ConfigError]:
    """Parallel sizes divide the model; its dtype, adapters and recomputed layers fit it."""
    parallel, dtype = config.engine.parallel, config.model.dtype
    names = ("num_attention_heads", "num_key_value_heads", *shape.split_sizes, "shared_expert_intermediate_size", *DELTA_HEADS)
    split = {name: getattr(shape, name) for name in names}
    if uneven := next((name for name, number in split.items() if number % parallel.tensor), ""):
        good = rules.divisors(math.gcd(*split.values()))
        yield size_error(config, "engine.parallel.tensor", f"does not divide the model's {uneven} = {split[uneven]}", good)
    if found := stages.problem(parallel, shape.num_hidden_layers):
        yield ConfigError(found[0], model=config.model.path, remedy=found[1])
    if not uneven:
        yield from rule_errors(config, rules.experts_problem(shape, shape.num_experts, dtype, parallel))
        yield from rule_errors(config, rules.context_problem(shape.model_type, shape.num_key_value_heads, parallel))
    if dtype == "float16":
        yield from rule_errors(config, rules.float16_problem(shape.model_type, shape.num_experts))
    if parallel.context_attention == "ulysses" and parallel.context == 1:
        problem, remedy = "needs engine.parallel.context above 1, which is 1", "leave it out, or write a larger context size"
        yield wrong(config, "engine.parallel.context_attention", problem, remedy=remedy)
    yield from lora_errors(config, shape)
    yield from recompute_errors(config, shape)


def kernel_errors(config: Config, shape: ModelShape, *, on_gpus: bool) -> Iterator[ConfigError]:
    """Kernels of gated delta nets have some to compute, and a GPU."""
    dtype, kernels = config.model.dtype, config.engine.kernels
    remedy, choices = "write engine.kernels=auto", "auto, torch, te"
    if kernels == "fla" and not shape.linear_num_value_heads:
        problem = f"{shape.model_type} has no gated delta nets, which flash-linear-attention computes"
        yield wrong(config, "engine.kernels", problem, choices=choices, remedy=remedy)
    elif kernels == "fla" and not (on_gpus and dtype != "float32"):
        problem = f"flash-linear-attention needs a GPU and 16 bits; model.dtype = {dtype}, GPUs: {'some' if on_gpus else 'none'}"
        yield wrong(config, "engine.kernels", problem, choices=choices, remedy=remedy)


def rule_errors(config: Config, found: rules.Problem | None) -> Iterator[ConfigError]:
    """A rule of the engine's as an error."""
    if found:
        yield ConfigError(found.message, model=config.model.path, allowed=found.allowed, remedy=found.remedy)


def size_error(config: Config, key: str, problem: str, good: list[int], model: str | Path = "") -> ConfigError:
    """`good`: the sizes that would divide; the nearest below is the remedy. `model`: its folder, if not the policy's."""
    size = max(choice for choice in good if choice <= attrgetter(key)(config))
    lines = {"model": str(model or config.model.path), "choices": ", ".join(map(str, good))}
    return wrong(config, key, problem, **lines, remedy=f"write {key}={size}")


def lora_errors(config: Config, shape: ModelShape) -> Iterator[ConfigError]:
    """The model has the linears that are adapted, and none is smaller than the rank."""
    lora, model = config.engine.lora, {"model": config.model.path}
    if lora.rank == 0:
        if given := next(iter(lora.model_dump(exclude_defaults=True)), ""):
            remedy = "write for example engine.lora.rank=32, or leave engine.lora out"
            yield wrong(config, f"engine.lora.{given}", "engine.lora.rank = 0, so there is no adapter", remedy=remedy)
        return
    widths = linear_widths(shape)
    if missing := [target for target in lora.targets if target not in widths]:
        remedy = "write engine.lora.targets=[linear_proj]" if shape.kv_lora_rank else f"leave {', '.join(missing)} out"
        problem = f"no {', '.join(missing)} in {shape.model_type}"
        yield wrong(config, "engine.lora.targets", problem, **model, choices=", ".join(widths), remedy=remedy)
    smallest = min([shape.hidden_size, *(width for target in lora.targets for width in widths.get(target, []))])
    if lora.rank > smallest:
        problem, remedy = f"larger than the model's smallest dimension, {smallest}", f"write engine.lora.rank={min(32, smallest)}"
        yield wrong(config, "engine.lora.rank", problem, **model, remedy=remedy)
    if lora.sync == "adapter" and (shape.num_experts or lora.rank > MAX_SERVED_RANK):
        rank_problem = f"vLLM serves adapters up to rank {MAX_SERVED_RANK}, engine.lora.rank = {lora.rank}"
        problem = "vLLM takes no adapters alone beside experts" if shape.num_experts else rank_problem
        yield wrong(config, "engine.lora.sync", problem, **model, choices="merged", remedy="write engine.lora.sync=merged")
    of_experts = [target for target in lora.targets if target in ("linear_fc1", "linear_fc2") and shape.num_experts]
    if of_experts and (found := rules.experts_lora_problem(lora, of_experts[0], config.model.dtype)):
        attention = "linear_proj" if shape.kv_lora_rank else "linear_qkv,linear_proj"
        yield from rule_errors(config, found._replace(remedy=f"{found.remedy}, or engine.lora.targets=[{attention}]"))
    if lora.adapter_path and not missing:
        try:
            check_peft_folder(lora.adapter_path, lora, config.model.path)
        except AdapterError as error:
            problem = error.problem.removeprefix(f"{lora.adapter_path}: ")
            yield wrong(config, "engine.lora.adapter_path", problem, remedy=error.remedy)


def linear_widths(shape: ModelShape) -> dict[str, list[int]]:
    """Dimensions other than the hidden size of the linears that adapters may have in a model."""
    heads, groups = shape.num_attention_heads, shape.num_key_value_heads
    head = shape.head_dim or shape.hidden_size // heads
    mlp = [shape.moe_intermediate_size, shape.shared_expert_intermediate_size] if shape.num_experts else []
    mlp += [shape.intermediate_size] if not shape.num_experts or shape.first_k_dense_replace else []
    mlp = [size for size in mlp if size]
    widths = {"linear_qkv": [(heads + 2 * groups) * head], "linear_proj": [heads * head]}
    if shape.kv_lora_rank:
        names = ("linear_q_down_proj", "linear_q_up_proj") if shape.q_lora_rank else ()
        queries = {name: [shape.q_lora_rank] for name in names}
        widths = {
            "linear_proj": [heads * shape.v_head_dim],
            **queries,
            "linear_kv_down_proj": [shape.kv_lora_rank + shape.qk_rope_head_dim],
            "linear_kv_up_proj": [shape.kv_lora_rank],
        }
    if shape.linear_num_value_heads:
        values = shape.linear_num_value_heads * shape.linear_value_head_dim
        keys = shape.linear_num_key_heads * shape.linear_key_head_dim
        widths |= {"in_proj": [2 * keys + 2 * values + 2 * shape.linear_num_value_heads], "out_proj": [values]}
    return widths if shape.model_type == GPT_OSS else {**widths, "linear_fc1": mlp, "linear_fc2": mlp}


def recompute_errors(config: Config, shape: ModelShape) -> Iterator[ConfigError]:
    """The model has the modules, and none lies within another."""
    engine, key = config.engine, "engine.recompute_modules"
    if engine.recompute != "selective":
        return
    yield from rule_errors(config, rules.recompute_problem(shape.model_type, engine))
    here, missing = ("moe", "mlp") if shape.num_experts else ("mlp", "moe")
    choices, modules = f"layernorm, core_attn, mlp_act, {here}", engine.recompute_modules
    if missing in modules:
        lines = {"model": config.model.path, "choices": choices, "remedy": f"write {here} instead of {missing}"}
        yield wrong(config, key, f"{shape.model_type} has no {missing}", **lines)
    if "moe" in modules and engine.parallel.pipeline > 1:
        problem = "with engine.parallel.pipeline above 1 routers do not know which micro-batch is recomputed"
        remedy = "leave moe out, or write engine.recompute=full"
        yield wrong(config, key, problem, choices="layernorm, core_attn, mlp_act", remedy=remedy)
    if here in modules and "mlp_act" in modules:
        yield wrong(config, key, f"mlp_act is a part of {here}", choices=choices, remedy=f"leave mlp_act or {here} out")
