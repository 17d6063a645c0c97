"""Settings excluded by `rollout.dtype: fp8`: keys, families, sizes, and machines without vLLM's FP8 kernels. No torch in here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from engine.config import DELTA_NET_FAMILIES, GPT_OSS, LATENT_FAMILIES
from megasync.checks.served_sizes import is_served_here
from megasync.config.errors import ConfigError, wrong
from megasync.config.schema import Config
from megasync.launch.devices import compute_capabilities
from megasync.models.folder import is_vision_language
from megasync.models.model_shape import ModelShape

KEY, REMEDY = "rollout.dtype", "write rollout.dtype=model"
OTHER_LINEARS = (*LATENT_FAMILIES, *DELTA_NET_FAMILIES, GPT_OSS)  # vLLM derives weights of some, or fuses quantised ones
MULTIPLE = 16  # of rows and columns of a worker's weights: vLLM pads others after loading
MIN_CAPABILITY = 8.9  # vllm 0.26, compressed_tensors_w8a8_fp8.py: others compute in 16 bits, with weights in another order


def fp8_errors(config: Config, shape: ModelShape, *, on_gpus: bool) -> Iterator[ConfigError]:
    """Errors for everything that quantised replicas exclude."""
    if config.rollout.dtype != "fp8":
        return
    yield from _key_errors(config)
    model = {"model": config.model.path}
    if shape.model_type in OTHER_LINEARS or is_vision_language(Path(config.model.path)):
        yield wrong(config, KEY, f"linears of {shape.model_type} in this folder are not quantised", **model, remedy=REMEDY)
    if shape.num_experts and not on_gpus:
        remedy = f"{REMEDY}, or take a machine with GPUs"
        yield wrong(config, KEY, "vLLM has experts in FP8 on GPUs alone", **model, remedy=remedy)
    for name, size in _worker_sizes(config, shape).items():
        if size % MULTIPLE:
            problem = f"{name} of a worker is {size}, and vLLM multiplies in FP8 by multiples of {MULTIPLE}"
            yield wrong(config, KEY, problem, **model, remedy=f"{REMEDY}, or a smaller rollout.tensor_parallel")


def check_capability(config: Config) -> None:
    """ConfigError where the replicas will be on GPUs of this machine that do not multiply in FP8."""
    if config.rollout.dtype != "fp8" or not is_served_here(config):
        return
    if slow := [each for each in compute_capabilities() if each < MIN_CAPABILITY]:
        problem = f"a GPU of this machine has compute capability {slow[0]}"
        raise wrong(config, KEY, problem, needs=f"{MIN_CAPABILITY} or more", remedy=REMEDY)


def _key_errors(config: Config) -> Iterator[ConfigError]:
    lora, beside = config.engine.lora, f"rollout.dtype = {config.rollout.dtype}"
    if config.model.dtype == "float32":
        lines = {"choices": "bfloat16, float16", "remedy": f"write model.dtype=bfloat16, or {REMEDY.removeprefix('write ')}"}
        yield wrong(config, "model.dtype", f"{beside} is for a trainer in 16 bits", **lines)
    if lora.rank and lora.sync == "adapter":
        problem = f"{beside} quantises weights that are sent, and adapters are served on those of the folder"
        yield wrong(config, "engine.lora.sync", problem, choices="merged", remedy="write engine.lora.sync=merged")
    if "moe_backend" in config.rollout.engine_arguments:
        key = "rollout.engine_arguments.moe_backend"
        problem = f"{key}: {beside} has vLLM's Triton kernels for experts: others keep more than weights, which sleeping loses"
        yield ConfigError(problem, remedy=f"leave {key} out")
    if config.sync.transport == "delta":
        problem = f"{beside}: late replicas would be restored from the log, which has weights that are not quantised"
        yield wrong(config, "sync.transport", problem, choices="auto, shm, nccl, ipc", remedy="write sync.transport=auto")


def _worker_sizes(config: Config, shape: ModelShape) -> dict[str, int]:
    """Rows or columns of linears that are cut over tensor-parallel workers, and the hidden size, which is not."""
    workers = config.rollout.tensor_parallel
    head = shape.head_dim or shape.hidden_size // shape.num_attention_heads
    sizes = {
        "heads x head_dim": shape.num_attention_heads // workers * head,
        "KV heads x head_dim": max(1, shape.num_key_value_heads // workers) * head,
    }
    widths = (*shape.split_sizes, "shared_expert_intermediate_size")
    return {"hidden_size": shape.hidden_size, **sizes, **{name: getattr(shape, name) // workers for name in widths}}
