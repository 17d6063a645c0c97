"""Session: engine, weights, rollouts and log of one rank, put together from a Config; the words that loop.py speaks.

Every public method is collective unless it says otherwise. Leaves out the order of things, which is the loop's, and the run's end
(ending.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import psutil

from engine.engine import Engine
from engine.minibatch import MiniBatch
from engine.runtime import parallel
from engine.runtime.device import has_cuda
from engine.sample import Sample
from megasync.checks.unused import unused_keys
from megasync.config.files import is_asked_to_stop
from megasync.config.schema import Config
from megasync.data.load import RunData
from megasync.planning.lengths import supervised_lengths
from megasync.planning.record import write_plan
from megasync.reporting.log import RunLog
from megasync.reporting.page import write_unfinished_report
from megasync.rewards.pool import RewardPool
from megasync.rollouts.evaluation import evaluations
from megasync.rollouts.group import order_notes
from megasync.rollouts.progress import Progress, save_progress
from megasync.rollouts.rollout import RolloutBatch, Rollouts, without_tokens
from megasync.run.canary import build_canary
from megasync.run.checkpoints import Checkpoints, Saving
from megasync.run.heartbeat import Heartbeat
from megasync.run.rank_zero import RankZeroError, TokenScatter, TooFewReplicasError, on_rank_zero
from megasync.run.replica_start import ReplicaStart
from megasync.run.scaling import Scaling
from megasync.run.step_log import StepClock, StepLog
from megasync.run.supervised import held_out_metrics, sample_lines
from megasync.run.weights import Weights


class Session:
    """What a run holds on one rank. Built by train.py; `close` in any case."""

    def __init__(self, config: Config, data: RunData | None, replica_start: ReplicaStart | None = None) -> None:
        """`replica_start`: on rank 0, where there are to be replicas, which have begun to start."""
        self.config = config
        self.clock = StepClock(psutil.Process().create_time())
        self.heartbeat = Heartbeat.of_process(config.run.hung_rank_timeout_seconds)
        self.heartbeat.start()
        self.layout = parallel.initialize(config.engine.parallel, config.run.seed)
        self.checkpoints = Checkpoints(config)
        self.step = self.first_step = self.checkpoints.first_step
        self.progress = self.checkpoints.progress(config.data.batch_size)
        former = on_rank_zero(self.checkpoints.begin_folder)
        self.engine = Engine(
            config.model,
            config.engine,
            config.algorithm,
            num_steps=config.run.steps,
            temperature=config.rollout.temperature,
            max_new_tokens=config.rollout.max_sampled_tokens,
            seed=config.run.seed,
            **self.checkpoints.engine_arguments(),
        )
        resumed = self.checkpoints.restore(self.engine)
        self.log = RunLog(config, first_step=self.first_step, write=self.layout.rank == 0)
        self._data_of_rank = data
        if former:
            self.log.note(f"the results of a former run in {config.run.folder} are now in {former}")
        of_data = [*data.notes, *order_notes(self.progress, data.order(config))] if data is not None else []
        for note in (*resumed, *unused_keys(config), *of_data):
            self.log.note(note)
        of_step = (config, self.engine, self.log, self.clock)
        self.step_log = StepLog(*of_step, first_step=self.first_step, is_writer=self.layout.rank == 0)
        self.weights = Weights(config, self.engine, self.log, replica_start)
        parts = (self.engine, self.weights, self.log, self.clock, self.heartbeat)
        self.saving = Saving(self.checkpoints, *parts, save_progress=lambda folder: save_progress(folder, self._progress()))
        self.scatter = TokenScatter.from_layout(self.layout)
        self.rollouts: Rollouts | None = None
        self.is_stopped = False  # before all steps were done, because it was asked to
        self.evaluated: dict[int, dict[str, float]] = {}  # by the number of steps before it
        self._write_plan(has_timed_calls=False)
        self.log.note(f"the trainer is ready after {self.clock.elapsed:.0f} s")

    def _write_plan(self, *, has_timed_calls: bool) -> None:
        """plan.json, on rank 0, and what is to be said of it. On CPUs calls are timed for it, once all else waits."""
        if self.layout.rank != 0 or has_timed_calls == has_cuda():
            return
        data = self._data_of_rank
        lengths = supervised_lengths(data.prompts, data.train) if data is not None else []
        for note in write_plan(self.config, self.layout.world_size, self.layout.pipeline_rank, lengths):
            self.log.note(note)

    # ------------------------------------------------------------------------------------------------ steps and log

    def steps(self) -> Iterator[int]:
        """The steps that are left, or until the run is asked to stop; times them."""
        for step in range(self.first_step, self.config.run.steps):
            self.step = step
            if on_rank_zero(lambda: is_asked_to_stop(self.config.run.folder)):
                self.step, self.is_stopped = step - 1, True
                return
            if step == self.first_step:
                self._write_plan(has_timed_calls=True)
                self.clock.start()
            yield step

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Time a part of the step for timeline.json. Not collective."""
        self.heartbeat.phase = f"{name}, step {self.step + 1}"
        with self.clock.phase(name), self.log.timeline.span(name, "trainer", step=self.step + 1):
            yield

    def log_samples(self, rollout: RolloutBatch, trained: Sequence[MiniBatch]) -> None:
        """Write the step's first responses down, and that its groups are trained."""
        self.step_log.samples(self.step, rollout, trained)
        if self.rollouts is not None:
            self.rollouts.record(self.step + 1)

    # ------------------------------------------------------------------------------------------------ data

    def supervised_batch(self, step: int) -> list[Sample]:
        """The supervised examples of a step, the same on every rank. Not collective."""
        size, order = self.config.data.batch_size, self._data.order(self.config)
        first = self.progress.num_trained + (step - self.first_step) * size
        examples = [self._data.train[order.index(ordinal)] for ordinal in range(first, first + size)]
        if step == self.first_step:
            lines = list(sample_lines(self._data.prompts, examples[: self.config.run.log_samples]))
            self.log.samples(step + 1, lines)
        return self._data.prompts.supervised_batch(examples)

    def start_replicas(self) -> None:
        """Wait until vLLM is up, on rank 0, and connect the weight bridge."""
        self.heartbeat.phase = "start of the replicas"
        begin_seconds = self.clock.elapsed
        self.weights.start_replicas()
        self.log.note(f"vLLM is ready after {self.clock.elapsed - begin_seconds:.0f} s more")
        self.weights.canary = build_canary(self.config, self._data_of_rank, self.log)
        pool = self.weights.pool
        if pool is not None:
            rewards = RewardPool(self.config.rollout)
            self.rollouts = Rollouts(self.config, pool, self._data, rewards, self.log, self.progress, self.first_step)
            if not self.config.rollout.is_colocated:
                self.weights.scaling = Scaling(self.config, pool, self.rollouts.stream.let_go, self.log.note)

    def publish(self, version: int, trained: dict[str, float] | None = None) -> dict[str, float]:
        """Bring the replicas to the trainer's weights; they generate with them from now on. Metrics of the sync.

        `trained`: metrics of the step that made `version`. It is not lost where too few replicas are left: the weights after it
        are written as a checkpoint.

        Raises:
            TooFewReplicasError: on every rank, with that checkpoint on the disk.
        """
        self.heartbeat.phase = f"publish, version {version}"
        try:
            with self.clock.phase("sync"):
                metrics = self.weights.publish(version)
        except TooFewReplicasError:
            if trained is not None:
                self.step_log.write(self.step, trained)
            self.saving.write_before_stop(version)
            raise
        on_rank_zero(lambda: self._rollouts.stream.serve(version))
        return metrics

    def start_rollouts(self, step: int) -> None:
        """Let the samples begin that `step`, which is trained next, and `rollout.max_staleness` make room for."""
        on_rank_zero(lambda: self._rollouts.stream.admit(step))

    def take_rollout(self, step: int) -> RolloutBatch:
        """The batch of `step`, waiting for it if need be, with the tokens that this rank trains on.

        Then the trainer has the devices, where it shares them.
        """
        self.heartbeat.phase = f"rollout, step {step + 1}"
        with self.clock.phase("rollout"):
            batch: RolloutBatch = self._with_replicas(step, lambda: self._take_rollout(step), without_tokens)
            with self.span("scatter"):
                samples = self.scatter(batch.samples, self.engine.needed_samples(batch.samples))
            self.step_log.generated = batch.samples
            self.weights.devices.acquire_for_training()
        return RolloutBatch(samples, batch.metrics)

    def _take_rollout(self, step: int) -> RolloutBatch | None:
        """On rank 0."""
        batch = self._rollouts.take(step)
        if batch is not None:
            self.step_log.lines = batch.lines
        return batch

    def _with_replicas(self, version: int, work: Callable[[], Any], for_others: Callable[[Any], Any] = lambda it: it) -> Any:
        """What `work` on rank 0 gives; where that is None too few replicas are left, and it goes on with those that come back.

        Raises:
            RankZeroError: on every rank; the weights of `version` are written as a checkpoint.
        """
        try:
            while (result := on_rank_zero(work, for_others)) is None:
                self.publish(version)
        except RankZeroError:
            self.saving.write_before_stop(version)
            raise
        return result

    # ------------------------------------------------------------------------------------------------ checkpoints

    def checkpoint_if_due(self, step: int) -> None:
        """Write a checkpoint after every `checkpoint.every_steps` steps; `finish` (ending.py) writes one after the last step.

        Before it the weights of `step` are marked, where they are in the log: it may not come to be.
        """
        if self.config.keeps_versions and not self.config.engine.lora.rank:
            self.checkpoints.mark(step, self._begun)
        self.weights.prune_versions()
        if self.checkpoints.is_due(step):
            self.saving.write(step)

    def _begun(self) -> Progress:
        """On rank 0."""
        return self._rollouts.begun()

    def _progress(self) -> Progress:
        """On rank 0."""
        if self.rollouts is not None:
            return self.rollouts.progress()
        done = self.progress.num_trained + (self.step + 1 - self.first_step) * self.config.data.batch_size
        return Progress(done, order=self._data_of_rank.order(self.config) if self._data_of_rank is not None else None)

    # ------------------------------------------------------------------------------------------------ evaluation

    def evaluate(self, step: int) -> float | None:
        """Write down what evaluations find after `step` steps; of supervised steps the accuracy, else None."""
        if not self.config.data.eval:
            return None
        self.heartbeat.phase = f"evaluation after {step} steps"
        with self.clock.phase("evaluation"):
            if self.config.algorithm.name == "sft":
                found = held_out_metrics(self.engine, self._data.prompts.supervised_batch(self._data.held_out))
            else:
                found = self._with_replicas(step, lambda: self._evaluate_rollouts(step))
        self.evaluated[step] = found
        self.log.evaluation(step, found)
        return found.get("eval/accuracy")

    def _evaluate_rollouts(self, step: int) -> dict[str, float] | None:
        """On rank 0. None: too few replicas are left."""
        metrics, lines = dict[str, float](), list[dict[str, Any]]()
        for evaluation in evaluations(self.config, self._data):
            with self.log.timeline.span("evaluate", "rollout", step=step, set=evaluation.name):
                outcome = self._rollouts.evaluate(evaluation)
            if outcome is None:
                return None
            metrics |= outcome.metrics
            lines += outcome.lines
        self.log.samples(step, lines)
        return metrics

    def evaluate_at_start(self) -> None:
        """Before the first step of this process; unless asked for, only what the log of a resumed run lost (RunLog)."""
        if self.config.rollout.evaluate_at_start:
            self.evaluate(self.first_step)
        elif self.first_step:
            self.evaluate_if_due(self.first_step)

    def evaluate_if_due(self, step: int) -> float | None:
        """Evaluate after every `rollout.evaluate_every_steps` steps."""
        every = self.config.rollout.evaluate_every_steps
        return self.evaluate(step) if every and step % every == 0 else None

    # ------------------------------------------------------------------------------------------------ the end

    def close(self, *, is_done: bool = False) -> None:
        """Take rewards and the weight bridge down, and close the log. Not collective; safe after any failure.

        `is_done`: all went well, and the heartbeat goes on until its `leave`.
        """
        with contextlib.ExitStack() as ends:  # all of them, the last first, whatever one raises: the disk may be full
            if not is_done and self.layout.rank == 0:
                ends.callback(write_unfinished_report, self.config.run.folder)
            ends.callback(self.log.close)
            ends.callback(self.weights.close)
            if self.rollouts is not None:
                ends.callback(self.rollouts.close)
            ends.callback(self.checkpoints.give_up)
            if not is_done:
                ends.callback(self.step_log.give_up, self.step)
                ends.callback(self.heartbeat.close)

    @property
    def _data(self) -> RunData:
        assert self._data_of_rank is not None
        return self._data_of_rank

    @property
    def _rollouts(self) -> Rollouts:
        assert self.rollouts is not None
        return self.rollouts
