"""Can the run go on from the newest checkpoint in its folder? Adapters, dtype and format, by its index. No torch in here.

Leaves out tensors and layout, which resuming looks at (engine/checkpoint/resuming.py).
"""

from __future__ import annotations

from pathlib import Path

from engine.resume import model_of, read_index
from megasync.config.errors import ConfigError
from megasync.config.files import newest_checkpoint
from megasync.config.schema import Config


def resumed_checkpoint(config: Config) -> Path | None:
    """The one that the run goes on from; None: it begins anew."""
    return newest_checkpoint(config.run.folder) if config.checkpoint.resume == "auto" else None


def check_resume(config: Config) -> None:
    """ConfigError where the run would refuse it."""
    folder = resumed_checkpoint(config)
    if folder is None:
        return
    try:
        read_index(folder, model_of(config.model.dtype, config.engine.lora))
    except ValueError as error:
        raise ConfigError(str(error), remedy="or write checkpoint.resume=never, which moves the former results aside") from error
