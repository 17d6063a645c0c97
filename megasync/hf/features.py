"""What a config.json asks for that the engine's layers do not compute: features by name. No torch in here.

Leaves out sliding windows (windows.py), sizes and files (folder.py).
"""

from __future__ import annotations

from typing import Any

from engine.config import BIASED_ROUTERS, GEMMA, LATENT_FAMILIES, ROPE_TYPES
from megasync.hf.windows import refused_rope_by_layer_type

REFUSED_FAMILIES = {  # those that mbridge knows, and relatives, by what the engine would compute wrongly
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
LATENT_YARN_REFUSED = ("attention_factor", "truncate")  # the same; of the other two vLLM has other defaults
PARTIAL_ROTARY = ("glm4_moe",)  # families with it; the factor is a half where config.json says nothing
SCORED_EXPERTS = 2  # of each group: transformers 5.19, Glm4MoeTopkRouter; megatron-core 0.16.1, moe_utils.py:group_limited_topk
ROUTER_DEFAULTS = {  # where config.json says nothing: transformers 5.19, DeepseekV3Config, Glm4MoeConfig
    "deepseek_v3": {"n_group": 8, "topk_group": 4, "num_experts_per_tok": 8, "first_k_dense_replace": 3},
    "glm4_moe": {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 1},
}
QUERY_RANK = 1536  # transformers 5.19, DeepseekV3Config.q_lora_rank
REMEDIES = {  # for features that begin like this
    "a quantised checkpoint": "convert its weights to bfloat16 and leave quantization_config out of config.json",
    "architectures": "where its weights are those of a language model, write the one ending in ForCausalLM, as its family has it",
    "routers with topk_method": "if it was trained so, write them into config.json: noaux_tc and sigmoid",
}


def refused_rope(family: str, fields: dict[str, Any]) -> dict[str, bool]:
    """Whether it is there, by the feature."""
    if family == GEMMA:
        return refused_rope_by_layer_type(fields)
    rope = fields.get("rope_parameters") or fields.get("rope_scaling") or {}  # as transformers 5 or 4 wrote it
    kind = rope.get("rope_type") or rope.get("type") or "default"
    partial = rope.get("partial_rotary_factor", fields.get("partial_rotary_factor"))
    is_partial = family in PARTIAL_ROTARY and partial not in (1, 1.0)  # null stands for a half
    refused_numbers = LATENT_YARN_REFUSED if family in LATENT_FAMILIES else YARN_REFUSED
    absent = [name for name in ROPE_NUMBERS.get(kind, ()) if type(rope.get(name)) not in (int, float)]
    return {
        "rotary embeddings by layer type (rope_parameters)": any(isinstance(value, dict) for value in rope.values()),
        f"rope scaling of type {kind!r}": kind not in ROPE_TYPES,
        f"rope scaling of type {kind!r} without a number {absent[0] if absent else ''}": bool(absent),
        **{f"rope scaling of type 'yarn' with {name}": kind == "yarn" and rope.get(name) is not None for name in refused_numbers},
        **_refused_latent_rope(family, kind, rope),
        f"partial rotary embedding (partial_rotary_factor = {partial})": not _can_rotate(family, fields, partial),
        "rope scaling of type 'yarn' with partial_rotary_factor": kind == "yarn" and is_partial,
    }


def _can_rotate(family: str, fields: dict[str, Any], factor: Any) -> bool:
    """Whether the first elements of a head, or all of them, are turned, and are an even number."""
    if factor in (None, 1, 1.0):
        return True
    size = fields.get("head_dim") or fields.get("hidden_size", 0) // (fields.get("num_attention_heads") or 1)
    return family in PARTIAL_ROTARY and type(factor) is float and 0 < factor < 1 and int(size * factor) % 2 == 0


def refused_router(family: str, fields: dict[str, Any]) -> dict[str, bool]:
    """Whether it is there, by the feature, in a family of BIASED_ROUTERS."""
    if family not in BIASED_ROUTERS:
        return {}
    fields = ROUTER_DEFAULTS[family] | fields
    dense, layers = fields["first_k_dense_replace"], fields.get("num_hidden_layers", 0)
    num_chosen, groups, chosen_groups = (fields[name] for name in ("num_experts_per_tok", "n_group", "topk_group"))
    has_other_groups = groups != 1 and (not chosen_groups or num_chosen // chosen_groups != SCORED_EXPERTS)
    return {
        f"tie_word_embeddings = true on {family}, which vLLM ignores,": bool(fields.get("tie_word_embeddings")),
        "a router whose weights are not normalised (norm_topk_prob = false)": not fields.get("norm_topk_prob", True),
        f"a router that chooses groups (n_group = {groups}) by other than the best {SCORED_EXPERTS} experts of each "
        "(num_experts_per_tok // topk_group)": has_other_groups,
        f"no shared expert (n_shared_experts = {fields.get('n_shared_experts', 1)})": not fields.get("n_shared_experts", 1),
        f"no layer with experts (first_k_dense_replace = {dense})": (dense or 0) >= layers,
    }


def _refused_latent_rope(family: str, kind: str, rope: dict[str, Any]) -> dict[str, bool]:
    """vLLM takes every type but `default` for yarn, and computes with 1 and 0 where the two numbers are not given."""
    if family not in LATENT_FAMILIES:
        return {}
    numbers = [rope.get(name) for name in ("mscale", "mscale_all_dim")]
    are_alike = numbers == [None, None] or all(numbers)
    return {
        f"rope scaling of type {kind!r} with multi-latent attention": kind not in ("default", "yarn"),
        "rope scaling of type 'yarn' with one of mscale and mscale_all_dim": kind == "yarn" and not are_alike,
    }


def refused_latent(family: str, fields: dict[str, Any]) -> dict[str, bool]:
    """Whether it is there, by the feature, in a family of LATENT_FAMILIES; most of it vLLM and transformers read differently."""
    if family not in LATENT_FAMILIES:
        return {}
    heads, method, scores = (fields.get(name) for name in ("num_attention_heads", "topk_method", "scoring_func"))
    groups, every = fields.get("num_key_value_heads", heads), fields.get("moe_layer_freq", 1)
    value, plain, turned = (fields.get(name) or 0 for name in ("v_head_dim", "qk_nope_head_dim", "qk_rope_head_dim"))
    has_biases = (method, scores) == ("noaux_tc", "sigmoid")
    return {
        f"KV heads of their own with multi-latent attention (num_key_value_heads = {groups})": groups not in (None, heads),
        "rotary embedding of halves (rope_interleave = false), which vLLM ignores,": fields.get("rope_interleave") is False,
        f"qk_rope_head_dim = {turned}, an odd number,": turned % 2 == 1,
        f"v_head_dim = {value}, more than queries have ({plain} + {turned}),": value > plain + turned,
        f"routers with topk_method = {method!r} and scoring_func = {scores!r}: vLLM loads no router bias then,": not has_biases,
        f"layers without experts (moe_layer_freq = {every!r}, 1 is)": every != 1,
        "sparse attention (index_topk)": fields.get("index_topk") is not None,
    }
