"""The fields of config.json by which models of the same weights compute different values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine.attention.windows import layer_types, layer_windows
from engine.config import LIKE, PREDICTORS
from megasync.models.declared import declared_fields
from megasync.models.folder import model_fields

NOT_COMPUTED = {  # names of tokens, the start and the loss of another training, what a call returns
    *("architectures", "attention_dropout", "bos_token_id", "dtype", "eos_token_id", "initializer_range", "output_attentions"),
    *("output_hidden_states", "output_router_logits", "pad_token_id", "return_dict", "router_aux_loss_coef"),
    *("transformers_version", "use_cache", *PREDICTORS),
}
ELSEWHERE = {  # whose effect is in rope_parameters, layer_types, no_rope_layers or the windows of all layers
    *("max_position_embeddings", "max_window_layers", "no_rope_layer_interval", "partial_rotary_factor"),
    *("rope_local_base_freq", "rope_scaling", "rope_theta", "sliding_window_pattern", "use_sliding_window"),
}


def different_fields(own: Path, other: Path) -> list[str]:
    """Names of the computed fields that differ between two checked model folders of one family, sorted.

    Where the files differ, transformers reads both: a field may be left out, or have another name or form in another version.
    That import takes seconds.
    """
    mine, theirs = model_fields(own), model_fields(other)
    if all(mine.get(name) == theirs.get(name) for name in (mine.keys() | theirs.keys()) - NOT_COMPUTED):
        return []
    mine, theirs = _computed(mine), _computed(theirs)
    return sorted(name for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name))


def _computed(fields: dict[str, Any]) -> dict[str, Any]:
    from transformers import AutoConfig

    family = LIKE.get(fields["model_type"], fields["model_type"])
    read = AutoConfig.for_model(family, **{name: value for name, value in fields.items() if name != "model_type"}).to_dict()
    found = {name: read.get(name) for name in {*declared_fields(family), "rope_parameters"} - NOT_COMPUTED - ELSEWHERE}
    if found.get("no_rope_layers"):
        found["no_rope_layers"] = found["no_rope_layers"][: read["num_hidden_layers"]]
    return {**found, "layer_types": layer_types(read), "sliding_window": layer_windows(read)}
