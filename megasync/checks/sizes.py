"""Do the numbers of a config fit each other, the model's sizes and the ranks? Those of long sequences too. No torch in here.

Leaves out names, files and data (check.py).
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from importlib.util import find_spec

import psutil

from engine import rules
from engine.config import DTYPE_BYTES
from engine.model import stages
from engine.peft.folder import check_peft_folder
from megasync.checks.latent import check_latent, check_latent_rollout, low_ranks
from megasync.config.errors import ConfigError, refuse_if
from megasync.config.schema import Config
from megasync.hf.model_shape import ModelShape
from megasync.launch.devices import visible_devices
from megasync.launch.scope import RAY_ADDRESS

MAX_SERVED_RANK = 512  # vllm/config/lora.py:MaxLoRARanks
HEADS_ON_CPUS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # vllm 0.32, v1/attention/backends/cpu_attn.py:70


def check_engine(config: Config, shape: ModelShape) -> None:
    """Parallel sizes divide the model; the adapters fit it."""
    _check_engine_divides(config, shape)
    if config.model.dtype == "float16":
        refuse(config, rules.float16_problem(shape.model_type, shape.num_experts))
    check_latent(config, shape)
    _check_lora(config, shape)
    check_recompute(config, shape)
    check_context(config, shape)


def check_rollout(config: Config, shape: ModelShape, world_size: int, *, on_gpus: bool) -> None:
    """Heads divide over vLLM's workers, a sequence fits into every limit, the workers onto the ranks' devices."""
    check_served(config, shape, on_gpus=on_gpus)
    _check_lengths(config, shape)
    check_cache(config, shape)
    _check_placement(config, world_size)


def check_served(config: Config, shape: ModelShape, *, on_gpus: bool) -> None:
    """vLLM can serve a model of this shape here; what `check_rollout` asks where nothing is trained, too."""
    check_latent_rollout(config, shape)
    if not on_gpus and find_spec("vllm") is not None:  # a machine that only submits has none
        _check_head_size(config, shape)
    _check_vllm_heads(config, shape)
    _check_positions(config, shape)


def is_served_here(config: Config) -> bool:
    """Whether replicas will be on this machine; not where it only submits."""
    is_here = RAY_ADDRESS not in os.environ and config.rollout.ray_address == "local"
    return is_here and find_spec("vllm") is not None


def check_cache_memory(config: Config) -> None:
    """On CPUs vLLM refuses a worker's KV cache that its host has no memory for, once it has started."""
    size, memory = config.rollout.kv_cache_bytes or 0, psutil.virtual_memory().total
    on_cpus = is_served_here(config) and not visible_devices()
    message = f"rollout.kv_cache_bytes = {size}: more than the memory of this machine"
    remedy = "write less, such as rollout.kv_cache_bytes=1GiB"
    refuse_if(on_cpus and size >= memory, message, memory=f"{memory} bytes, for all processes together", remedy=remedy)


def check_ranks(config: Config, world_size: int) -> None:
    """The parallel sizes divide the ranks."""
    parallel = config.engine.parallel
    message = "engine.parallel.sequence = true: needs engine.parallel.tensor above 1, which is 1"
    remedy = "write engine.parallel.sequence=false, or a larger tensor size"
    refuse_if(parallel.sequence and parallel.tensor == 1, message, remedy=remedy)
    refuse_if(world_size < 1, f"{world_size} ranks", remedy="start at least 1 rank")
    if found := rules.ranks_problem(parallel, world_size):
        raise ConfigError(found.message, choices=found.allowed, remedy=found.remedy)
    _check_trainer_nodes(config, world_size)


def _check_engine_divides(config: Config, shape: ModelShape) -> None:
    parallel = config.engine.parallel
    split_by_tensor = ("num_attention_heads", "num_key_value_heads", *shape.split_sizes, "shared_expert_intermediate_size")
    _check_divides(config, "engine.parallel.tensor", parallel.tensor, shape, split_by_tensor)
    if found := stages.problem(parallel, shape.num_hidden_layers):
        raise ConfigError(found[0], model=config.model.path, remedy=found[1])
    refuse(config, rules.experts_problem(shape, shape.num_experts, config.model.dtype, parallel))


def _check_divides(config: Config, key: str, size: int, shape: ModelShape, names: Sequence[str]) -> None:
    numbers = {name: int(getattr(shape, name)) for name in names}
    for name, number in numbers.items():
        if number % size:
            problem = f"does not divide the model's {name} = {number}"
            raise _wrong_size(config, key, size, problem, rules.divisors(math.gcd(*numbers.values())))


def _wrong_size(config: Config, key: str, size: int, problem: str, good: list[int]) -> ConfigError:
    remedy = f"write {key}={max(choice for choice in good if choice <= size)}"
    return ConfigError(f"{key} = {size}: {problem}", model=config.model.path, choices=", ".join(map(str, good)), remedy=remedy)


