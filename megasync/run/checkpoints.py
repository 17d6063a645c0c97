"""A run's checkpoints: the one that it goes on from, and those that it writes. Leaves out what is in one (engine/checkpoint)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge.layout.digest import digest_tensor
from bridge.versions.writer import cut
from engine import checkpoint
from megasync.config.files import CHECKPOINTS, VERSIONS, set_aside
from megasync.rollouts.progress import Progress, load_progress
from megasync.run.newer import NewerWeights, find_newer, forget, mark, unmark
from megasync.run.rank_zero import on_rank_zero
from megasync.run.scale_request import forget_request

if TYPE_CHECKING:
    from engine.engine import Engine
    from megasync.config.schema import Config

GIVE_UP_SECONDS = 60.0  # for one that is being written when the run fails


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
        """Where the results of a former run are now, from which this one does not go on. On rank 0.

        Whatever `sync.log` is now: later versions in the log of the one that it goes on from are of steps that are trained anew.
        """
        if not self._newer:
            unmark(self.run_folder)
            forget(self.run_folder)
        if self.last:
            cut(self.run_folder / VERSIONS, self.first_step + 1)
            return None
        forget_request(self.run_folder)
        former = set_aside(self.run_folder)
        cut(self.run_folder / VERSIONS, 0)  # of a start that was killed before its first result
        return former

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
        if self._newer:
            on_rank_zero(lambda: forget(self.run_folder))
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
