"""Sliding windows: to how many tokens each layer attends, as transformers 5.19 reads a config.json. No torch in here.

Leaves out attention itself (core.py, flash.py, context.py) and refused models (megasync/models/features.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.config import DELTA_NET_FAMILIES

FULL, SLIDING, DELTA_NET = "full_attention", "sliding_attention", "linear_attention"  # values of `layer_types`
WINDOW = 4096  # `sliding_window` where config.json says nothing: MistralConfig, Qwen2Config, Gemma3TextConfig and others
GPT_OSS_WINDOW = 128  # GptOssConfig's
OF_ALL_LAYERS = ("mistral", "mixtral", "qwen3_moe")  # families that read no `layer_types`
SWITCHED = ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe")  # families without a window but with `use_sliding_window`
FAMILIES = ("gemma3_text", "gpt_oss", "mistral", "mixtral", "olmo3", *SWITCHED)  # all that know windows


def window(fields: Mapping[str, Any]) -> int:
    """Tokens that one of a layer with a window attends to, itself counted; 0: no layer has one. `fields`: of config.json."""
    family = fields["model_type"]
    if family not in FAMILIES or (family in SWITCHED and not fields.get("use_sliding_window")):
        return 0
    default = {"mixtral": None, "gpt_oss": GPT_OSS_WINDOW}.get(family, WINDOW)
    return fields.get("sliding_window", default) or 0


def layer_types(fields: Mapping[str, Any]) -> list[str]:
    """SLIDING, FULL or DELTA_NET for each layer: `layer_types`, or what transformers puts in its place."""
    family, has_window, numbers = fields["model_type"], window(fields) > 0, range(fields["num_hidden_layers"])
    if family in DELTA_NET_FAMILIES:
        given, interval = fields.get("layer_types"), fields.get("full_attention_interval")
        interval = interval if type(interval) is int and interval > 0 else 4  # features.py refuses others
        return given if isinstance(given, list) else [DELTA_NET if (number + 1) % interval else FULL for number in numbers]
    if family in OF_ALL_LAYERS or family not in FAMILIES:
        return [SLIDING if has_window else FULL for _ in numbers]
    if (given := fields.get("layer_types")) is not None:
        return list(given)
    first = fields.get("max_window_layers", 28)
    if family == "gemma3_text":
        slides = [(number + 1) % fields.get("sliding_window_pattern", 6) != 0 for number in numbers]
    elif family == "olmo3":
        slides = [(number + 1) % 4 != 0 for number in numbers]
    elif family == "gpt_oss":
        slides = [number % 2 == 0 for number in numbers]
    elif family == "qwen2_moe":
        slides = [has_window and number % 2 == 0 and number < first for number in numbers]
    else:
        slides = [has_window and number >= first for number in numbers]
    return [SLIDING if each else FULL for each in slides]


def layer_windows(fields: Mapping[str, Any]) -> tuple[int, ...]:
    """For each layer the tokens that one attends to, itself included (masking_utils.py:sliding_window_overlay); 0: all."""
    size = window(fields)
    return tuple(size if kind == SLIDING else 0 for kind in layer_types(fields))


def layer_reaches(fields: Mapping[str, Any], chunk: int) -> tuple[int, ...]:
    """For each layer the tokens that one is multiplied with; 0: all. `chunk`: those of a gated delta net's chunk."""
    of_layers = zip(layer_types(fields), layer_windows(fields), strict=True)
    return tuple(chunk if kind == DELTA_NET else size for kind, size in of_layers)


def config_arguments(hf_config: Any) -> dict[str, Any]:
    """Fields of megatron-core's TransformerConfig, for mbridge's set_extra_args. `window_size` leaves the token itself out."""
    windows = layer_windows(hf_config.to_dict())
    if not any(windows):
        return {}
    return {"window_size": (max(windows) - 1, 0), "window_attn_skip_freq": [int(size > 0) for size in windows]}


def layer_window(config: Any, layer_number: int) -> int:
    """A layer's window, of a TransformerConfig with the fields above; 0: none. `layer_number`: counted from 1."""
    if config.window_size is None or not config.window_attn_skip_freq[layer_number - 1]:
        return 0
    return int(config.window_size[0]) + 1
