"""Differences between model families that mbridge 0.15.1 lacks: whose bridge a family uses, fields under other names, layers.

Leaves out what all families' layers have (build.py) and rotary embeddings (rope.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engine.config import BIASED_ROUTERS, DELTA_NET_FAMILIES, GEMMA, GPT_OSS, OLMO3, PREDICTORS, SMOLLM3
from engine.model.families import gemma, gpt_oss, kimi_k2, olmo3, qwen3_5
from engine.model.families import qwen3_next  # noqa: F401 - it registers a bridge
from engine.runtime import workarounds

# families that mbridge does not list: with another's layers and names
BRIDGE_OF = {"mistral": "llama", SMOLLM3: "llama", "seed_oss": "qwen2", **dict.fromkeys((GEMMA, OLMO3), "qwen3")}
BRIDGE_OF |= dict.fromkeys(("glm4_moe_lite", kimi_k2.NAME), "deepseek_v3")
NAMES = dict.fromkeys((GEMMA, OLMO3), gemma.NAMES)  # or most of them: the names to add to mbridge's tables
# families with layers of their own
LAYERS: dict[str, Callable[[Any, Any, int], None]] = {GEMMA: gemma.use_layers, GPT_OSS: gpt_oss.use_layers}
LAYERS[OLMO3] = olmo3.use_layers
LAYERS |= dict.fromkeys(DELTA_NET_FAMILIES, qwen3_5.use_layers)


def complete(hf_config: Any) -> None:
    """Set the fields that mbridge and the engine read, where this family or version of transformers has them otherwise."""
    hf_config.rope_theta = workarounds.rope_theta(hf_config)
    hf_config.head_dim = workarounds.head_dim(hf_config)
    if hf_config.model_type in ("mixtral", GPT_OSS):
        hf_config.moe_intermediate_size = hf_config.intermediate_size
        hf_config.norm_topk_prob = True  # transformers 5.19, modeling_mixtral.py:MixtralTopKRouter, and gpt_oss
    if hf_config.model_type in BIASED_ROUTERS:
        hf_config.num_experts = hf_config.n_routed_experts
    if hf_config.model_type == "glm4_moe_lite":
        hf_config.first_k_dense_replace = hf_config.mlp_layer_types.count("dense")
    if hf_config.model_type == "qwen3_5_moe_text":
        hf_config.intermediate_size = hf_config.moe_intermediate_size  # of dense layers; the model has none
        hf_config.norm_topk_prob = True  # transformers 5.19, modeling_qwen3_5_moe.py:Qwen3_5MoeTopKRouter
    if hf_config.model_type in ("glm4_moe", *DELTA_NET_FAMILIES):
        hf_config.partial_rotary_factor = hf_config.rope_parameters["partial_rotary_factor"]


def describe(hf_config: Any) -> list[str]:
    """Lines for the log about weights of the folder that are not trained."""
    count = max(getattr(hf_config, name, None) or 0 for name in PREDICTORS)
    return [f"{hf_config.model_type}: layers of multi-token prediction ({count}) are not trained nor exported"] if count else []


def config_arguments(hf_config: Any) -> dict[str, Any]:
    """Fields of megatron-core's TransformerConfig in which mbridge's are wrong for this model; for set_extra_args."""
    if hf_config.model_type == GEMMA:
        return gemma.config_arguments(hf_config)
    if hf_config.model_type == OLMO3:
        return olmo3.config_arguments()
    if hf_config.model_type not in BIASED_ROUTERS:
        return {}
    groups = hf_config.n_group if hf_config.n_group > 1 else None  # with one there is nothing to choose
    return {
        "add_qkv_bias": hf_config.attention_bias,
        "moe_router_num_groups": groups,
        "moe_router_group_topk": hf_config.topk_group if groups else None,
    }


def use_layers(layer: Any, config: Any, hf_config: Any, number: int) -> None:
    """Put the family's own modules into megatron-core's spec of a transformer layer. `number`: the model's layer, from 0."""
    if use := LAYERS.get(hf_config.model_type):
        use(layer, config, number)
