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
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from megasync.config.errors import ConfigError, main_errors, refuse_if
from megasync.config.files import VERSIONS, flush
from megasync.config.load import load_config
from megasync.models.folder import check_weights, model_fields, model_shape
from megasync.models.merge import merge_adapter
from megasync.models.tensors import check_held
from megasync.report.log import CONFIG_FILE
from megasync.tools.export.find import find_adapter, find_base, hold_weights, release, run_and_step
from model_folder.layout import written_fields

OTHER_STEP = "take another checkpoint with --step"


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
        raise ConfigError(f"{name / source.name}: holds no config.json", remedy=OTHER_STEP)
    if not merge:
        check_weights(source, OTHER_STEP)
    _check_free(target)
    if merge:
        merge_base(run, source, target)
        return
    with _whole_or_not(target, source) as partial:
        for path in sorted(source.rglob("*")):
            copy = partial / path.relative_to(source)
            if path.is_dir():
                copy.mkdir()
            else:
                shutil.copyfile(path, copy)


def merge_base(run: Path, adapter: Path, target: Path) -> None:
    """Write the adapter, a PEFT folder of the run, and its base model as one to `target`, which is free, or nothing."""
    base, dtype = find_base(run, adapter)
    check_weights(adapter, OTHER_STEP)
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
        for path in partial.rglob("*"):
            if path.is_file():
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
        target = Path(os.path.realpath(given.to))  # with a name for the folder beside it, also for `--to .`
        of_log = given.version is not None
        what_of_log = "--version: gives the whole model, adapters merged"
        refuse_if(of_log and (given.adapter or given.merge), what_of_log, remedy="leave --adapter and --merge out")
        if of_log:
            source = export_version(given.run, target, given.version)
        else:
            source = export(given.run, target, given.step, adapter=given.adapter, merge=given.merge)
    print(f"{source} -> {given.to}: {_num_bytes(target) / 2**20:.1f} MiB")
    return 0
