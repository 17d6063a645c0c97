"""What a config.json says that training or vLLM would get wrong: types that are not theirs, features by name. No torch in here.

vLLM 0.32 gives a window to all layers of a model or to none, but for gemma3_text (engine/arg_utils.py:create_engine_config,
model_executor/models/qwen2.py:Qwen2Model); with windows in some layers it would generate with another model than the engine
trains. On types other than theirs transformers 5 raises, on each rank and in vLLM. Leaves out what a window is
(engine/attention/windows.py), sizes and files (folder.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bridge.layout.manifest import ITEM_BYTES
from engine.attention.windows import FAMILIES, FULL, OF_ALL_LAYERS, SLIDING, SWITCHED, layer_types, window
from engine.config import BIASED_ROUTERS, GEMMA, LATENT_FAMILIES, ROPE_BY_LAYER_TYPE, ROPE_TYPES
from megasync.config.errors import ConfigError

GELU = "gelu_pytorch_tanh"
SOFT_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
SMALLEST = {"sliding_window": 0, "max_window_layers": 0, "sliding_window_pattern": 1}
NULL = type(None)
TYPES: dict[str, tuple[tuple[type, ...], str]] = {  # transformers 5.19, by the config classes of all families
    **dict.fromkeys(("tie_word_embeddings", "use_cache", "attention_bias", "use_sliding_window"), ((bool,), "true or false")),
    **dict.fromkeys(("mlp_bias", "qkv_bias", "norm_topk_prob", "use_qk_norm"), ((bool,), "true or false")),
    **dict.fromkeys(("output_router_logits", "rope_interleave"), ((bool,), "true or false")),
    "use_bidirectional_attention": ((bool, NULL), "true or false"),
    **dict.fromkeys(("rms_norm_eps", "initializer_range"), ((float,), "a number with a point, such as 1e-06,")),
    **dict.fromkeys(("routed_scaling_factor", "router_aux_loss_coef"), ((float,), "a number with a point, such as 1.0,")),
    "router_jitter_noise": ((float,), "a number with a point, such as 0.0,"),
    **dict.fromkeys(SOFT_CAPS, ((float, NULL), "a number with a point, such as 30.0,")),
    **dict.fromkeys(("decoder_sparse_step", "query_pre_attn_scalar"), ((int,), "a whole number")),
    **dict.fromkeys(("head_dim", "n_group", "topk_group", "first_k_dense_replace"), ((int, NULL), "a whole number")),
    **dict.fromkeys(("n_shared_experts", "pretraining_tp"), ((int, NULL), "a whole number")),
    "mlp_only_layers": ((list, NULL), "a list of layers' numbers"),
    "id2label": ((dict, NULL), "an object"),
    **dict.fromkeys(("bos_token_id", "pad_token_id"), ((int, NULL), "a token's number")),
    "attention_dropout": ((int, float, NULL), "a number"),
    "max_position_embeddings": ((int,), "a whole number"),
    "eos_token_id": ((int, list, NULL), "a token's number, or a list of them,"),
    "rope_parameters": ((dict, NULL), "an object"),
    "rope_scaling": ((dict, NULL), "an object"),
    "rope_theta": ((int, float, NULL), "a number"),
}
NEVER_NULL = {  # fields that transformers refuses as null for these families, though not for others
    "head_dim": ("qwen3", GEMMA),
    "attention_dropout": ("mistral", "qwen2", "qwen3", "glm4_moe", "mixtral", "qwen2_moe", "qwen3_moe"),
    **dict.fromkeys(("first_k_dense_replace", "topk_group"), ("glm4_moe",)),
}
AT_LEAST = {"rms_norm_eps": 0, "max_position_embeddings": 1, "rope_theta": 1}
REMEDY = "correct it, or download the model again: hf download NAME --local-dir FOLDER"
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
    "rope_scaling beside": "take out of config.json the one that the model was not trained with",
    "rope_type beside": "take out of config.json the one that the model was not trained with",
    "a quantised checkpoint": "convert its weights to bfloat16 and leave quantization_config out of config.json",
    "architectures": "where its weights are those of a language model, write the one ending in ForCausalLM, as its family has it",
    "routers with topk_method": "if it was trained so, write them into config.json: noaux_tc and sigmoid",
}


def refused_windows(family: str, fields: dict[str, Any]) -> dict[str, bool]:
    """Whether it is there, by the feature. `fields`: of config.json, its sizes already checked."""
    if wrong := [name for name, least in SMALLEST.items() if _is_too_small(fields, name, least)]:
        return {f"{wrong[0]} = {fields[wrong[0]]!r} (a whole number of at least {SMALLEST[wrong[0]]} is)": True}
    given, size = fields.get("layer_types"), window(fields)
    if given is not None and not _is_list_of_types(given, fields["num_hidden_layers"]):
        return {f"layer_types = {given!r} ({FULL} or {SLIDING} for each layer is)": True}
    types, knows_types = layer_types(fields), family in FAMILIES and family not in OF_ALL_LAYERS
    has_key, uses_key = (bool(fields.get(key)) for key in ("sliding_window", "use_sliding_window"))
    ignored = f"sliding_window = {fields.get('sliding_window')} on {family}, which only vLLM heeds,"
    taken_for_other = "layer_types on mistral, with which transformers takes it for ministral,"
    of_some = "a sliding window in some of the layers (max_window_layers, layer_types), which vLLM leaves out,"
    of_none = "a sliding window in none of the layers (max_window_layers, layer_types), which vLLM up to 0.26 gives to all,"
    return {
        ignored: family not in FAMILIES and has_key,
        "use_sliding_window = true without a sliding_window": family in SWITCHED and uses_key and not size,
        f"{SLIDING} in layer_types without a sliding_window": SLIDING in types and not size,
        taken_for_other: family == "mistral" and "layer_types" in fields,
        f"layer_types on {family}, which only vLLM heeds,": given not in (None, types) and not knows_types,
        of_some: len(set(types)) > 1 and family != GEMMA,
        of_none: SLIDING not in types and size > 0,
    }


def _is_too_small(fields: dict[str, Any], name: str, least: int) -> bool:
    value = fields.get(name, least)
    return not (value is None and name == "sliding_window") and (type(value) is not int or value < least)


def _is_list_of_types(given: Any, count: int) -> bool:
    return isinstance(given, list) and len(given) == count and all(each in (FULL, SLIDING) for each in given)


def refused_gemma(family: str, fields: dict[str, Any]) -> dict[str, bool]:
    """Whether it is there, by the feature, in Gemma3TextConfig of transformers 5.19."""
    if family != GEMMA:
        return {}
    activation = fields.get("hidden_activation", GELU)
    both_ways = "attention to later tokens (use_bidirectional_attention = true)"
    return {
        f"hidden_activation = {activation!r} ({GELU} is)": activation != GELU,
        both_ways: bool(fields.get("use_bidirectional_attention")),
        **{f"{name} = {fields.get(name)}": bool(fields.get(name)) for name in SOFT_CAPS},
    }


def rope_by_layer_type(fields: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What is said of rotary embeddings for each layer type, as transformers 5 or 4 wrote it for Gemma 3; else {}."""
    given = fields.get("rope_parameters")
    if given is None:
        scaling = fields.get("rope_scaling") or {}
        return {} if any(isinstance(value, dict) for value in scaling.values()) else {FULL: scaling, SLIDING: {}}
    if not isinstance(given, dict) or set(given) - {FULL, SLIDING}:
        return {}
    return {kind: given.get(kind) or {} for kind in (FULL, SLIDING)}


