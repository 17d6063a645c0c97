"""A run's checkpoints: the one that it goes on from, those that it writes, and when. Leaves out what is in one.

Weights may be newer than the newest checkpoint: a version of the run's log is the weights alone, and which prompts they were
trained on is in the marker, a file beside the versions that each step replaces. Leaves out the log itself (bridge/versions/).

    mark(run_folder, 12, stream.progress())          # on rank 0, after a step that is written down
    newer, note = find_newer(run_folder, model, 10)  # what of it a resumed run can go on from
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
from engine.checkpoint.hf_folder import Share, finish_folder, save_weights
from engine.engine import Engine
from megasync.config.files import CHECKPOINTS, MARKER, VERSIONS, read_marker, set_aside, write_atomically
from megasync.config.schema import Config
from megasync.reporting.log import RunLog
from megasync.rollouts.progress import Progress, SavedGroup, load_progress, order_of
from megasync.run.heartbeat import Heartbeat
from megasync.run.rank_zero import on_rank_zero
from megasync.run.scaling import forget_request
from megasync.run.step_log import StepClock
from megasync.run.weights import Weights

GIVE_UP_SECONDS = 60.0  # for one that is being written when the run fails
REBUILT = ".newer"  # among the checkpoints: on the file system that all nodes share


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
        """Where the results of a former run are now, from which this one does not go on. On rank 0."""
        if not self._newer:
            forget(self.run_folder)
        if self.last:
            return None
        unmark(self.run_folder)
        forget_request(self.run_folder)
        former = set_aside(self.run_folder)
        cut(self.run_folder / VERSIONS, 0)  # of a start that was killed before its first result
        return former

    def forget_later_steps(self) -> None:
        """Of the run that this one goes on from, once it has been read: its steps from there on are trained anew. On rank 0.

        Whatever `sync.log` is now: versions of those steps in its log would be taken for this run's.
        """
        if self._newer:
            forget(self.run_folder)
        else:
            unmark(self.run_folder)
        cut(self.run_folder / VERSIONS, self.first_step + 1)

    def engine_arguments(self) -> dict[str, Any]:
        """What the engine is to be built with, to go on from the last one. Not collective."""
        if self._newer:
            return {"weights_path": self._newer.folder}
        return checkpoint.engine_arguments(self.last) if self.last else {}

    def restore(self, engine: Engine) -> list[str]:
        """The engine goes on from the last one, if there is one; what to say of it."""
        if self.last is None:
            return []
        notes = [self._note, checkpoint.restore(self.last, engine, steps_since=self.first_step - checkpoint.step_of(self.last))]
        on_rank_zero(self.forget_later_steps)
        return [note for note in notes if note]

    def progress(self, batch_size: int) -> Progress:
        """Of the rollouts, where the run goes on. Not collective."""
        if self._newer:
            return self._newer.progress
        begun = Progress(num_trained=self.first_step * batch_size)
        return (load_progress(self.last) if self.last else None) or begun

    def mark(self, step: int, find_progress: Callable[[], Progress]) -> None:
        """Of `step` all is written down but a checkpoint; `find_progress` is called on rank 0."""
        on_rank_zero(lambda: mark(self.run_folder, step, find_progress()))

    def is_due(self, step: int) -> bool:
        """After every `checkpoint.every_steps` steps. Not collective."""
        return bool(self.config.every_steps) and step % self.config.every_steps == 0

    def is_unsaved(self, step: int) -> bool:
        """Whether no checkpoint has all of the `step` steps that are done. Waits for one that is written."""
        self.finish()
        return step > (self.first_step if self.last is None else checkpoint.step_of(self.last))

    def write(self, step: int, engine: Engine, tensors: Any, save_progress: Callable[[Path], None]) -> None:
        """One of the engine after `step` steps; where `checkpoint.asynchronous`, it goes on being written.

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
        """Of a run that failed. Not collective."""
        if self._saving is not None:
            self._saving.give_up(GIVE_UP_SECONDS)


