"""Limits of a sample's length in tokens: of the trainer, the model, vLLM, and teachers that score it. No torch in here."""

from __future__ import annotations

from megasync.config.schema import Config
from megasync.models.folder import longest_by, model_shape


def length_limits(config: Config, *, is_trained_on: bool) -> dict[str, int]:
    """By name the limits of a sequence's length, in tokens; names of those that no key changes begin with `the`."""
    limits = {"engine.tokens_per_microbatch": config.engine.tokens_per_microbatch} if is_trained_on else {}
    if is_trained_on and (scored := scored_tokens(config)):
        limits["the teacher's max_model_len - 1"] = scored
    if positions := model_shape(config.model.path).max_position_embeddings:
        limits[f"the model's {longest_by(config.model.path)}"] = positions
    if config.algorithm.name == "grpo" and config.rollout.max_model_len is not None:
        limits["rollout.max_model_len"] = config.rollout.max_model_len
    return limits


def scored_tokens(config: Config) -> int:
    """The most tokens of a sample that all served teachers can score; 0: no limit is known. vLLM wants room for one more."""
    folders = config.teacher.paths.values() if config.teacher.is_served else ()
    return min((context - 1 for path in folders if (context := teacher_context(config, path))), default=0)


def teacher_context(config: Config, path: str) -> int:
    """vLLM's max_model_len for a served teacher's folder; 0: its own."""
    own = config.rollout.max_model_len or model_shape(config.model.path).max_position_embeddings
    given = config.teacher.engine_arguments.get("max_model_len")
    limits = (own and own + 1, model_shape(path).max_position_embeddings, given if isinstance(given, int) else 0)
    return min(filter(None, limits), default=0)
