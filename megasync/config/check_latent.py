"""Can a model with multi-latent attention be trained and served like this? No torch in here.

Leaves out what its config.json may say (model_features.py) and context parallelism (check_memory.py).
"""

from __future__ import annotations

from megasync.config.errors import refuse_if
from megasync.config.model_folder import ModelShape
from megasync.config.schema import Config

SERVED = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}  # vllm/v1/attention/backends/mla: of each GPU, and of CPUs
ADAPTED = ("linear_proj",)


def check_latent(config: Config, shape: ModelShape) -> None:
    """Adapters go beside the output of attention alone; engine/lora.py:add_adapters says the same."""
    lora = config.engine.lora
    others = [target for target in lora.targets if target not in ADAPTED]
    message = f"engine.lora.targets = {', '.join(lora.targets)}: no adapters beside {', '.join(others)} with the multi-latent "
    message += f"attention and the routers of {shape.model_type}"
    is_wrong = shape.kv_lora_rank and lora.rank and others
    refuse_if(is_wrong, message, model=config.model.path, choices="linear_proj", remedy="write engine.lora.targets=[linear_proj]")


def check_latent_rollout(config: Config, shape: ModelShape) -> None:
    """vLLM has kernels for the sizes of DeepSeek-V2 and later."""
    for name, size in SERVED.items():
        message = f"{name} = {getattr(shape, name)} in {config.model.path}: vLLM's multi-latent attention has no kernels for it"
        is_wrong = shape.kv_lora_rank and getattr(shape, name) != size
        refuse_if(is_wrong, message, allowed=str(size), remedy="take another model, or write algorithm.name=sft")