@dataclass(frozen=True)
class NewerWeights:
    """`folder`: the weights of version `step`, a Hugging Face folder."""

    step: int
    progress: Progress
    folder: Path


def mark(run_folder: Path, step: int, progress: Progress) -> None:
    """All that was written of `step`, counted from 1, is there: its version, its metrics. Samples that wait are not kept."""
    told = {
        "step": step,
        "num_trained": progress.num_trained,
        "num_begun": progress.num_begun,
        "expected_tokens": progress.expected_tokens,
        "begun": [group.key for group in progress.groups],
        "order": None if progress.order is None else astuple(progress.order),
    }
    write_atomically(run_folder / MARKER, json.dumps(told))


def marked(run_folder: Path) -> tuple[int, Progress] | None:
    """The step and where the prompts were after it; what had begun and was not trained begins anew. None: there is none."""
    if (told := read_marker(run_folder)) is None:
        return None
    groups = tuple(SavedGroup(key) for key in told["begun"])
    order = order_of(told["order"]) if told.get("order") else None
    return told["step"], Progress(told["num_trained"], told["num_begun"], told["expected_tokens"], groups, order)


def find_newer(run_folder: Path, model: Path, than: int) -> tuple[NewerWeights | None, str]:
    """What is marked after step `than`, rebuilt and verified by its digests, and what to say where that cannot be.

    `model`: the folder that the run starts from. `forget` removes the rebuilt one. On rank 0.
    """
    forget(run_folder)
    there = marked(run_folder)
    if there is None or there[0] <= than:
        return None, f"{run_folder / VERSIONS}: has no weights that are newer than the checkpoint of step {than}"
    step, progress = there
    folder = run_folder / CHECKPOINTS / REBUILT
    try:
        folder.mkdir(parents=True)
        save_weights(folder, VersionReader(run_folder / VERSIONS).tensors(step), Share(0), digest_tensor)
        finish_folder(folder, model)
    except (VersionLogError, OSError) as error:
        forget(run_folder)
        return None, f"the weights of step {step} are not to be had: {error}"
    return NewerWeights(step, progress, folder), ""


def forget(run_folder: Path) -> None:
    """The folder of rebuilt weights: the engine has read them, or who rebuilt them is no more."""
    shutil.rmtree(run_folder / CHECKPOINTS / REBUILT, ignore_errors=True)


def unmark(run_folder: Path) -> None:
    """Where a run goes on from a checkpoint: the steps after it are trained anew, on other samples."""
    (run_folder / MARKER).unlink(missing_ok=True)


class Saving:
    """Methods are collective; the time that they take is the phase `checkpoint`."""

    def __init__(
        self, checkpoints: Checkpoints, engine: Engine, weights: Weights, log: RunLog, clock: StepClock, heartbeat: Heartbeat,
        save_progress: Callable[[Path], None],
    ) -> None:  # fmt: skip
        """`save_progress` writes what is known of the prompts into a checkpoint's folder; called on rank 0."""
        self.checkpoints, self.engine, self.weights = checkpoints, engine, weights
        self.log, self.clock, self.heartbeat = log, clock, heartbeat
        self._save_progress = save_progress

    def write(self, step: int, *, waits: bool = False) -> None:
        """One after `step` steps. `waits`: until it is on the disk."""
        self.heartbeat.phase = f"checkpoint after {step} steps"
        span = self.log.timeline.span("checkpoint", "trainer", step=step)
        with self.clock.phase("checkpoint"), span, self.weights.devices.training():
            self.checkpoints.write(step, self.engine, self.weights.whole_tensors(), self._save_progress)
        if waits:
            self.checkpoints.finish()

    def write_before_stop(self, step: int) -> None:
        """After `step` whole steps, where there is none yet of a step that this process has done. The replicas end."""
        if self.checkpoints.is_unsaved(step):
            self.weights.end_replicas()
            self.write(step, waits=True)