def refused_rope_by_layer_type(fields: dict[str, Any]) -> dict[str, bool]:
    """Whether it is there, by the feature, in a config.json of Gemma 3."""
    ropes = rope_by_layer_type(fields)
    refused = {"rotary embeddings that are not by layer type (rope_parameters)": not ropes}
    for kind, rope in ropes.items():
        type_ = rope.get("rope_type") or rope.get("type") or "default"
        refused[f"rope scaling of type {type_!r} in layers of {kind}"] = type_ not in ROPE_BY_LAYER_TYPE
        number = type(rope.get("factor")) in (int, float)
        refused[f"rope scaling of type 'linear' without a number factor in layers of {kind}"] = type_ == "linear" and not number
        partial = rope.get("partial_rotary_factor", fields.get("partial_rotary_factor"))
        refused[f"partial rotary embedding (partial_rotary_factor = {partial})"] = partial not in (None, 1, 1.0)
    return refused


def check_types(path: Path, fields: Mapping[str, Any]) -> None:
    """ConfigError names the field of config.json, at `path`, its value and what is expected."""
    rope = fields.get("rope_parameters")
    given = {**(rope if isinstance(rope, dict) else {}), **fields}
    for name, (types, expected) in TYPES.items():
        is_null = name in given and given[name] is None and fields.get("model_type") in NEVER_NULL.get(name, ())
        if name in given and (is_null or type(given[name]) not in types):
            raise ConfigError(f"{path}: {name} = {given[name]!r}: {expected} is expected", remedy=REMEDY)
        least = AT_LEAST.get(name)
        if least is not None and given.get(name) is not None and not given[name] >= least:
            raise ConfigError(f"{path}: {name} = {given[name]!r}: at least {least} is expected", remedy=REMEDY)
    for key in ("rope_parameters", "rope_scaling"):
        for name, value in (fields.get(key) or {}).items():
            if name in ("rope_type", "type") and type(value) not in (str, NULL):
                raise ConfigError(f"{path}: {key}.{name} = {value!r}: a word is expected", remedy=REMEDY)
    for name in ("dtype", "torch_dtype"):
        if fields.get(name) is not None and str(fields[name]) not in ITEM_BYTES:
            raise ConfigError(f"{path}: {name} = {fields[name]!r}: is no dtype", choices=", ".join(ITEM_BYTES), remedy=REMEDY)


