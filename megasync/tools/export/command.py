"""Takes a run's weights out of its folder: a checkpoint becomes a Hugging Face folder that transformers and vLLM load.

Checkpoints hold their weights in that format already, so this is a checked copy, whole or not there at all; adapters may be
merged into their base model. Any version is made again out of the run's log, where it keeps one (`sync.log: deltas`). Leaves out
optimizer states, and writing checkpoints (engine/checkpoint/). A merge and a version need torch.

    megasync export runs/rl --to models/mine [--step 120]
    megasync export runs/lora --to adapters/mine --adapter      # a folder for peft.PeftModel.from_pretrained
    megasync export runs/lora --to models/mine --merge          # base and adapter as one model
    megasync export runs/rl --to models/mine --version 87       # of the log of versions
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from engine.folder import written_fields
from megasync.config.errors import ConfigError, main_errors, nearest_name, refuse_if
from megasync.config.files import CHECKPOINTS, VERSIONS, flush, lock_holder
from megasync.config.load import load_config
from megasync.models.folder import check_weights, model_fields, model_shape
from megasync.models.merge import merge_adapter
from megasync.models.tensors import check_held
from megasync.report.log import CONFIG_FILE

CHECKPOINT = re.compile(r"step_(\d{8})")  # as engine/checkpoint/folder.py names them


def run_and_step(folder: Path) -> tuple[Path, int | None]:
    """Those of a checkpoint's folder; of any other the folder itself and None."""
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


def export(run: Path, target: Path, step: int | None = None, *, adapter: bool = False, merge: bool = False) -> Path:
    """Copy the weights of `run` to `target`, which is new or empty; returns the folder that they were copied from.

    `adapter`: the adapter of a run with LoRA alone; `merge`: it and its base model as one.

    The copy grows under a temporary name beside `target` and is renamed when all of it is on the disk.

    Raises:
        ConfigError: nothing to copy, a file of it is cut off, or `target` is in use or cannot be written.
    """
    folder, (run, own) = run, run_and_step(run)
    message, remedy = f"--step {step}: {folder} is the checkpoint of step {own}", "leave --step out, or name the run"
    refuse_if(own is not None and step not in (None, own), message, remedy=remedy)
    with tempfile.TemporaryDirectory(prefix="megasync-export-") as scratch:
        weights, source = hold_weights(run, Path(scratch), step if own is None else own)
        try:
            _export(run, source, target, adapter=adapter, merge=merge, name=weights.parent)
        finally:
            release(Path(scratch))
    return weights.with_name("adapter") if adapter or merge else weights


def _export(run: Path, source: Path, target: Path, *, adapter: bool, merge: bool, name: Path) -> None:
    """`source`: a folder of weights that stays there; `name`: the checkpoint's, or the run's, in errors."""
    if adapter or merge:
        source = find_adapter(source, name, "--merge" if merge else "--adapter")
    elif source.with_name("adapter").is_dir():
        remedy = "write --merge for base and adapter as one model, or --adapter for the adapter alone"
        raise ConfigError(f"{name}: holds an adapter alone, not the model's weights", remedy=remedy)
    elif not (source / "config.json").is_file():
        raise ConfigError(f"{name / source.name}: holds no config.json", remedy="take another checkpoint with --step")
    check_weights(source)
    _check_free(target)
    if merge:
        merge_base(run, source, target)
        return
    with _whole_or_not(target, source) as partial:
        for path in sorted(source.iterdir()):
            if path.is_file():
                shutil.copyfile(path, partial / path.name)


def merge_base(run: Path, adapter: Path, target: Path) -> None:
    """Write the adapter, a PEFT folder of the run, and its base model as one to `target`, which is free, or nothing."""
    base, dtype = find_base(run, adapter)
    with _whole_or_not(target, base) as partial:
        merge_adapter(adapter, base, dtype, partial)


