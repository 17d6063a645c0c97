"""RolloutSession: a run that trains on what its replicas generate; their start, syncs, rollouts and evaluations.

Every public method is collective unless it says otherwise. Leaves out what every run has (session.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from bridge.export.exporter import Exporter
from bridge.processes import host_identity
from bridge.replicas.actors import TooFewReplicasError
from bridge.send.connection import Ranks, choose_route
from engine.minibatch import MiniBatch
from megasync.config.schema import Config
from megasync.data.load import RunData
from megasync.report.log import WORKER_DEVICE, WORKER_PEAK
from megasync.rollouts.evaluation import evaluations
from megasync.rollouts.progress import Progress
from megasync.rollouts.rollout import RolloutBatch, Rollouts, without_tokens
from megasync.run.canary import build_canary
from megasync.run.heartbeat import Heartbeat
from megasync.run.placement import DeviceSharing, make_room_for_replicas
from megasync.run.rank_zero import RankZero, RankZeroError, TokenScatter, control_group, of_rank_zero, on_rank_zero
from megasync.run.replica_start import ReplicaStart
from megasync.run.scaling import Scaling
from megasync.run.session import ExitCallbacks, Session
from megasync.run.sync import WeightSync
from megasync.run.versions import VersionLog
from megasync.run.weights import build_adapter_source, build_publisher

Evaluated = tuple[dict[str, float], list[dict[str, Any]]]  # metrics, and lines of samples.jsonl


class RolloutSession(Session):
    """Rank 0 has the replicas and the rollouts."""

    def __init__(
        self, config: Config, data: RunData | None, replica_start: ReplicaStart | None, heartbeat: Heartbeat, ends: ExitCallbacks
    ) -> None:
        """`data`, `replica_start`: rank 0's; the replicas have begun to start."""
        super().__init__(config, data, heartbeat, ends)
        self.scatter = TokenScatter.from_layout(self.layout)
        offload = make_room_for_replicas(config, self.engine, self.log.timeline)
        if torch.cuda.is_available() and not config.rollout.is_colocated:  # the replicas start on devices of their own meanwhile
            self.heartbeat.phase = "warm-up"
            self.engine.warm_up()
        uses_adapter = config.engine.lora.rank > 0 and config.engine.lora.sync == "adapter"
        if not uses_adapter and (self.engine.wrapped.is_in_place or not config.rollout.is_colocated):
            self.weights.exporter.manifest()  # which the first sync needs; it gathers nothing of weights that are in place
        self.heartbeat.phase, begin_seconds = "start of the replicas", self.timer.elapsed
        self.pool = RankZero(lambda: of_rank_zero(replica_start).finish())
        self.log.note(f"vLLM is ready after {self.timer.elapsed - begin_seconds:.0f} s more")
        self.devices = DeviceSharing(config, offload, self.pool, self.log.timeline)
        exporter = self._choose_exporter()
        source = build_adapter_source(self.engine) if uses_adapter else exporter
        publisher = build_publisher(source, self.pool.here, config)
        ends.callback(publisher.close)
        first = self.first_progress, self.first_step
        teachers = RankZero(lambda: of_rank_zero(replica_start).finish_teachers(self.log.note)).here
        judges = RankZero(lambda: of_rank_zero(replica_start).finish_judges(self.log.note)).here or {}
        self.rollouts = RankZero(
            lambda: Rollouts(config, of_rank_zero(self.pool.here), of_rank_zero(data), self.log, *first, teachers, judges)
        )
        if self.rollouts.here is not None:
            ends.callback(self.rollouts.here.close)
        self.sync = WeightSync(
            config,
            self.engine,
            self.log,
            exporter,
            publisher,
            self.pool,
            self.devices,
            canary=build_canary(config, data, self.log),
            version_log=VersionLog(config, exporter) if config.sync.log != "off" else None,
            scaling=None if config.rollout.is_colocated else RankZero(self._scaling),
        )

    def _scaling(self) -> Scaling:
        rollouts = of_rank_zero(self.rollouts.here)
        return Scaling(self.config, of_rank_zero(self.pool.here), rollouts.release_idle, self.log.note)

    def _choose_exporter(self) -> Exporter:
        """With lanes between hosts every rank sends."""
        hosts = self.pool.call(lambda pool: pool.reader_hosts())
        everywhere = {*hosts, *Ranks(control_group()).gather(host_identity())}
        route = choose_route(self.config.sync, everywhere, shares_devices=self.config.rollout.is_colocated)
        return self.weights.all_ranks_exporter if route.has_lanes else self.weights.exporter

    # ------------------------------------------------------------------------------------------------ one step

    def publish(self, version: int, trained: dict[str, float] | None = None) -> dict[str, float]:
        """Bring the replicas to the trainer's weights; they generate with them from now on. Metrics of the sync.

        `trained`: metrics of the step that made `version`. It is not lost where too few replicas are left: the weights after it
        are written as a checkpoint.

        Raises:
            TooFewReplicasError: on every rank, with that checkpoint on the disk.
        """
        self.heartbeat.phase = f"publish, version {version}"
        try:
            with self.timer.phase("sync"):
                metrics = self.sync.publish(version)
        except TooFewReplicasError:
            if trained is not None:
                self.step_log.write(self.step, trained)
            self.save_before_stop(version)
            raise
        self.rollouts.call(lambda rollouts: rollouts.serve(version))
        return metrics

    def start_rollouts(self, step: int) -> None:
        """Let the samples begin that `step`, which is trained next, and `rollout.max_staleness` make room for."""
        self.rollouts.call(lambda rollouts: rollouts.admit(step))

    def take_rollout(self, step: int) -> RolloutBatch | None:
        """Wait for the batch of `step`, with the tokens that this rank trains on; None: too few replicas are left.

        Then the trainer has the devices, where it shares them.
        """
        self.heartbeat.phase = f"rollout, step {step + 1}"
        with self.timer.phase("rollout"):
            with self._saved_if_it_fails(step):
                batch = self.rollouts.call(lambda rollouts: rollouts.take(step), without_tokens)
            if batch is None:
                return None
            self.step_log.begin(batch)
            with self.span("scatter"):
                samples = self.scatter(batch.generated, self.engine.needed_samples(batch.generated))
            self.devices.acquire_for_training()
        return RolloutBatch(samples, batch.generated, batch.metrics)

    def log_samples(self, rollout: RolloutBatch, trained: Sequence[MiniBatch]) -> None:
        """Log the step's first responses, and record its groups as trained."""
        self.step_log.samples(self.step, rollout, trained)
        if self.rollouts.here is not None:
            self.rollouts.here.record(self.step + 1)

    # ------------------------------------------------------------------------------------------------ checkpoints

    def checkpoint_if_due(self, step: int) -> None:
        """First the weights of `step` are marked, if they are in the log of versions: the checkpoint may not be completed."""
        if self.config.keeps_versions and not self.config.engine.lora.rank:
            self.checkpoints.mark(step, lambda: of_rank_zero(self.rollouts.here).progress(with_samples=False))
        if self.sync.version_log is not None:
            self.sync.version_log.prune()
        super().checkpoint_if_due(step)

    def save_before_stop(self, step: int) -> None:
        """Write a checkpoint after `step` whole steps, unless there is one or this process has done no step. The replicas end."""
        if self.checkpoints.is_unsaved(step):
            self.devices.end_replicas()
            self.write_checkpoint(step, waits=True)

    @contextmanager
    def _saved_if_it_fails(self, step: int) -> Iterator[None]:
        """RankZeroError leaves the block with a checkpoint on the disk."""
        try:
            yield
        except RankZeroError:
            self.save_before_stop(step)
            raise

    def progress(self) -> Progress:
        return of_rank_zero(self.rollouts.here).progress()

    def trainer_has_devices(self) -> AbstractContextManager[None]:
        return self.devices.training()

    # ------------------------------------------------------------------------------------------------ evaluation and end

    def find_metrics(self, step: int) -> dict[str, float]:
        with self._saved_if_it_fails(step):
            while (found := self._evaluated(step)) is None:
                self.publish(step)  # too few replicas were left; restarted ones get the weights
        metrics, lines = found
        on_rank_zero(lambda: self.log.samples(step, lines))
        return metrics

    def _evaluated(self, step: int) -> Evaluated | None:
        """Lines: on rank 0 alone."""

        def without_lines(found: Evaluated | None) -> Evaluated | None:
            return None if found is None else (found[0], [])

        return self.rollouts.call(lambda rollouts: self._evaluate_sets(rollouts, step), without_lines)

    def _evaluate_sets(self, rollouts: Rollouts, step: int) -> Evaluated | None:
        """On rank 0: metrics, and lines of samples.jsonl."""
        metrics, lines = dict[str, float](), list[dict[str, Any]]()
        for evaluation in evaluations(self.config, rollouts.data):
            with self.log.timeline.span("evaluate", "rollout", step=step, set=evaluation.name):
                outcome = rollouts.evaluate(evaluation)
            if outcome is None:
                return None
            metrics |= outcome.metrics
            lines += outcome.lines
        return metrics, lines

    @property
    def sync_metrics(self) -> list[dict[str, float]]:
        return self.sync.metrics

    def finish_files(self) -> dict[str, Any]:
        """The summary has the largest memory of a vLLM worker, in bytes."""
        of_rank_zero(self.rollouts.here).records.wait()
        host, device = of_rank_zero(self.pool.here).memory_bytes()
        return {WORKER_PEAK: host or None, **({WORKER_DEVICE: device} if device else {})}
