"""Writes a checkpoint: all ranks their files, then rank 0 the index, and the folder gets its name.

What is written is in host memory, so that it may be done beside the training. Leaves out how tensors lie in files (state.py,
hf_folder.py).
"""

from __future__ import annotations

import io
import itertools
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from engine.peft import factors
from engine.checkpoint import folder as names
from engine.checkpoint import hf_folder, state
from engine.checkpoint.shards import Shard, optimizer_shards
from engine.config import LoraConfig
from engine.engine import Engine
from engine.resume import INDEX_FILE, random_file
from engine.runtime.random_state import random_state
from engine.runtime.tensor_file import save_tensors

GROUP_TIMEOUT = timedelta(days=1)  # files may take their time


class CheckpointError(RuntimeError):
    """A checkpoint could not be written; raised on every rank, with the texts of all ranks."""


class Save:
    """A checkpoint that is being written. Every rank has to call `wait`."""

    def __init__(self, folder: Path, write: Callable[[], None], *, asynchronous: bool) -> None:
        """`write`: writes tensors from host memory. It may run beside the training, and then uses no device."""
        self.folder = folder
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, args=(write,), name="checkpoint", daemon=True)
        if asynchronous:
            self._thread.start()
        else:
            self._run(write)

    def _run(self, write: Callable[[], None]) -> None:
        try:
            write()
        except Exception as error:  # noqa: BLE001 - raised by `wait`
            self._error = error

    def wait(self) -> Path:
        """Wait until the checkpoint is whole; returns its folder.

        Raises:
            CheckpointError: a rank failed; the folder is deleted.
        """
        self._join()
        if self._error is not None:
            raise self._error
        return self.folder

    def give_up(self, seconds: float) -> None:
        """Wait for at most `seconds`, and ignore the result: for a rank that ends with an error."""
        self._join(seconds)

    def _join(self, seconds: float | None = None) -> None:
        if self._thread.ident is not None:
            self._thread.join(seconds)


def save(  # noqa: PLR0913
    root: Path,
    step: int,
    engine: Engine,
    weights: Iterable[tuple[str, torch.Tensor]],
    model_path: Path,
    keep: int,
    write_more: Callable[[Path], None] = lambda folder: None,
    *,
    digest: hf_folder.Digest | None = None,
    asynchronous: bool = False,
    file_bytes: int = hf_folder.FILE_BYTES,
) -> Save:
    """Write the checkpoint of `step`, then delete all but the newest `keep`. Collective, after the previous save has ended.

    `weights` is this stage's export, on all of its ranks: each writes a part, and verifies it with a `digest`. With LoRA it is
    ignored, and the adapter is written; the base model stays in `model_path`. `write_more` is called with the folder on rank
    0, before this returns. `asynchronous`: all is copied to host memory, and written while the caller continues.

    Raises:
        CheckpointError: on every rank, where rank 0 could not begin; later failures are raised by `Save.wait`.
    """
    final, folder = root / f"step_{step:08d}", root / f".partial_step_{step:08d}"
    rank, header, group = engine.layout.rank, names.index_header(engine, step), _writers(dist.group.WORLD)
    content = "adapter" if engine.config.lora.rank else "hf"
    _gather_or_raise(_failure(lambda: _begin(root, folder / content, write_more)) if rank == 0 else None, group)
    state_files = state.plan(optimizer_shards(engine), rank)
    part = state.entries(state_files)
    share = hf_folder.Share.of(engine.layout, file_bytes)
    hf_files = hf_folder.files(hf_folder.as_in(model_path, weights), share, digest)  # a generator
    models = (partial(file.write, folder / "hf", digest) for file in hf_files)
    trained = _adapter(engine, folder) if content == "adapter" else models
    first = [_random_states(folder / random_file(rank))]
    jobs: Iterator[Job] = itertools.chain(first, _state(engine, folder, state_files), trained)
    pending = list(jobs) if asynchronous else jobs

    def finish(index: dict[str, Any]) -> None:
        _complete(folder, engine.config.lora, model_path, {**header, "tensors": index})
        _commit(folder, final, keep)

    def write() -> None:
        try:
            _write(pending, part, group, finish)
        except CheckpointError:  # all ranks have stopped writing: make room again on a full disk
            if rank == 0:
                shutil.rmtree(folder, ignore_errors=True)
            raise

    return Save(final, write, asynchronous=asynchronous)


