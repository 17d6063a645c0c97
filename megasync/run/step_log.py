"""The lines of each step: its metrics with times and memory, and its first responses with the log-probs of both sides.

A step's line has its wall time by phase, and the phases add up to it. Its time is that since the line before, so that evaluation
and checkpoint after step 10 are in the line of step 11; after the last step they count as the end. Leaves out rollouts ahead of
the steps (timeline.json), and the files (megasync/report/log.py).

    timer = StepTimer(psutil.Process().create_time())
    timer.start()                                   # the first step begins
    with timer.phase("train"): ...
    timer.flush(generates=True)                     # {"step/seconds": 1.5, "step/train_seconds": 0.6, ...}
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.attention import fused
from engine.engine import Engine
from engine.minibatch import MiniBatch
from engine.runtime import memory
from engine.sample import Sample
from megasync.config.schema import Config
from megasync.report.callbacks import StepResult, call_back, resolve_callbacks
from megasync.report.log import TRAINING_DEVICE, RunLog
from megasync.rollouts.requests import rows_of_first_members, with_trainer_log_probs
from megasync.rollouts.rollout import RolloutBatch
from megasync.run.rank_zero import on_rank_zero

PHASES = ("rollout", "log_probs", "train", "sync", "evaluation", "checkpoint")
OF_GENERATION = ("rollout", "sync")


def compare(
    samples: Sequence[Sample | None], trained: Sequence[npt.NDArray[np.float32]], version: int, *, recomputes: bool
) -> dict[str, float]:
    """Counts trained tokens, and those whose two log-probs differ.

    Args:
        samples: of the step, all with their tokens.
        trained: of each sample the trainer's log-probs of its response's tokens, before the step.
        version: of the weights that the step trains.
        recomputes: whether new weights recompute what a sample had cached (rollout.cache_on_update).
    """
    compared = differing = 0
    for sample, log_probs in zip(samples, trained, strict=True):
        assert sample is not None
        is_sampled = sample.is_sampled if len(sample.is_sampled) else np.ones(len(sample.response_ids), np.bool_)
        is_own = (np.asarray(sample.weight_versions) == version) & is_sampled
        if not recomputes and (is_own != is_sampled).any():
            continue
        theirs = np.asarray(sample.rollout_log_probs)
        compared += int(is_own.sum())
        differing += int(((theirs != log_probs) & is_own).sum())
    return {"exact/compared_tokens": float(compared), "exact/differing_tokens": float(differing)}


class StepTimer:
    """Seconds of one rank by phase. A phase within another counts as the outer one."""

    def __init__(self, begin_seconds: float, now: Callable[[], float] = time.time) -> None:
        """`begin_seconds`: when the process was started, by the clock `now`."""
        self.now, self.begin_seconds = now, begin_seconds
        self.start_seconds = self.steps_seconds = 0.0  # before the first step, and of all steps whose lines are written
        self._line_seconds: float | None = None
        self._phases: dict[str, float] = {}
        self._is_inside = False

    def start(self) -> None:
        """The first step begins."""
        self._line_seconds, self._phases = self.now(), {}
        self.start_seconds = self._line_seconds - self.begin_seconds

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        if self._is_inside:
            yield
            return
        begin, self._is_inside = self.now(), True
        try:
            yield
        finally:
            name, self._is_inside = name.replace("-", "_"), False
            self._phases[name] = self._phases.get(name, 0.0) + self.now() - begin

    @property
    def elapsed(self) -> float:
        return self.now() - self.begin_seconds

    def flush(self, *, generates: bool) -> dict[str, float]:
        """Metrics of the step whose line is written now: `step/seconds`, and its parts, the rest as `step/other_seconds`."""
        assert self._line_seconds is not None
        end = self.now()
        seconds, self._line_seconds = end - self._line_seconds, end
        spent, self._phases = self._phases, {}
        parts = {name: spent.get(name, 0.0) for name in PHASES if generates or name not in OF_GENERATION}
        self.steps_seconds += seconds
        metrics = {"step/seconds": seconds, **{f"step/{name}_seconds": part for name, part in parts.items()}}
        return metrics | {"step/other_seconds": seconds - sum(parts.values())}

    def summary(self) -> dict[str, float]:
        """Seconds in all: the start, the steps and the end make the total."""
        total = self.elapsed
        start = self.start_seconds if self._line_seconds is not None else total
        end = total - start - self.steps_seconds
        return {"seconds_start": start, "seconds_steps": self.steps_seconds, "seconds_end": end, "seconds_total": total}


class StepLog:
    """The step log of one rank; rank 0 writes."""

    def __init__(
        self, config: Config, engine: Engine, log: RunLog, timer: StepTimer, *, first_step: int, is_writer: bool
    ) -> None:
        self.config, self.engine, self.log, self.timer = config, engine, log, timer
        self.first_step, self.is_writer = first_step, is_writer
        self.callbacks = dict(zip(config.run.callbacks, resolve_callbacks(config.run.callbacks), strict=True))
        self._lines: list[dict[str, Any]] = []  # for samples.jsonl, of the step that is trained
        self._in_training: dict[str, float] = {}  # memory of a device that replicas share, while they sleep

    def write(self, step: int, metrics: dict[str, float]) -> None:
        """The step's line in metrics.jsonl; then the callbacks. Collective.

        Raises:
            RankZeroError: the line cannot be written, or a callback raised; on every rank.
        """
        times = self.timer.flush(generates=self.config.algorithm.name == "grpo")
        seconds = times["step/seconds"] - times["step/evaluation_seconds"] - times["step/checkpoint_seconds"]
        times["train/tokens_per_second"] = metrics.get("train/response_tokens", 0.0) / seconds
        is_first, uses_kernels = step == self.first_step, self.engine.use_fused and not self.config.model.exact
        if is_first and uses_kernels and (problem := fused.problem()):
            self.log.note(problem)
        line = {"version": step + 1, **metrics, **times, **memory.memory_metrics(), **self._in_training}
        on_rank_zero(lambda: self.log.step(step + 1, line))
        if self.callbacks:
            result = StepResult(step + 1, line, self.config.run.folder, self.config)
            on_rank_zero(lambda: call_back(self.callbacks, result))

    def compare(self, step: int, rollout: RolloutBatch, trained: Sequence[MiniBatch]) -> dict[str, float]:
        """With model.exact the function of this name on the step's batch, on rank 0; else nothing. Collective."""
        if not self.config.model.exact:
            return {}
        log_probs = self.engine.old_log_probs(trained, rollout.generated, range(len(rollout.generated)))
        recomputes = self.config.rollout.cache_on_update == "recompute"
        return compare(rollout.generated.samples, log_probs, step, recomputes=recomputes) if self.is_writer else {}

    def begin(self, rollout: RolloutBatch) -> None:
        """Keep the batch's lines until it is trained, or fails. Not collective."""
        self._lines = rollout.lines

    def samples(self, step: int, rollout: RolloutBatch, trained: Sequence[MiniBatch]) -> None:
        """The step's first responses, with the log-probs of both sides. Collective. The batch has just been trained.

        Raises:
            RankZeroError: they cannot be written; on every rank.
        """
        if self.config.rollout.is_colocated and (taken := memory.device_bytes()):
            self._in_training = {TRAINING_DEVICE: float(taken)}
        columns, number = rollout.samples.columns, min(self.config.run.log_samples, self.config.data.batch_size)
        rows = rows_of_first_members(columns["group"], columns["member"], number)
        lines, self._lines = self._lines, []
        if chosen := [row for of_member in rows for row in of_member]:
            log_probs = iter(self.engine.old_log_probs(trained, rollout.samples, chosen))
            by_member = [list(islice(log_probs, len(of_member))) for of_member in rows]
            lines = [with_trainer_log_probs(*each) for each in zip(lines, by_member, strict=True)] if lines else []
        on_rank_zero(lambda: self.log.samples(step + 1, lines))

    def give_up(self, step: int) -> None:
        """The lines of a step that failed. Not collective."""
        self.log.samples(step + 1, self._lines)
