"""Session: the parts of every run on one rank, complete once it is built; the vocabulary of loop.py.

Every public method is collective unless it says otherwise. Leaves out what trains on rollouts (rollout_session.py) and on given
answers (supervised.py), the order of things (loop.py) and the run's end (ending.py).
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import psutil

from engine.engine import Engine
from engine.runtime import parallel
from engine.sample import RolloutSampling
from megasync.checks.own_functions import own_functions
from megasync.checks.unused import unused_keys
from megasync.config.files import is_asked_to_stop
from megasync.config.schema import Config
from megasync.data.load import RunData
from megasync.report.log import RunLog
from megasync.report.page import write_unfinished_report
from megasync.rollouts.progress import Progress, save_progress
from megasync.rollouts.restore import order_notes
from megasync.run.checkpoints import Checkpoints
from megasync.run.heartbeat import Heartbeat
from megasync.run.rank_zero import on_rank_zero
from megasync.run.step_log import StepLog, StepTimer
from megasync.run.teacher import teacher_choice
from megasync.run.weights import Weights


class ExitCallbacks(contextlib.ExitStack):
    """How a run's parts end: the last built first, all of them, whatever one raises. Not collective."""

    is_done = False  # all went well

    def on_failure(self, end: Callable[[], None]) -> None:
        self.callback(lambda: None if self.is_done else end())


class Session(ABC):
    """The parts of every run."""

    def __init__(self, config: Config, data: RunData | None, heartbeat: Heartbeat, ends: ExitCallbacks) -> None:
        """`data`: rank 0's; supervised runs have it on all ranks. Each part adds its end to `ends`."""
        self.config, self.heartbeat = config, heartbeat
        self.timer = StepTimer(psutil.Process().create_time())
        self.layout = parallel.initialize(config.engine.parallel, config.run.seed)
        self.checkpoints = Checkpoints(config)
        self.step = self.first_step = self.checkpoints.first_step
        self.first_progress = self.checkpoints.progress(config.data.batch_size)
        former = on_rank_zero(self.checkpoints.begin_folder)
        self.engine = Engine(
            config.model,
            config.engine,
            config.algorithm,
            num_steps=config.run.steps,
            sampling=RolloutSampling(config.rollout.temperature, config.rollout.max_sampled_tokens),
            seed=config.run.seed,
            own=own_functions(config),
            teacher=teacher_choice(config),
            **self.checkpoints.engine_arguments(),
        )
        resumed = self.checkpoints.restore(self.engine)
        if self.layout.rank == 0:
            ends.on_failure(lambda: write_unfinished_report(config.run.folder))
        self.log = RunLog(config, first_step=self.first_step, write=self.layout.rank == 0)
        ends.callback(self.log.close)
        ends.callback(self.checkpoints.give_up)
        if former:
            self.log.note(f"the results of a former run in {config.run.folder} are now in {former}")
        of_data = list[str]()
        if data is not None:
            of_data = [*data.notes, *order_notes(self.first_progress, data.order(config), config.data.sampler)]
        for note in (*resumed, *unused_keys(config), *of_data):
            self.log.note(note)
        of_step = (config, self.engine, self.log, self.timer)
        self.step_log = StepLog(*of_step, first_step=self.first_step, is_writer=self.layout.rank == 0)
        ends.on_failure(lambda: self.step_log.give_up(self.step))
        self.weights = Weights(config, self.engine)
        self.is_stopped = False  # before all steps were done, because it was asked to
        self.evaluated: dict[int, dict[str, float]] = {}  # by the number of steps before it
        self.log.note(f"the trainer is ready after {self.timer.elapsed:.0f} s")

    # ------------------------------------------------------------------------------------------------ steps and log

    def steps(self) -> Iterator[int]:
        """The steps that are left, or until the run is asked to stop; times them."""
        for step in range(self.first_step, self.config.run.steps):
            self.step = step
            if on_rank_zero(lambda: is_asked_to_stop(self.config.run.folder)):
                self.step, self.is_stopped = step - 1, True
                return
            if step == self.first_step:
                self.timer.start()
            yield step

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Time a part of the step for timeline.json. Not collective."""
        self.heartbeat.phase = f"{name}, step {self.step + 1}"
        with self.timer.phase(name), self.log.timeline.span(name, "trainer", step=self.step + 1):
            yield

    # ------------------------------------------------------------------------------------------------ checkpoints

    def checkpoint_if_due(self, step: int) -> None:
        """Write a checkpoint after every `checkpoint.every_steps` steps; ending.py writes one after the last step."""
        if self.checkpoints.is_due(step):
            self.write_checkpoint(step)

    def write_checkpoint(self, step: int, *, waits: bool = False) -> None:
        """After `step` steps. `waits`: until it is on the disk."""
        self.heartbeat.phase = f"checkpoint after {step} steps"
        span = self.log.timeline.span("checkpoint", "trainer", step=step)
        with self.timer.phase("checkpoint"), span, self.trainer_has_devices():
            tensors = self.weights.whole_tensors()
            self.checkpoints.write(step, self.engine, tensors, lambda folder: save_progress(folder, self.progress()))
        if waits:
            self.checkpoints.finish()

    @abstractmethod
    def progress(self) -> Progress:
        """How far the run has come with its prompts. On rank 0."""

    def trainer_has_devices(self) -> AbstractContextManager[None]:
        """Within the block all of the trainer's state is on its devices."""
        return nullcontext()

    def export(self, folder: Path) -> None:
        with self.trainer_has_devices():
            self.weights.export(folder)

    # ------------------------------------------------------------------------------------------------ evaluation

    def evaluate(self, step: int) -> float | None:
        """Log the evaluations after `step` steps; returns the accuracy of a supervised run, else None."""
        if not self.config.data.eval:
            return None
        self.heartbeat.phase = f"evaluation after {step} steps"
        with self.timer.phase("evaluation"):
            found = self.find_metrics(step)
        self.evaluated[step] = found
        on_rank_zero(lambda: self.log.evaluation(step, found))
        return found.get("eval/accuracy")

    @abstractmethod
    def find_metrics(self, step: int) -> dict[str, float]:
        """Metrics of the held-out data, after `step` steps."""

    def evaluate_at_start(self) -> None:
        """Before the first step of this process; by default only what the log of a resumed run lost (RunLog)."""
        if self.config.rollout.evaluate_at_start:
            self.evaluate(self.first_step)
        elif self.first_step:
            self.evaluate_if_due(self.first_step)

    def evaluate_if_due(self, step: int) -> float | None:
        """Evaluate after every `rollout.evaluate_every_steps` steps."""
        every = self.config.rollout.evaluate_every_steps
        return self.evaluate(step) if every and step % every == 0 else None

    # ------------------------------------------------------------------------------------------------ for the summary

    @property
    def sync_metrics(self) -> list[dict[str, float]]:
        """The metrics of each sync."""
        return []

    def finish_files(self) -> dict[str, Any]:
        """Wait for files that are written in the background; more fields of the summary. On rank 0."""
        return {}