def _check_lora(config: Config, shape: ModelShape) -> None:
    lora = config.engine.lora
    if lora.rank == 0:
        if given := lora.model_dump(exclude_defaults=True):
            message = f"engine.lora.rank = 0: there is no adapter that engine.lora.{next(iter(given))} could be for"
            raise ConfigError(message, remedy="write for example engine.lora.rank=32, or leave engine.lora out")
        return
    _check_lora_of_experts(config, shape)
    smallest = min(shape.hidden_size, *_adapted_widths(lora.targets, shape), *low_ranks(lora.targets, shape))
    message = f"engine.lora.rank = {lora.rank}: larger than the model's smallest dimension, {smallest}"
    refuse_if(lora.rank > smallest, message, model=config.model.path, remedy=f"write engine.lora.rank={min(32, smallest)}")
    message = f"engine.lora.rank = {lora.rank}: vLLM serves adapters up to rank {MAX_SERVED_RANK}"
    remedy = f"write engine.lora.sync=merged, or engine.lora.rank={MAX_SERVED_RANK}"
    refuse_if(lora.sync == "adapter" and lora.rank > MAX_SERVED_RANK, message, remedy=remedy)
    if lora.adapter_path:
        try:
            check_peft_folder(lora.adapter_path, lora, config.model.path)
        except ValueError as error:
            raise ConfigError(str(error)) from error


def _adapted_widths(targets: Sequence[str], shape: ModelShape) -> list[int]:
    """Of the linears that `targets` names, the dimension that is not the hidden size; none of multi-latent attention."""
    heads, groups = shape.num_attention_heads, shape.num_key_value_heads
    head = shape.head_dim or shape.hidden_size // heads
    of_mlps = ["moe_intermediate_size", "shared_expert_intermediate_size"] if shape.num_experts else []
    of_mlps += ["intermediate_size"] if not shape.num_experts or shape.first_k_dense_replace else []
    sizes = [getattr(shape, name) for name in of_mlps] if {"linear_fc1", "linear_fc2"} & set(targets) else []
    if not shape.kv_lora_rank:
        sizes += [heads * head] if "linear_proj" in targets else []
        sizes += [(heads + 2 * groups) * head] if "linear_qkv" in targets else []
    return [size for size in sizes if size]


def _check_lora_of_experts(config: Config, shape: ModelShape) -> None:
    """Replicas get the whole merged."""
    if not shape.num_experts:
        return
    lora, model = config.engine.lora, config.model.path
    message = f"engine.lora.sync = adapter: vLLM serves adapters of {shape.model_type} by kernels for GPUs, with experts that "
    message += "are laid out otherwise, which the weight sync does not know"
    lines = {"model": model, "choices": "merged", "remedy": "write engine.lora.sync=merged"}
    refuse_if(lora.sync == "adapter", message, **lines)
    adapted = [target for target in lora.targets if target in ("linear_fc1", "linear_fc2")]
    if not adapted:
        return
    attention = "engine.lora.targets=[linear_proj]" if shape.kv_lora_rank else "engine.lora.targets=[linear_qkv,linear_proj]"
    if found := rules.experts_lora_problem(lora, adapted[0], config.model.dtype):
        refuse(config, found._replace(remedy=f"{found.remedy}, or {attention}"))


def _check_head_size(config: Config, shape: ModelShape) -> None:
    """On CPUs vLLM dies of other sizes at the first token."""
    size = shape.head_dim or shape.hidden_size // shape.num_attention_heads
    choices = ", ".join(str(served) for served in HEADS_ON_CPUS)
    message = f"head_dim = {size} in {config.model.path}: vLLM has no attention of this size on CPUs"
    remedy = "take another model, a machine with a GPU, or write algorithm.name=sft"
    refuse_if(not shape.kv_lora_rank and size not in HEADS_ON_CPUS, message, choices=choices, remedy=remedy)


def _check_vllm_heads(config: Config, shape: ModelShape) -> None:
    rollout = config.rollout
    # vLLM gives each worker whole heads, and whole KV heads or the same one as its neighbours
    heads, kv_heads, size = shape.num_attention_heads, shape.num_key_value_heads, rollout.tensor_parallel
    good = [divisor for divisor in rules.divisors(heads) if kv_heads % divisor == 0 or divisor % kv_heads == 0]
    of_experts = {name: getattr(shape, name) for name in ("moe_intermediate_size", "shared_expert_intermediate_size")}
    of_experts |= {"intermediate_size": shape.intermediate_size} if shape.first_k_dense_replace else {}
    good = [divisor for divisor in good if all(number % divisor == 0 for number in of_experts.values())]
    if size not in good:
        problem = f"does not divide the model's {heads} attention heads and {kv_heads} KV heads"
        problem += "".join(f" and {name} = {number}" for name, number in of_experts.items() if number)
        raise _wrong_size(config, "rollout.tensor_parallel", size, problem, good)