def export_version(run: Path, target: Path, version: int) -> Path:
    """Write a version of the run's log of versions to `target`, as `export` does; returns the log's folder.

    Raises:
        ConfigError: there is no log, it cannot give this version, or `target` is in use or cannot be written.
    """
    _check_free(target)
    log = run / VERSIONS
    if not log.is_dir():
        remedy = "train with sync.log=deltas, or take a checkpoint with --step"
        raise ConfigError(f"{run}: keeps no log of its versions", looked_for=str(log), remedy=remedy)
    base = Path(load_config(run / CONFIG_FILE).model.path)
    refuse_if(not (base / "config.json").is_file(), f"{run}: its model is not in {base}", remedy="start where the run did")
    from bridge.layout.digest import digest_tensor
    from bridge.versions.file import VersionLogError
    from bridge.versions.reader import VersionReader
    from engine.checkpoint.hf_folder import Share, as_in, finish_folder, save_weights

    reader, remedy = VersionReader(log), f"put the run's own files into {log}, or its own model into {base}"
    try:
        place, fields = f"{log}, version {version}", written_fields(model_fields(base))
        check_held(place, reader.shapes(version), model_shape(base), fields, remedy)
        with _whole_or_not(target, base) as partial:
            save_weights(partial, as_in(base, reader.tensors(version)), Share(0), digest_tensor)
            finish_folder(partial, base)
    except VersionLogError as error:
        raise ConfigError(str(error), remedy="take another version, or a checkpoint with --step") from error
    return log


def _check_free(target: Path) -> None:
    """ConfigError where it is neither new nor empty."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        problem = "is not empty" if target.is_dir() else "is a file"
        raise ConfigError(f"{target}: {problem}", remedy="give --to a new folder, or empty this one")


@contextmanager
def _whole_or_not(target: Path, base: Path) -> Iterator[Path]:
    """A folder that is `target`, which is free, once the block has ended well. `base`: about as large."""
    partial = target.with_name(f".partial_{target.name}_{os.getpid()}")
    try:
        partial.mkdir(parents=True)
        yield partial
        for path in partial.iterdir():
            flush(path)
        partial.rename(target)
    except OSError as error:
        if _is_source(error, partial):
            remedy = "let this user read it, or take another checkpoint with --step"
            raise ConfigError(f"{error.filename}: cannot be read: {error.strerror}", remedy=remedy) from error
        remedy = "give --to a folder that you can write, on a disk with room for the weights"
        message = f"{target}: cannot be written: {error.strerror}"
        raise ConfigError(message, needed=f"{_num_bytes(base)} bytes", remedy=remedy) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _is_source(error: OSError, partial: Path) -> bool:
    """Whether it names a file that was read; where the disk is full it names both files of a copy, and none of a text."""
    if error.filename is None or error.filename2 is not None:
        return False
    place = Path(error.filename)
    return not place.is_relative_to(partial) and not partial.is_relative_to(place)


def _num_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir() if path.is_file())


def main(arguments: Sequence[str]) -> int:
    """Exit code 0, and 2 where nothing was written."""
    parser = argparse.ArgumentParser(prog="megasync export", description="A run's weights as a Hugging Face folder.")
    parser.add_argument("run", type=Path, help="the run's folder, such as runs/rl, or a checkpoint's")
    parser.add_argument("--to", type=Path, required=True, metavar="FOLDER", help="new or empty")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--adapter", action="store_true", help="the adapter of a run with LoRA, as a PEFT folder")
    what.add_argument("--merge", action="store_true", help="the adapter of a run with LoRA merged into its base model")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--step", type=int, help="the checkpoint of this step (default: the newest)")
    which.add_argument("--version", type=int, metavar="V", help="of the run's log of versions (sync.log: deltas)")
    given = parser.parse_args(arguments)
    with main_errors():
        target = given.to.resolve()  # with a name for the folder beside it, also for `--to .`
        of_log = given.version is not None
        what_of_log = "--version: gives the whole model, adapters merged"
        refuse_if(of_log and (given.adapter or given.merge), what_of_log, remedy="leave --adapter and --merge out")
        if of_log:
            source = export_version(given.run, target, given.version)
        else:
            source = export(given.run, target, given.step, adapter=given.adapter, merge=given.merge)
    print(f"{source} -> {given.to}: {_num_bytes(target) / 2**20:.1f} MiB")
    return 0
