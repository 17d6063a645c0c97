"""A run's checkpoints: the one that it resumes from, and when it writes new ones. Leaves out their contents.

Weights may be newer than the newest checkpoint: a version of the run's log is the weights alone, and which prompts they were
trained on is in the marker, a file beside the versions that each step replaces. Leaves out the log itself (bridge/versions/).

    mark(run_folder, 12, stream.progress())          # on rank 0, after a step that is written down
    newer, note = find_newer(run_folder, model, 10)  # newer weights to resume from
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from bridge.layout.digest import digest_tensor
from bridge.versions.file import VersionLogError
from bridge.versions.reader import VersionReader
from bridge.versions.writer import cut
from engine import checkpoint
from engine.checkpoint.hf_folder import Share, as_in, finish_folder, save_weights
from engine.engine import Engine
from megasync.config.files import CHECKPOINTS, MARKER, VERSIONS, archive_folder, read_marker, write_atomically
from megasync.config.schema import Config
from megasync.rollouts.progress import Progress, SavedGroup, load_progress, order_of
from megasync.run.rank_zero import on_rank_zero
from megasync.run.scaling import forget_request

GIVE_UP_SECONDS = 60.0  # for one that is being written when the run fails
NEWEST_WEIGHTS_FOLDER = ".newer"  # among the checkpoints: on the file system that all nodes share


class Checkpoints:
    """Methods are collective unless they say otherwise."""

    def __init__(self, config: Config) -> None:
        self.config, self.model = config.checkpoint, Path(config.model.path)
        self.run_folder, self.folder = config.run.folder, config.run.folder / CHECKPOINTS
        resumes = self.config.resumes
        self.last: Path | None = on_rank_zero(lambda: checkpoint.newest(self.folder) if resumes else None)
        self.first_step = checkpoint.step_of(self.last) if self.last else 0
        self._newer: NewerWeights | None = None
        self._note = ""
        if self.last and self.config.resume == "newest_weights":
            self._newer, self._note = on_rank_zero(lambda: find_newer(self.run_folder, self.model, self.first_step))
            self.first_step = self._newer.step if self._newer else self.first_step
        self._saving: checkpoint.Save | None = None

    def begin_folder(self) -> Path | None:
        """Archive the results of a former run that this one does not continue; their new folder. On rank 0."""
        if not self._newer:
            forget(self.run_folder)
        if self.last:
            return None
        unmark(self.run_folder)
        forget_request(self.run_folder)
        former = archive_folder(self.run_folder)
        cut(self.run_folder / VERSIONS, 0)  # of a start that was killed before its first result
        return former

    def forget_later_steps(self) -> None:
        """Delete logged steps after the resumed one, once that has been read: they will be trained again. On rank 0.

        Whatever `sync.log` is now: their versions in the log would be taken for this run's.
        """
        if self._newer:
            forget(self.run_folder)
        else:
            unmark(self.run_folder)
        cut(self.run_folder / VERSIONS, self.first_step + 1)

    def engine_arguments(self) -> dict[str, Any]:
        """Arguments of Engine, to resume. Not collective."""
        if self._newer:
            return {"weights_path": self._newer.folder}
        return checkpoint.engine_arguments(self.last) if self.last else {}

    def restore(self, engine: Engine) -> list[str]:
        """Load the last checkpoint into the engine, if there is one; notes for the user."""
        if self.last is None:
            return []
        notes = [self._note, checkpoint.restore(self.last, engine, steps_since=self.first_step - checkpoint.step_of(self.last))]
        on_rank_zero(self.forget_later_steps)
        return [note for note in notes if note]

    def progress(self, batch_size: int) -> Progress:
        """The rollouts' progress, where the run resumes. Not collective."""
        if self._newer:
            return self._newer.progress
        begun = Progress(num_trained=self.first_step * batch_size)
        return (load_progress(self.last) if self.last else None) or begun

    def mark(self, step: int, find_progress: Callable[[], Progress]) -> None:
        """All of `step` is written but a checkpoint; `find_progress` is called on rank 0."""
        on_rank_zero(lambda: mark(self.run_folder, step, find_progress()))

    def is_due(self, step: int) -> bool:
        """After every `checkpoint.every_steps` steps. Not collective."""
        return bool(self.config.every_steps) and step % self.config.every_steps == 0

    def is_unsaved(self, step: int) -> bool:
        """Whether no checkpoint has all of the `step` steps that are done. Waits for one that is written."""
        self.finish()
        return step > (self.first_step if self.last is None else checkpoint.step_of(self.last))

    def write(self, step: int, engine: Engine, tensors: Any, save_progress: Callable[[Path], None]) -> None:
        """One of the engine after `step` steps; with `checkpoint.asynchronous` it is written in the background.

        `tensors`: the weights in Hugging Face layout; `save_progress` is called on rank 0.
        """
        self.finish()
        self._saving = checkpoint.save(
            self.folder, step, engine, tensors, self.model, self.config.keep, save_progress,
            digest=digest_tensor, asynchronous=self.config.asynchronous,
        )  # fmt: skip
        if not self.config.asynchronous:
            self.finish()

    def finish(self) -> None:
        """Wait for the one that is being written."""
        if self._saving is not None:
            saving, self._saving = self._saving, None
            self.last = saving.wait()

    def give_up(self) -> None:
        """End the saving of a run that failed. Not collective."""
        if self._saving is not None:
            self._saving.give_up(GIVE_UP_SECONDS)


