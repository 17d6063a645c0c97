"""What `model.exact` and `run.deterministic` cannot do: refused by name, with what can. No torch in here.

Leaves out what depends on the machine's kernels (exact/machine.py).
"""

from __future__ import annotations

import json
from operator import attrgetter
from pathlib import Path
from typing import Any

from engine.attention.windows import window
from megasync.config.errors import ConfigError, refuse_if
from megasync.config.schema import Config
from megasync.hf.model_shape import ModelShape

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
ROPE_TYPES = ("default", "linear", "llama3")  # those of exact/rotary.py
# key, its only value
WANTED: tuple[tuple[str, Any], ...] = (
    ("engine.parallel.tensor", 1),
    ("engine.parallel.context", 1),
    ("engine.lora.dropout", 0.0),
    ("rollout.tensor_parallel", 1),
    ("rollout.top_p", 1.0),
    ("rollout.top_k", 0),
    ("rollout.min_p", 0.0),
)
CPUS: tuple[tuple[str, Any], ...] = (("model.dtype", "float32"),)
GPUS: tuple[tuple[str, Any], ...] = (("model.dtype", "bfloat16"), ("engine.head_dtype", "model"))
# fields of vLLM's EngineArgs that choose what it computes with
OTHER_LAYERS = (
    *("attention_backend", "attention_config", "compilation_config", "kernel_config", "kv_cache_dtype", "linear_backend"),
)


# key, the values that keep the order of all that is computed; with several replicas it is that of answers
DETERMINISTIC: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("rollout.max_staleness", (0,), "which samples a batch has depends on time"),
    ("rollout.replicas", (1,), "who generates what depends on time"),
    ("rollout.stop", ((),), "vLLM hears of the end of a response a little later or sooner"),
    ("rollout.episode", ("",), "turns come in an order that depends on time"),
    ("algorithm.filter_groups", (False,), "which groups come first depends on time"),
    ("engine.kernels", ("auto", "torch"), "TransformerEngine's kernels were not tried"),
)


def check_deterministic(config: Config) -> None:
    """ConfigError for the first key by which two runs could differ."""
    is_grpo = config.algorithm.name == "grpo"
    for key, values, why in DETERMINISTIC if config.run.deterministic else ():
        given, choices = value_of(config, key), ", ".join(map(str, values)) or "none"
        message = f"run.deterministic = true: {key} = {given}: {why}"
        is_wrong = given not in values and (is_grpo or key.startswith("engine."))
        refuse_if(is_wrong, message, choices=choices, remedy=f"leave {key} out, or write run.deterministic=false")


def value_of(config: Config, key: str) -> Any:
    return attrgetter(key)(config)


def check_exact(config: Config, shape: ModelShape, *, on_gpus: bool) -> None:
    """ConfigError for the first thing of a config that has no exact functions."""
    if not config.model.exact:
        return
    begin = "model.exact = true"
    for key, value in (*WANTED, *(GPUS if on_gpus else CPUS)):
        given, told = value_of(config, key), str(value)
        remedy = f"write {key}={told}, or model.exact=false"
        refuse_if(given != value, f"{begin}: {key} = {given}: is not exact", choices=told, remedy=remedy)
    lora = config.engine.lora
    message = f"{begin}: engine.lora.sync = adapter: vLLM adds the adapter's product, the trainer multiplies with the sum"
    refuse_if(bool(lora.rank) and lora.sync == "adapter", message, choices="merged", remedy="write engine.lora.sync=merged")
    message = f"{begin}: engine.fusions = all: fused kernels are not exact"
    refuse_if(config.engine.fusions == "all", message, choices="auto, none", remedy="write engine.fusions=auto")
    for name in OTHER_LAYERS:
        message = f"{begin}: rollout.engine_arguments.{name}: vLLM would compute with other layers"
        refuse_if(name in config.rollout.engine_arguments, message, remedy=f"leave rollout.engine_arguments.{name} out")
    _check_model(config.model.path, shape)


def _check_model(path: str, shape: ModelShape) -> None:
    message, is_other = f"model.exact = true: {shape.model_type} is not exact", shape.model_type not in FAMILIES
    refuse_if(is_other, message, model=path, choices=", ".join(FAMILIES), remedy="write model.exact=false")
    fields: dict[str, Any] = json.loads((Path(path) / "config.json").read_text(encoding="utf-8"))
    rope = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    found = {
        f"rope_type = {kind}": kind not in ROPE_TYPES,
        "partial_rotary_factor": rope.get("partial_rotary_factor", fields.get("partial_rotary_factor", 1.0)) != 1.0,
        "a sliding window": bool(window(fields)),
    }
    for feature, is_there in found.items():
        if is_there:
            raise ConfigError(f"model.exact = true: {feature} is not exact", model=path, remedy="write model.exact=false")
