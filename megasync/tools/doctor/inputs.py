"""The files and keys of a config, as `megasync train --check` checks them: each problem by the part that it is about."""

from __future__ import annotations

from collections.abc import Iterator

from megasync.checks.check import check_config
from megasync.config.errors import ConfigError
from megasync.config.schema import Config
from megasync.launch.machine import Finding

PARTS = ("config", "model", "data", "reward")


def check_inputs(config: Config, num_ranks: int) -> Iterator[Finding]:
    """An ok for each part, or its errors, and a warning for each note on the data, such as of examples that are too long."""
    errors, notes = list[ConfigError](), list[str]()
    try:
        if data := check_config(config, num_ranks):
            notes = [note for note in data.notes if note not in data.prompts.notes]
    except ConfigError as refused:
        errors = refused.parts
    yield from (Finding("data", "warning", note, "see data.too_long, and the keys that are named") for note in notes)
    parts = [part_of(config, error) for error in errors]
    for part, error in zip(parts, errors, strict=True):
        more = "; ".join(f"{name.replace('_', ' ')}: {text}" for name, text in error.lines.items() if name != "remedy")
        yield Finding(part, "error", error.headline + (f" ({more})" if more else ""), error.remedy or "see the message")
    yield from (Finding(part, "ok", "checked") for part in PARTS if part not in parts)


def part_of(config: Config, error: ConfigError) -> str:
    """One of PARTS."""
    if error.key.startswith("data."):
        return "data"
    if error.key.startswith("rollout.reward"):
        return "reward"
    is_model = error.key == "model.path" or (config.model.path and config.model.path in error.headline)
    return "model" if is_model else "config"