def _check_lengths(config: Config, shape: ModelShape) -> None:
    """A response and one token of a prompt fit everywhere. Prompts: prompts.py."""
    rollout, positions = config.rollout, shape.max_position_embeddings
    allowed = f"more than rollout.max_new_tokens = {rollout.max_new_tokens}"
    limits = {"rollout.max_model_len": rollout.max_model_len, "engine.tokens_per_microbatch": config.engine.tokens_per_microbatch}
    for key, limit in limits.items():
        is_short = limit is not None and limit <= rollout.max_new_tokens
        remedy = f"write {key}={rollout.max_new_tokens + 256} or more, or a lower rollout.max_new_tokens"
        refuse_if(is_short, f"{key} = {limit}: leaves no room for a prompt", allowed=allowed, remedy=remedy)
    model = f"max_position_embeddings = {positions} in {config.model.path}"
    message = f"rollout.max_new_tokens = {rollout.max_new_tokens}: leaves no room for a prompt"
    remedy = f"write rollout.max_new_tokens={positions // 2}"
    refuse_if(0 < positions <= rollout.max_new_tokens, message, model=model, remedy=remedy)


def _check_positions(config: Config, shape: ModelShape) -> None:
    length, positions = config.rollout.max_model_len, shape.max_position_embeddings
    message = f"rollout.max_model_len = {length}: more than the model has positions"
    model = f"max_position_embeddings = {positions} in {config.model.path}"
    is_long = length is not None and 0 < positions < length
    refuse_if(is_long, message, model=model, remedy=f"write rollout.max_model_len={positions} or less")


def check_cache(config: Config, shape: ModelShape) -> None:
    """One sequence fits into the KV cache."""
    rollout = config.rollout
    longest = rollout.max_model_len or shape.max_position_embeddings
    numbers = shape.num_hidden_layers * shape.cached_numbers(rollout.tensor_parallel)
    needed = numbers * DTYPE_BYTES[config.model.dtype] * longest
    message = f"rollout.kv_cache_bytes = {rollout.kv_cache_bytes}: too small for one sequence of {longest} tokens"
    remedy = "write more, or a lower rollout.max_model_len"
    is_small = rollout.kv_cache_bytes is not None and rollout.kv_cache_bytes < needed
    refuse_if(is_small, message, allowed=f"at least {needed}", remedy=remedy)


def _check_trainer_nodes(config: Config, world_size: int) -> None:
    nodes = config.run.trainer_nodes
    message = f"run.trainer_nodes = {nodes}: does not divide the {world_size} trainer ranks"
    good = ", ".join(str(number) for number in rules.divisors(world_size))
    refuse_if(
        nodes and world_size % nodes, message, choices=good, remedy="write one of the choices, or start another --num-ranks"
    )


def _check_placement(config: Config, world_size: int) -> None:
    rollout, transport = config.rollout, config.sync.transport
    message = f"rollout.min_replicas = {rollout.min_replicas}: more than there are"
    allowed, remedy = f"1 to rollout.replicas = {rollout.replicas}", f"write rollout.min_replicas={rollout.replicas}"
    refuse_if(rollout.min_replicas > rollout.replicas, message, allowed=allowed, remedy=remedy)
    lines = {"placement": rollout.placement, "remedy": "write sync.transport=auto"}
    if not rollout.is_colocated:
        message = "sync.transport = ipc: trainer and replicas have GPUs of their own, and ipc is for GPUs that they share"
        refuse_if(transport == "ipc", message, **lines)
        return
    message = "sync.transport = nccl: trainer and replicas share GPUs, and NCCL wants one of its own for each member"
    refuse_if(transport == "nccl", message, **lines)
    message = "sync.transport = delta: trainer and replicas share GPUs, and no slow link is between them"
    refuse_if(transport == "delta", message, **lines)
    message = f"rollout.max_staleness = {rollout.max_staleness}: replicas on the trainer's GPUs sleep while it trains"
    refuse_if(rollout.max_staleness, message, placement=rollout.placement, remedy="write rollout.max_staleness=0")
    workers = rollout.replicas * rollout.tensor_parallel
    message = f"rollout.replicas = {rollout.replicas}: with rollout.tensor_parallel more workers than the trainer has ranks"
    remedy = f"write rollout.replicas={max(1, world_size // rollout.tensor_parallel)} or start {workers} ranks"
    sizes = f"{rollout.replicas} x {rollout.tensor_parallel} = {workers} on {world_size} ranks"
    refuse_if(workers > world_size, message, placement=rollout.placement, workers=sizes, remedy=remedy)


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
