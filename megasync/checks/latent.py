"""Can a model with multi-latent attention be trained and served like this? No torch in here.

Leaves out what its config.json may say (hf/features.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.config import LATENT_TARGETS, LORA_TARGETS
from megasync.config.errors import refuse_if
from megasync.config.schema import Config
from megasync.hf.model_shape import ModelShape

SERVED = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}  # vllm/v1/attention/backends/mla: of each GPU, and of CPUs
OF_QUERIES = "linear_q_"


def check_latent(config: Config, shape: ModelShape) -> None:
    """The linears of attention are others than where all heads are projected at once."""
    lora, is_latent = config.engine.lora, bool(shape.kv_lora_rank)
    if not lora.rank:
        return
    of_attention = [target for target in LATENT_TARGETS if shape.q_lora_rank or not target.startswith(OF_QUERIES)]
    there = [*of_attention, "linear_fc1", "linear_fc2"] if is_latent else LORA_TARGETS
    missing = [target for target in lora.targets if target not in there]
    message = f"engine.lora.targets = {', '.join(lora.targets)}: no adapters beside {', '.join(missing)} in {shape.model_type}"
    remedy = "write engine.lora.targets=[linear_proj]" if is_latent else f"leave {', '.join(missing)} out"
    refuse_if(missing, message, model=config.model.path, choices=", ".join(there), remedy=remedy)


def low_ranks(targets: Sequence[str], shape: ModelShape) -> list[int]:
    """The smallest dimensions of the linears of multi-latent attention that `targets` names."""
    sizes = {
        "linear_q_down_proj": shape.q_lora_rank,
        "linear_q_up_proj": shape.q_lora_rank,
        "linear_kv_down_proj": shape.kv_lora_rank + shape.qk_rope_head_dim,
        "linear_kv_up_proj": shape.kv_lora_rank,
        "linear_proj": shape.num_attention_heads * shape.v_head_dim,
    }
    return [sizes[target] for target in targets if shape.kv_lora_rank and target in sizes]


def check_latent_rollout(config: Config, shape: ModelShape) -> None:
    """vLLM has kernels for the sizes of DeepSeek-V2 and later."""
    for name, size in SERVED.items():
        message = f"{name} = {getattr(shape, name)} in {config.model.path}: vLLM's multi-latent attention has no kernels for it"
        is_wrong = shape.kv_lora_rank and getattr(shape, name) != size
        refuse_if(is_wrong, message, allowed=str(size), remedy="take another model, or write algorithm.name=sft")