@dataclass(frozen=True)
class NewerWeights:
    """`folder`: the weights of version `step`, a Hugging Face folder."""

    step: int
    progress: Progress
    folder: Path


def mark(run_folder: Path, step: int, progress: Progress) -> None:
    """All of `step`, counted from 1, is written: its version, its metrics. Samples that wait are not kept."""
    fields = {
        "step": step,
        "num_trained": progress.num_trained,
        "num_begun": progress.num_begun,
        "expected_tokens": progress.expected_tokens,
        "begun": [group.key for group in progress.groups],
        "order": None if progress.order is None else astuple(progress.order),
        "sampler": progress.sampler,
    }
    write_atomically(run_folder / MARKER, json.dumps(fields))


def marked(run_folder: Path) -> tuple[int, Progress] | None:
    """The marked step and the progress after it; prompts that had begun and were not trained start again. None: no marker."""
    if (fields := read_marker(run_folder)) is None:
        return None
    groups = tuple(SavedGroup(key) for key in fields["begun"])
    order = order_of(fields["order"]) if fields.get("order") else None
    own = fields["num_trained"], fields["num_begun"], fields["expected_tokens"]
    return fields["step"], Progress(*own, groups, order, fields.get("sampler", ""))


def find_newer(run_folder: Path, model: Path, than: int) -> tuple[NewerWeights | None, str]:
    """The weights marked after step `than`, rebuilt and verified by their digests; or None and the reason.

    `model`: the folder that the run starts from. `forget` removes the rebuilt one. On rank 0.
    """
    forget(run_folder)
    there = marked(run_folder)
    if there is None or there[0] <= than:
        return None, f"{run_folder / VERSIONS}: has no weights that are newer than the checkpoint of step {than}"
    step, progress = there
    folder = run_folder / CHECKPOINTS / NEWEST_WEIGHTS_FOLDER
    try:
        rebuild(VersionReader(run_folder / VERSIONS), step, model, folder)
    except (VersionLogError, OSError) as error:
        forget(run_folder)
        return None, f"the weights of step {step} cannot be read: {error}"
    return NewerWeights(step, progress, folder), ""


def rebuild(log: VersionReader, version: int, model: Path, folder: Path) -> None:
    """Write a version as a new model folder, verified by its digests, with the other files of `model`. On rank 0.

    Raises:
        VersionLogError: the log is torn, or lacks the version.
    """
    folder.mkdir(parents=True)
    save_weights(folder, as_in(model, log.tensors(version)), Share(0), digest_tensor)
    finish_folder(folder, model)


def forget(run_folder: Path) -> None:
    """Remove the folder of rebuilt weights: the engine has read them, or their process has ended."""
    shutil.rmtree(run_folder / CHECKPOINTS / NEWEST_WEIGHTS_FOLDER, ignore_errors=True)


def unmark(run_folder: Path) -> None:
    """Remove the marker when a run resumes from a checkpoint: the steps after it are trained again, on other samples."""
    (run_folder / MARKER).unlink(missing_ok=True)
