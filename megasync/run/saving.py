"""When a run writes a checkpoint: after a due step, and before it stops. Leaves out what is in one (checkpoints.py)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from engine.engine import Engine
from megasync.reporting.log import RunLog
from megasync.run.checkpoints import Checkpoints
from megasync.run.clock import StepClock
from megasync.run.heartbeat import Heartbeat
from megasync.run.weights import Weights


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
