"""Which weights a run's folder has, and where: checkpoints, their adapters, an adapter's base model.

A run that is training may remove a checkpoint while it is read: `hold` keeps its files open.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from pathlib import Path

from megasync.config.errors import ConfigError, nearest_name
from megasync.config.files import CHECKPOINTS, lock_holder
from megasync.config.load import load_config
from megasync.models.folder import check_weights
from megasync.report.log import CONFIG_FILE

CHECKPOINT = re.compile(r"step_(\d{8})")  # as engine/checkpoint/folder.py names them


def run_and_step(folder: Path) -> tuple[Path, int | None]:
    """The run's folder and the step of a checkpoint's folder; (folder, None) for any other."""
    match = CHECKPOINT.fullmatch(folder.name)
    return (folder.parents[1], int(match[1])) if match and folder.parent.name == CHECKPOINTS else (folder, None)


def checkpoints_of(run: Path) -> dict[int, Path]:
    """The finished checkpoints of a run by their number of steps, in order."""
    folders = sorted((run / CHECKPOINTS).glob("step_*"))
    return {int(match[1]): folder for folder in folders if (match := CHECKPOINT.fullmatch(folder.name))}


def find_weights(run: Path, step: int | None = None) -> Path:
    """The Hugging Face folder of the checkpoint of `step`, or of the newest; the run's own `hf` where there is none.

    Raises:
        ConfigError: there is no such run or checkpoint; the message lists the existing ones.
    """
    if not run.is_dir():
        folders = [path for path in run.parent.glob("*") if path.is_dir() and not path.name.startswith(".")]
        siblings = sorted(path.name for path in folders)
        near = nearest_name(run.name, siblings)
        raise ConfigError(
            f"{run}: there is no such run folder",
            nearest=str(run.parent / near) if near else "",
            there=", ".join(siblings[:12]),
            remedy="name a run's folder, which is run.dir/run.name of its config",
        )
    found = checkpoints_of(run)
    there = ", ".join(map(str, found))
    if step is None and found:
        return found[max(found)] / "hf"
    if step is not None and step in found:
        return found[step] / "hf"
    if step is not None:
        remedy = f"write --step {max(found)}, or leave it out" if found else "see checkpoint.every_steps"
        raise ConfigError(f"{run}: has no checkpoint of step {step}", steps=there or "none", remedy=remedy)
    if (run / "hf").is_dir():
        return run / "hf"
    remedy = "train with checkpoint.every_steps above 0, or with run.export_hf=true"
    raise ConfigError(f"{run}: has neither a checkpoint nor a folder hf", remedy=remedy)


class RemovedError(ConfigError):
    """A checkpoint was removed by its run while it was opened."""


def hold_weights(run: Path, scratch: Path, step: int | None = None) -> tuple[Path, Path]:
    """The folder of `find_weights`, and the one to read it from, which `hold` gives.

    Raises:
        ConfigError: as `find_weights`; RemovedError only with a `step`, since a run has removed its newest for a newer one.
    """
    while True:
        weights = find_weights(run, step)
        if run_and_step(weights.parent)[1] is None:
            return weights, weights
        try:
            return weights, hold(weights.parent, scratch, run) / weights.name
        except RemovedError:
            if step is not None:
                raise


def hold(checkpoint: Path, scratch: Path, run: Path) -> Path:
    """The checkpoint; of a `run` that is training, and may remove it, a folder below `scratch` with its weights, also an adapter.

    They last until this process ends, or `release`: links to files that it has opened, whose names may be gone.

    Raises:
        RemovedError: the checkpoint has been removed.
    """
    if lock_holder(run) is None:
        return checkpoint
    held = Path(tempfile.mkdtemp(prefix="held_", dir=scratch))
    for path in sorted(path for name in ("hf", "adapter") for path in checkpoint.glob(f"{name}/*")):
        (held / path.parent.name).mkdir(exist_ok=True)
        try:
            opened = f"/proc/{os.getpid()}/fd/{os.open(path, os.O_RDONLY)}"
        except OSError:  # gone, or the error of who reads it
            opened = str(path)
        (held / path.parent.name / path.name).symlink_to(opened)
    if not checkpoint.is_dir():
        release(scratch)
        remedy = "run the command again, or raise the run's checkpoint.keep"
        raise RemovedError(f"{checkpoint}: the run, which is training, removed it while it was opened", remedy=remedy)
    return held


def release(scratch: Path) -> None:
    """Close and remove the exporter's files below the folder."""
    for held in scratch.glob("held_*"):
        for path in held.glob("*/*"):
            if path.readlink().is_relative_to("/proc"):
                os.close(int(path.readlink().name))
        shutil.rmtree(held)


def find_adapter(weights: Path, name: Path, option: str) -> Path:
    """The PEFT folder beside where the checkpoint `name` has its weights.

    Raises:
        ConfigError: the run was not one with LoRA.
    """
    adapter = weights.with_name("adapter")
    if not (adapter / "adapter_config.json").is_file():
        raise ConfigError(f"{name}: holds no adapter", remedy=f"leave {option} out: it holds all weights")
    return adapter


def find_base(run: Path, adapter: Path) -> tuple[Path, str]:
    """The folder of the model that the adapter was trained on, and the dtype in which it was.

    Raises:
        ConfigError: the model is not there.
    """
    model = load_config(run / CONFIG_FILE).model
    if not Path(model.path).is_dir():
        remedy = "start where the run did, or put the model, or a link to it, there"
        raise ConfigError(
            f"{adapter}: its base model is not in {model.path}", looked_at=str(Path(model.path).resolve()), remedy=remedy
        )
    check_weights(Path(model.path))
    return Path(model.path), model.dtype
