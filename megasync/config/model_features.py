"""What a config.json asks for that the engine's layers do not compute: features by name. No torch in here.

Leaves out sizes and files: see model_folder.py.
"""

from __future__ import annotations

from typing import Any

from engine.config import ROPE_TYPES

ROUTER = "a sigmoid router with a correction bias"
REFUSED_FAMILIES = {  # those that mbridge knows, and relatives, by what the engine would compute wrongly
    "deepseek_v3": f"multi-latent attention and {ROUTER}",
    "gemma3": "vision layers and sliding-window attention",
    "gemma3_text": "sliding-window attention, norms after the sublayers and a GELU that gates",
    "glm4_moe": f"partial rotary embedding (partial_rotary_factor) and {ROUTER}",
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
MISTRAL_WINDOW = 4096  # transformers 5.19, MistralConfig.sliding_window, where config.json says nothing


def rope_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """As transformers 5 (rope_parameters) or 4 (rope_scaling) wrote them."""
    rope: dict[str, Any] = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    return rope


def refused_rope(fields: dict[str, Any]) -> dict[str, bool]:
    """Whether it is there, by the feature."""
    rope = rope_fields(fields)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    partial = rope.get("partial_rotary_factor", fields.get("partial_rotary_factor"))
    absent = [name for name in ROPE_NUMBERS.get(kind, ()) if type(rope.get(name)) not in (int, float)]
    return {
        "rotary embeddings by layer type (rope_parameters)": any(isinstance(value, dict) for value in rope.values()),
        f"rope scaling of type {kind!r}": kind not in ROPE_TYPES,
        f"rope scaling of type {kind!r} without a number {absent[0] if absent else ''}": bool(absent),
        **{f"rope scaling of type 'yarn' with {name}": kind == "yarn" and rope.get(name) is not None for name in YARN_REFUSED},
        f"partial rotary embedding (partial_rotary_factor = {partial})": partial not in (None, 1, 1.0),
    }


def sliding_window(family: str, fields: dict[str, Any]) -> int:
    """Tokens up to which the attention of this family's layers is that of all tokens; 0: always."""
    default = MISTRAL_WINDOW if family == "mistral" else None
    window = fields.get("sliding_window", default) if family in ("mistral", "mixtral") else None
    return int(window or 0)