def _refused_rope_twice(fields: dict[str, Any]) -> dict[str, bool]:
    """transformers 5 and 4 wrote it under other names; where both are there, transformers 5 takes rope_scaling without a word."""
    given = [fields.get(key) or {} for key in ("rope_parameters", "rope_scaling")]
    of_types = [{"rope_type": each.get("type"), **each} for each in given]
    alike = [{name: value for name, value in each.items() if name not in ("type", "rope_theta")} for each in of_types]
    kinds = [(each["type"], each["rope_type"]) for each in given if each.get("type") and each.get("rope_type")]
    return {
        "rope_scaling beside rope_parameters, which says otherwise,": all(given) and alike[0] != alike[1],
        "rope_type beside another type of rope scaling": any(kind != other for kind, other in kinds),
    }


def refused_rope(family: str, fields: dict[str, Any]) -> dict[str, bool]:
    """Whether it is there, by the feature."""
    twice = _refused_rope_twice(fields)
    if family == GEMMA:
        return twice | refused_rope_by_layer_type(fields)
    rope = fields.get("rope_parameters") or fields.get("rope_scaling") or {}  # as transformers 5 or 4 wrote it
    kind = rope.get("rope_type") or rope.get("type") or "default"
    partial = rope.get("partial_rotary_factor", fields.get("partial_rotary_factor"))
    is_partial = family in PARTIAL_ROTARY and partial not in (1, 1.0)  # null stands for a half
    refused_numbers = LATENT_YARN_REFUSED if family in LATENT_FAMILIES else YARN_REFUSED
    absent = [name for name in ROPE_NUMBERS.get(kind, ()) if type(rope.get(name)) not in (int, float)]
    factor, low, high = (rope.get(name) for name in ("factor", "low_freq_factor", "high_freq_factor"))
    is_small: bool = kind != "default" and isinstance(factor, int | float) and factor <= 0
    return {
        **twice,
        "rotary embeddings by layer type (rope_parameters)": any(isinstance(value, dict) for value in rope.values()),
        f"rope scaling of type {kind!r}": kind not in ROPE_TYPES,
        f"rope scaling of type {kind!r} without a number {absent[0] if absent else ''}": bool(absent),
        f"rope scaling with factor = {factor}": is_small,
        f"rope scaling with low_freq_factor = {low}, not below high_freq_factor = {high},": _is_above(low, high),
        **{f"rope scaling of type 'yarn' with {name}": kind == "yarn" and rope.get(name) is not None for name in refused_numbers},
        **_refused_latent_rope(family, kind, rope),
        f"partial rotary embedding (partial_rotary_factor = {partial})": not _can_rotate(family, fields, partial),
        "rope scaling of type 'yarn' with partial_rotary_factor": kind == "yarn" and is_partial,
    }


def _is_above(low: Any, high: Any) -> bool:
    return isinstance(low, int | float) and isinstance(high, int | float) and low >= high


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
