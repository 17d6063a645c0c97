"""What a config.json asks for that the engine's layers do not compute: features by name. No torch in here.

Leaves out sliding windows (model_windows.py), sizes and files (model_folder.py).
"""

from __future__ import annotations

from typing import Any

from engine.config import BIASED_ROUTERS, GEMMA, ROPE_TYPES
from megasync.config.model_windows import refused_rope_by_layer_type

ROUTER = "a sigmoid router with a correction bias"
REFUSED_FAMILIES = {  # those that mbridge knows, and relatives, by what the engine would compute wrongly
    "deepseek_v3": f"multi-latent attention and {ROUTER}",
    "gemma3": "vision layers",
    "glm4v": "vision layers",
    "glm4v_moe": "vision layers",
    "internvl_chat": "vision layers",
    "mimo": "multi-token prediction (num_nextn_predict_layers)",
    "qwen2_5_vl": "vision layers",
}
ROPE_NUMBERS = {  # what a type of rope scaling needs, and has no default
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}
YARN_REFUSED = ("attention_factor", "mscale", "mscale_all_dim")  # transformers and versions of vLLM read them differently
PARTIAL_ROTARY = ("glm4_moe",)  # families with it; the factor is a half where config.json says nothing
SCORED_EXPERTS = 2  # of each group: transformers 5.19, Glm4MoeTopkRouter; megatron-core 0.16.1, moe_utils.py:group_limited_topk


def rope_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """As transformers 5 (rope_parameters) or 4 (rope_scaling) wrote them."""
    rope: dict[str, Any] = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    return rope


def refused_rope(family: str, fields: dict[str, Any]) -> dict[str, bool]:
    """Whether it is there, by the feature."""
    if family == GEMMA:
        return refused_rope_by_layer_type(fields)
    rope = rope_fields(fields)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    partial = rope.get("partial_rotary_factor", fields.get("partial_rotary_factor"))
    absent = [name for name in ROPE_NUMBERS.get(kind, ()) if type(rope.get(name)) not in (int, float)]
    return {
        "rotary embeddings by layer type (rope_parameters)": any(isinstance(value, dict) for value in rope.values()),
        f"rope scaling of type {kind!r}": kind not in ROPE_TYPES,
        f"rope scaling of type {kind!r} without a number {absent[0] if absent else ''}": bool(absent),
        **{f"rope scaling of type 'yarn' with {name}": kind == "yarn" and rope.get(name) is not None for name in YARN_REFUSED},
        f"partial rotary embedding (partial_rotary_factor = {partial})": not _can_rotate(family, fields, partial),
        "rope scaling of type 'yarn' with partial_rotary_factor": kind == "yarn" and _is_partial(family, partial),
    }


def _is_partial(family: str, factor: Any) -> bool:
    return family in PARTIAL_ROTARY and factor not in (1, 1.0)  # null stands for a half


def _can_rotate(family: str, fields: dict[str, Any], factor: Any) -> bool:
    """Whether the first elements of a head, or all of them, are turned, and are an even number."""
    if factor in (None, 1, 1.0):
        return True
    size = fields.get("head_dim") or fields.get("hidden_size", 0) // (fields.get("num_attention_heads") or 1)
    return family in PARTIAL_ROTARY and type(factor) is float and 0 < factor < 1 and int(size * factor) % 2 == 0


def refused_router(family: str, fields: dict[str, Any]) -> dict[str, bool]:
    """Whether it is there, by the feature, in a family of BIASED_ROUTERS. Defaults: transformers 5.19, Glm4MoeConfig."""
    if family not in BIASED_ROUTERS:
        return {}
    dense, layers = fields.get("first_k_dense_replace", 1), fields.get("num_hidden_layers", 0)
    num_chosen, groups, chosen_groups = (fields.get(name, 1) for name in ("num_experts_per_tok", "n_group", "topk_group"))
    has_other_groups = groups != 1 and (not chosen_groups or num_chosen // chosen_groups != SCORED_EXPERTS)
    return {
        f"tie_word_embeddings = true on {family}, which vLLM ignores,": bool(fields.get("tie_word_embeddings")),
        "a router whose weights are not normalised (norm_topk_prob = false)": not fields.get("norm_topk_prob", True),
        "a router that chooses one expert (num_experts_per_tok = 1)": num_chosen == 1,
        f"a router that chooses groups (n_group = {groups}) by other than the best {SCORED_EXPERTS} experts of each "
        "(num_experts_per_tok // topk_group)": has_other_groups,
        f"no shared expert (n_shared_experts = {fields.get('n_shared_experts', 1)})": not fields.get("n_shared_experts", 1),
        f"no layer with experts (first_k_dense_replace = {dense})": (dense or 0) >= layers,
    }