def _begin(root: Path, content: Path, write_more: Callable[[Path], None]) -> None:
    """Delete leftovers of killed saves, and make the folder of the weights in a new checkpoint's folder."""
    for leftover in (*root.glob(".partial_*"), *root.glob(".old_*")):
        shutil.rmtree(leftover)
    content.mkdir(parents=True)
    write_more(content.parent)


Job = Callable[[], Path]
"""Writes a file from host memory and returns its path."""


def _random_states(path: Path) -> Job:
    """The current random states. Through memory, since torch.save does not say why a file cannot be written."""
    buffer = io.BytesIO()
    torch.save(random_state(), buffer)

    def write() -> Path:
        path.write_bytes(buffer.getbuffer())
        return path

    return write


def _state(engine: Engine, folder: Path, files: list[tuple[str, list[Shard]]]) -> Iterator[Job]:
    with engine.state_on_device():
        for name, shards in files:
            yield partial(_write_tensors, folder / name, state.host_tensors(shards))


def _adapter(engine: Engine, folder: Path) -> Iterator[Job]:
    name, tensors = factors.stage_file(engine.layout.pipeline_rank, engine.adapter_tensors())
    if tensors:
        yield partial(_write_tensors, folder / "adapter" / name, tensors)


def _write(jobs: Iterable[Job], part: dict[str, Any], group: Any, finish: Callable[[dict[str, Any]], None]) -> None:
    """Write this rank's files; when all ranks have, rank 0 calls `finish`. A failure of any rank is raised on every rank."""
    failure: Exception | None = None
    for job in jobs:  # to the end, also after a failure: making jobs runs collectives
        if failure is None:
            failure = _failure(lambda: flush(job()))  # noqa: B023 # called at once
    parts = _gather_or_raise(failure or part, group)
    _gather_or_raise(_failure(lambda: finish(state.join(parts))) if dist.get_rank() == 0 else None, group)


def _failure(work: Callable[[], None]) -> Exception | None:
    """The exception that `work` raised, for `_gather_or_raise`."""
    try:
        work()
    except Exception as error:  # noqa: BLE001 - handed on to every rank
        return error
    return None


def _write_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    save_tensors(tensors, path)
    return path


def _gather_or_raise(mine: dict[str, Any] | Exception | None, group: Any) -> list[Any]:
    """The values of every rank.

    Raises:
        CheckpointError: the value of some rank is an exception.
    """
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, f"{type(mine).__name__}: {mine}" if isinstance(mine, Exception) else mine, group=group)
    problems = [f"rank {rank}: {value}" for rank, value in enumerate(everyone) if isinstance(value, str)]
    if problems:
        cause = mine if isinstance(mine, Exception) else None
        raise CheckpointError(f"the checkpoint was not written: {'; '.join(problems)}") from cause
    return everyone


@lru_cache(maxsize=1)
def _writers(world: Any) -> Any:  # noqa: ARG001 # the key of the cache
    """A gloo group of all ranks for the threads that write. Made once for each `world`."""
    return dist.new_group(backend="gloo", timeout=GROUP_TIMEOUT)


def _complete(folder: Path, lora: LoraConfig, model_path: Path, index: dict[str, Any]) -> None:
    """Add the model's other files to those of all ranks, and last the index, which names every file. On rank 0."""
    if lora.rank:
        factors.finish_folder(folder / "adapter", lora, model_path)
    else:
        hf_folder.finish_folder(folder / "hf", model_path)
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    (folder / INDEX_FILE).write_text(json.dumps({**index, "files": files}))


def _commit(folder: Path, final: Path, keep: int) -> None:
    """Flush the folder to the disk and rename it; then delete the oldest."""
    for path in (*folder.rglob("*"), folder):
        flush(path)
    former = _set_aside(final) if final.exists() else None  # a resumed run may save the same step again
    folder.rename(final)
    flush(final.parent)
    aside = [former] if former else []
    for path in (*aside, *map(_set_aside, names.steps(final.parent)[:-keep])):
        shutil.rmtree(path)


def _set_aside(folder: Path) -> Path:
    """Rename a folder that will be deleted: a folder named step_* is always complete."""
    return folder.rename(folder.with_name(f".old_{folder.name}"))


def flush(path: Path) -> None:
    """Force a file or a folder's entries onto the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
