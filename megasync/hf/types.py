"""The types of what config.json says, where transformers 5 raises on any other, on each rank and in vLLM. No torch in here.

Leaves out sizes (folder.py) and what the engine has no layers for (features.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bridge.layout.manifest import ITEM_BYTES
from megasync.config.errors import ConfigError

NULL = type(None)
TYPES: dict[str, tuple[tuple[type, ...], str]] = {  # transformers 5.19, by the config classes of all families
    **dict.fromkeys(("tie_word_embeddings", "use_cache", "attention_bias", "use_sliding_window"), ((bool,), "true or false")),
    **dict.fromkeys(("rms_norm_eps", "initializer_range"), ((float,), "a number with a point, such as 1e-06,")),
    **dict.fromkeys(("bos_token_id", "pad_token_id"), ((int, NULL), "a token's number")),
    "attention_dropout": ((int, float, NULL), "a number"),
    "max_position_embeddings": ((int,), "a whole number"),
    "eos_token_id": ((int, list, NULL), "a token's number, or a list of them,"),
    "rope_parameters": ((dict, NULL), "an object"),
    "rope_scaling": ((dict, NULL), "an object"),
    "rope_theta": ((int, float, NULL), "a number"),
}
AT_LEAST = {"rms_norm_eps": 0, "max_position_embeddings": 1, "rope_theta": 1}
REMEDY = "correct it, or download the model again: hf download NAME --local-dir FOLDER"


def check_types(path: Path, fields: Mapping[str, Any]) -> None:
    """ConfigError names the field of config.json, at `path`, its value and what is expected."""
    rope = fields.get("rope_parameters")
    given = {**(rope if isinstance(rope, dict) else {}), **fields}
    for name, (types, expected) in TYPES.items():
        if name in given and type(given[name]) not in types:
            raise ConfigError(f"{path}: {name} = {given[name]!r}: {expected} is expected", remedy=REMEDY)
        least = AT_LEAST.get(name)
        if least is not None and given.get(name) is not None and not given[name] >= least:
            raise ConfigError(f"{path}: {name} = {given[name]!r}: at least {least} is expected", remedy=REMEDY)
    for key in ("rope_parameters", "rope_scaling"):
        for name, value in (fields.get(key) or {}).items():
            if name in ("rope_type", "type") and type(value) not in (str, NULL):
                raise ConfigError(f"{path}: {key}.{name} = {value!r}: a word is expected", remedy=REMEDY)
    for name in ("dtype", "torch_dtype"):
        if fields.get(name) is not None and fields[name] not in ITEM_BYTES:
            raise ConfigError(f"{path}: {name} = {fields[name]!r}: is no dtype", choices=", ".join(ITEM_BYTES), remedy=REMEDY)
