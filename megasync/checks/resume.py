"""Whether the run can resume from the newest checkpoint in its folder: adapters, dtype and format by its index; model; prompts.

Leaves out the optimizer's tensors and their layout (engine/checkpoint/folder.py). No torch in here.
"""

from __future__ import annotations

import os
from pathlib import Path

from bridge.versions.file import VersionLogError, shapes_of
from engine.peft.folder import check_peft_folder
from engine.resume import check_files, instead, model_of, read_index
from megasync.config.errors import ConfigError, refuse_if, some
from megasync.config.files import VERSIONS, newest_checkpoint, read_marker
from megasync.config.schema import Config
from megasync.models.computed import different_fields
from megasync.models.folder import check_model_config, model_fields, model_shape, read_json_object
from megasync.models.tensors import check_held, own_shapes
from megasync.rollouts.progress import load_progress
from model_folder.layout import written_fields


def resumed_checkpoint(config: Config) -> Path | None:
    """The one that the run resumes from; None where it starts at step 0."""
    return newest_checkpoint(config.run.folder) if config.checkpoint.resumes else None


def first_step(config: Config) -> int:
    """The number of steps that are done when the run starts."""
    folder = resumed_checkpoint(config)
    marker = read_marker(config.run.folder) if folder and config.checkpoint.resume == "newest_weights" else None
    saved = int(folder.name.removeprefix("step_")) if folder else 0
    return max(saved, marker["step"]) if marker else saved


def check_resume(config: Config) -> None:
    """ConfigError where the run would refuse it."""
    folder = resumed_checkpoint(config)
    if folder is None:
        return
    if first_step(config) > int(folder.name.removeprefix("step_")):
        _check_marked(config)
    try:
        index = read_index(folder, model_of(config.model.dtype, config.engine.lora))
        if os.environ.get("RANK", "0") == "0":  # the files of all ranks, looked at once
            check_files(folder, index)
        load_progress(folder)
        _check_model(config, folder)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(str(error), remedy="or write checkpoint.resume=never, which moves the former results aside") from error


def _check_model(config: Config, folder: Path) -> None:
    """ConfigError where the checkpoint's weights cannot be read, or have another architecture or shapes than model.path, or its
    adapters another base.
    """
    weights, base = folder / "hf", Path(config.model.path)
    if (folder / "adapter" / "adapter_config.json").is_file():
        check_peft_folder(folder / "adapter", config.engine.lora, base)
    if not weights.is_dir():
        return
    path = weights / "config.json"
    refuse_if(not path.is_file(), f"{path}: is missing, the checkpoint is damaged", remedy=instead(folder))
    fields, saved = read_json_object(base / "config.json"), read_json_object(path, instead(folder))
    remedy = "write the model.path that is in the run's config.yaml, run.name=NAME for another run, or checkpoint.resume=never"
    own, other = fields.get("model_type"), saved.get("model_type")
    refuse_if(own != other, f"{folder}: holds a {other}, and model.path = {base} is a {own}", remedy=remedy)
    try:
        held = own_shapes(weights)
    except ValueError as error:
        raise ConfigError(str(error), remedy=instead(folder)) from error
    check_held(folder, held, model_shape(base), written_fields(model_fields(base)), remedy)
    check_model_config(weights)
    differing = different_fields(base, weights)
    problem = f"{folder}: model.path = {base} computes with other fields of config.json: {some(differing)}"
    refuse_if(differing, problem, remedy=f"put back {base / 'config.json'} as it is in {weights}, or {remedy}")


def _check_marked(config: Config) -> None:
    """ConfigError where the newest weights in the run's log are of another model.

    Where the log cannot be read, the run warns at its start (run/checkpoints.py) and resumes from its checkpoint.
    """
    log, base, step = config.run.folder / VERSIONS, Path(config.model.path), first_step(config)
    try:
        held = shapes_of(log, step)
    except (VersionLogError, OSError):
        return
    remedy = f"put the run's own files into {log}, or write checkpoint.resume=auto"
    check_held(f"{log}, version {step}", held, model_shape(base), written_fields(model_fields(base)), remedy)
