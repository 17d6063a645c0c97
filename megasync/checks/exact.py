"""Settings excluded by `model.exact` and `run.deterministic`: keys by their only values, models by family and features. No torch.

Leaves out what depends on the machine's kernels (exact/machine.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

from engine.attention.windows import window
from engine.config import PLAIN_FAMILIES
from megasync.config.errors import ConfigError, shown_value, wrong
from megasync.config.schema import Config
from megasync.models.folder import model_fields
from megasync.models.model_shape import ModelShape

ROPE_TYPES = ("default", "linear", "llama3")  # of exact/rotary.py
Allowed = Sequence[tuple[str, tuple[Any, ...], str]]  # key, its values, why no others

EXACT: Allowed = (
    ("engine.parallel.tensor", (1,), "sums over ranks have another order"),
    ("engine.parallel.context", (1,), "sums over ranks have another order"),
    ("rollout.tensor_parallel", (1,), "sums over workers have another order"),
    ("engine.lora.dropout", (0.0,), "vLLM has no dropout"),
    ("rollout.dtype", ("model",), "quantised weights are others than the trainer's"),
    ("rollout.speculation.method", ("none",), "verification of several tokens in a pass was not tested"),
    ("rollout.top_p", (1.0,), "the trainer's log-probs are over all tokens"),
    ("rollout.top_k", (0,), "the trainer's log-probs are over all tokens"),
    ("rollout.min_p", (0.0,), "the trainer's log-probs are over all tokens"),
    ("engine.fusions", ("auto", "none"), "fused kernels are not exact"),
)
ON_CPUS: Allowed = (("model.dtype", ("float32",), "exact functions for CPUs are in float32"),)
ON_GPUS: Allowed = (
    ("model.dtype", ("bfloat16",), "exact functions for GPUs are in bfloat16"),
    ("engine.head_dtype", ("model",), "the head has the model's dtype"),
)
DETERMINISTIC: Allowed = (
    ("rollout.max_staleness", (0,), "which samples a batch has depends on time"),
    ("rollout.oversample", (1.0,), "which prompts are done first depends on time"),
    ("rollout.replicas", (1,), "which replica generates a sample depends on time"),
    ("rollout.dtype", ("model",), "vLLM's products in FP8 were not tested"),
    ("rollout.speculation.method", ("none",), "verification of several tokens in a pass was not tested"),
    ("rollout.stop", ((),), "the step at which vLLM ends a response depends on time"),
    ("rollout.episode", ("",), "the order of turns depends on time"),
    ("algorithm.filter_groups", (False,), "which groups come first depends on time"),
    ("rollout.filter", ("",), "which groups come first depends on time"),
    ("engine.kernels", ("auto", "torch"), "TransformerEngine's kernels were not tested"),
)
OTHER_LAYERS = (  # fields of vLLM's EngineArgs that choose kernels
    *("attention_backend", "attention_config", "compilation_config", "kernel_config", "kv_cache_dtype", "linear_backend"),
)


def excluded_values(config: Config, flag: str, allowed: Allowed) -> Iterator[ConfigError]:
    """Keys whose value is not one of the allowed ones, under a `flag` that is true."""
    for key, values, why in allowed:
        choices = [shown_value(value) for value in values]
        if attrgetter(key)(config) not in values:
            remedy = f"write {key}={choices[0]}, or {flag}=false" if choices[0] else f"leave {key} out, or write {flag}=false"
            yield wrong(config, key, f"is not {flag.rpartition('.')[2]}: {why}", choices=", ".join(choices), remedy=remedy)


def deterministic_errors(config: Config) -> Iterator[ConfigError]:
    if config.run.deterministic:
        is_grpo = config.algorithm.name == "grpo"
        allowed = [rule for rule in DETERMINISTIC if is_grpo or rule[0].startswith("engine.")]
        yield from excluded_values(config, "run.deterministic", allowed)


def exact_errors(config: Config, shape: ModelShape, *, on_gpus: bool) -> Iterator[ConfigError]:
    """Errors for everything that has no exact functions."""
    if not config.model.exact:
        return
    yield from excluded_values(config, "model.exact", (*EXACT, *(ON_GPUS if on_gpus else ON_CPUS)))
    if config.engine.lora.rank and config.engine.lora.sync == "adapter":
        why = "model.exact = true: vLLM adds the adapter's product, the trainer multiplies with the sum"
        yield wrong(config, "engine.lora.sync", why, choices="merged", remedy="write engine.lora.sync=merged")
    for name in OTHER_LAYERS:
        if name in config.rollout.engine_arguments:
            key = f"rollout.engine_arguments.{name}"
            yield ConfigError(f"{key}: model.exact = true, and vLLM would compute with other layers", remedy=f"leave {key} out")
    if feature := _inexact_feature(Path(config.model.path), shape):
        lines = {"model": config.model.path, "choices": ", ".join(PLAIN_FAMILIES), "remedy": "write model.exact=false"}
        yield wrong(config, "model.exact", f"{feature} is not exact", **lines)


def _inexact_feature(folder: Path, shape: ModelShape) -> str:
    if shape.model_type not in PLAIN_FAMILIES:
        return shape.model_type
    fields = model_fields(folder)
    rope = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ROPE_TYPES:
        return f"rope_type = {kind}"
    if rope.get("partial_rotary_factor", fields.get("partial_rotary_factor", 1.0)) != 1.0:
        return "partial_rotary_factor"
    return "a sliding window" if window(fields) else ""
