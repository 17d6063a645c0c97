"""What a run writes of each step: its metrics with times and memory, and its first responses with what both sides say of them.

Leaves out the files (megasync/reporting/log.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

from engine.attention import fused
from engine.batch.batch import SampleTable
from engine.engine import Engine
from engine.minibatch import MiniBatch
from engine.runtime import memory
from megasync.config.schema import Config
from megasync.reporting.log import RunLog
from megasync.rollouts.rollout import RolloutBatch
from megasync.rollouts.token_lines import rows_of_first_members, with_trainer_log_probs
from megasync.run.clock import StepClock
from megasync.run.sameness import compare


class StepLog:
    """Of one rank; rank 0 writes."""

    def __init__(
        self, config: Config, engine: Engine, log: RunLog, clock: StepClock, *, first_step: int, is_writer: bool
    ) -> None:
        self.config, self.engine, self.log, self.clock = config, engine, log, clock
        self.first_step, self.is_writer = first_step, is_writer
        self.generated: SampleTable | None = None  # the batch of the step, on rank 0 with all tokens
        self.lines: list[dict[str, Any]] = []  # for samples.jsonl, of the step that is trained

    def write(self, step: int, metrics: dict[str, float]) -> None:
        """The step's line in metrics.jsonl. Not collective."""
        times = self.clock.take(generates=self.config.algorithm.name == "grpo")
        seconds = times["step/seconds"] - times["step/evaluation_seconds"] - times["step/checkpoint_seconds"]
        times["train/tokens_per_second"] = metrics.get("train/response_tokens", 0.0) / seconds
        is_first, uses_kernels = step == self.first_step, self.engine.use_fused and not self.config.model.exact
        if is_first and uses_kernels and (problem := fused.problem()):
            self.log.note(problem)
        self.log.step(step + 1, {"version": step + 1, **metrics, **times, **memory.memory_metrics()})

    def compare(self, step: int, trained: Sequence[MiniBatch]) -> dict[str, float]:
        """model.exact: what sameness.compare finds in the step's batch, on rank 0; else nothing. Collective."""
        if not self.config.model.exact or self.generated is None:
            return {}
        log_probs = self.engine.old_log_probs(trained, self.generated, range(len(self.generated)))
        recomputes = self.config.rollout.cache_on_update == "recompute"
        return compare(self.generated.samples, log_probs, step, recomputes=recomputes) if self.is_writer else {}

    def samples(self, step: int, rollout: RolloutBatch, trained: Sequence[MiniBatch]) -> None:
        """The step's first responses, with what both sides say of their tokens. Collective."""
        columns, number = rollout.samples.columns, min(self.config.run.log_samples, self.config.data.batch_size)
        rows = rows_of_first_members(columns["group"], columns["member"], number)
        lines, self.lines = self.lines, []
        if chosen := [row for of_member in rows for row in of_member]:
            log_probs = iter(self.engine.old_log_probs(trained, rollout.samples, chosen))
            told = [list(islice(log_probs, len(of_member))) for of_member in rows]
            lines = [with_trainer_log_probs(*each) for each in zip(lines, told, strict=True)] if lines else []
        self.log.samples(step + 1, lines)

    def give_up(self, step: int) -> None:
        """The lines of a step that failed. Not collective."""
        self.log.samples(step + 1, self.lines)
