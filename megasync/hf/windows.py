"""What config.json says of sliding windows, and of Gemma 3 whose layers differ by them: features that are refused, by name.

vLLM 0.32 gives a window to all layers of a model or to none, but for gemma3_text (engine/arg_utils.py:create_engine_config,
model_executor/models/qwen2.py:Qwen2Model); with windows in some layers it would generate with another model than the engine
trains. No torch in here. Leaves out what a window is (engine/attention/windows.py).
"""

from __future__ import annotations

from typing import Any

from engine.attention.windows import FAMILIES, FULL, OF_ALL_LAYERS, SLIDING, SWITCHED, layer_types, window
from engine.config import GEMMA, ROPE_BY_LAYER_TYPE

GELU = "gelu_pytorch_tanh"
SOFT_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
SMALLEST = {"sliding_window": 0, "max_window_layers": 0, "sliding_window_pattern": 1}


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
