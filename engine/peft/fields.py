"""The fields of an adapter_config.json: which of them a plain LoRA adapter, W + scale B A, may have, and with which values.

The names are those of peft 0.21.2's LoraConfig, and a test walks over all of them. Importing peft takes seconds and torch, which
checks of a config do without. Leaves out what the values that are read mean (folder.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

PEFT_VERSION = "0.21.2"
READ = ("r", "lora_alpha", "use_rslora", "base_model_name_or_path", "target_parameters")
WITHOUT_EFFECT = (  # on the product of a whole adapter: the tensors tell which linears it has
    *("auto_mapping", "peft_version", "revision", "inference_mode", "runtime_config"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "ensure_weight_tying"),
    *("lora_dropout", "loftq_config", "eva_config", "corda_config", "lora_ga_config", "qalora_group_size", "megatron_core"),
)
OFF: tuple[Any, ...] = (None, False, [], {})  # how PEFT writes that a feature is not used
PLAIN: dict[str, tuple[Any, ...]] = {  # values that leave the adapter a plain one; a field that is not there does
    "peft_type": ("LORA",),
    "task_type": (None, "CAUSAL_LM"),
    "bias": (None, "none"),
    # these start A and B alone; the others change the base's weights, too (tuners/lora/layer.py:update_layer)
    "init_lora_weights": (None, True, False, "gaussian", "eva", "orthogonal", "mica"),
    "alora_invocation_tokens": (None, []),
    **dict.fromkeys(("use_dora", "use_qalora", "lora_bias", "fan_in_fan_out"), (None, False)),
    **dict.fromkeys(("rank_pattern", "alpha_pattern"), (None, {})),
    **dict.fromkeys(("modules_to_save", "layer_replication", "trainable_token_indices"), (None, [], {})),
    **dict.fromkeys(("velora_config", "monteclora_config", "use_bdlora", "arrow_config", "kasa_config"), (None,)),
    "megatron_config": (None,),
}
CONVERTED = ("pissa", "olora", "corda", "lora_ga")  # what PEFT can save as an adapter of the base's own weights
MERGE = "merge it into its base with PEFT (merge_and_unload) and train that model, or start from a plain LoRA adapter"


class AdapterError(ValueError):
    """A folder cannot be the adapter of a run; and what to do about it."""

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(f"{problem}; {remedy}")
        self.problem, self.remedy = problem, remedy


def check_fields(path: Path, fields: dict[str, Any]) -> None:
    """AdapterError: a field of the adapter_config.json at `path` makes the adapter no plain one, or may do so."""
    if "peft_type" not in fields:
        raise AdapterError(f"{path}: holds no peft_type, LORA is expected", "save the adapter again with PEFT")
    for name in sorted(fields, key=lambda name: name != "peft_type"):
        value, allowed = fields[name], PLAIN.get(name, OFF)
        if name in READ or name in WITHOUT_EFFECT or any(type(value) is type(each) and value == each for each in allowed):
            continue
        if name not in PLAIN:
            remedy = f"save it with peft {PEFT_VERSION}, or take the field out if the adapter computes the same without it"
            raise AdapterError(f"{path}: {name} = {value!r} is a field that is not known here", remedy)
        choices = ", ".join(map(str, dict.fromkeys(each for each in map(_written, allowed))))
        raise AdapterError(f"{path}: {name} = {value!r} is not supported (choices: {choices})", _remedy(name, value))


def _written(value: Any) -> str:
    return {None: "null", True: "true", False: "false"}[value] if isinstance(value, bool | None) else str(value)


def _remedy(name: str, value: Any) -> str:
    if name == "init_lora_weights" and str(value).lower().startswith(CONVERTED):
        return f"save it with PEFT's save_pretrained(..., path_initial_model_for_weight_conversion=FOLDER), or {MERGE}"
    return MERGE
