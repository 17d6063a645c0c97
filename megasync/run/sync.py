"""The sync of a run: the engine's weights are brought to the replicas, version by version.

Every public method is collective. Leaves out when it is done (loop.py) and how weights travel (bridge/send/).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from bridge.export.exporter import Exporter
from bridge.messages import SyncError, SyncReport
from bridge.replicas.actors import TooFewReplicasError
from bridge.replicas.pool import ReplicaPool
from bridge.send.publish import Publisher
from engine.engine import Engine
from megasync.config.schema import Config
from megasync.report.log import RunLog
from megasync.rollouts.metrics import speculation_metrics
from megasync.run.canary import Canary
from megasync.run.placement import DeviceSharing
from megasync.run.rank_zero import RankZero
from megasync.run.scaling import Scaling
from megasync.run.versions import VersionLog

MERGE_ERROR_NOTE = 0.5
SYNC_ATTEMPTS = 3


@dataclass
class WeightSync:
    """The syncs of one run."""

    config: Config
    engine: Engine
    log: RunLog
    exporter: Exporter
    publisher: Publisher
    pool: RankZero[ReplicaPool]
    devices: DeviceSharing
    canary: Canary | None  # sync.canary_tolerance
    version_log: VersionLog | None  # sync.log
    scaling: RankZero[Scaling] | None  # not on devices that the trainer shares
    metrics: list[dict[str, float]] = field(default_factory=list)  # of all syncs so far
    has_noted_merge_error: bool = False

    def publish(self, version: int) -> dict[str, float]:
        """Bring every replica to the engine's weights as `version`; a replica that fails is replaced, and joins a later sync.

        Raises:
            SyncError: the sync was refused, or failed SYNC_ATTEMPTS times.
            CanaryError: a replica gives other log-probs than the trainer.
            TooFewReplicasError: on every rank; the weights are whole.
        """
        with self.devices.sync():
            if self.canary is not None:
                self.canary.score_by_trainer(self.engine)
            report = self._publish(version)
            found = self.version_log.write(version) if self.version_log is not None else {}  # before the canary may stop the run
            if self.canary is not None:
                found |= self.canary.compare(version, self.pool.here, self.publisher)
        for stage in report.stages:
            self.log.timeline.add(stage.name, "sync", stage.start, stage.end, {"version": version})
        self.metrics.append(self._metrics(report) | found)
        return self.metrics[-1]

    def _publish(self, version: int) -> SyncReport:
        slot = version % self.config.adapter_slots
        for _ in range(SYNC_ATTEMPTS - 1):
            self._change_members(version)
            try:
                return self.publisher.publish(version, slot=slot)
            except SyncError as error:
                if error.refused or not (error.failed_replicas or error.stale_replicas):
                    raise
                self.log.note(f"{error}; the sync is repeated")
                if self.pool.here is not None:
                    self.pool.here.replace(*error.failed_replicas)
        self._change_members(version)
        return self.publisher.publish(version, slot=slot)

    def _change_members(self, version: int) -> None:
        """Restarted and requested replicas take part from now on, and replicas marked for removal leave once idle; waits for
        replicas where there are too few.
        """
        is_changed, too_few = self.pool.call(lambda pool: self._rejoin(pool, version))
        if too_few:
            raise TooFewReplicasError(too_few)
        if is_changed:
            self.publisher.close()  # the next sync connects to the new members

    def _rejoin(self, pool: ReplicaPool, version: int) -> tuple[bool, str]:
        """On rank 0: whether the members changed, and why there are too few."""
        rollout, scaling = self.config.rollout, self.scaling.here if self.scaling is not None else None
        try:
            if scaling is not None:
                scaling.apply_request(version)
            is_changed = pool.rejoin(rollout.min_replicas, rollout.restart_timeout_seconds)
            if scaling is not None:
                scaling.write_answer(version)
        except TooFewReplicasError as error:
            return False, str(error)
        else:
            return is_changed, ""
        finally:
            for note in pool.drain_notes():
                self.log.note(note)

    def _metrics(self, report: SyncReport) -> dict[str, float]:
        metrics = {
            "sync/seconds": report.seconds,
            "sync/bytes": float(report.num_bytes),
            "sync/gb_per_second": report.gb_per_second,
            "sync/pause_seconds": report.pause_seconds,
            "sync/verified": float(report.verified),
        }
        if self.pool.here is not None:
            metrics["sync/replicas"] = float(len(self.pool.here.members))
            if self.config.rollout.speculation.is_set:
                metrics |= speculation_metrics(self.pool.here.take_speculation())
        if report.sent_bytes is not None:
            metrics["sync/sent_bytes"] = float(report.sent_bytes)
        lora = self.config.engine.lora
        if lora.rank and lora.sync != "adapter":
            metrics["lora/merge_error"] = self._merge_error()
        return metrics

    def _merge_error(self) -> float:
        """The share of the adapters' update that the last merge lost; a note once it is above MERGE_ERROR_NOTE."""
        error = self.exporter.merge_error()
        if error > MERGE_ERROR_NOTE and not self.has_noted_merge_error:
            self.has_noted_merge_error = True
            dtype = self.config.model.dtype
            self.log.note(
                f"lora/merge_error is {error:.2f}: rounding W + B A to {dtype} loses that share of the update, so that vLLM "
                "samples from nearly the base model; raise engine.optimizer.learning_rate or engine.lora.alpha"
            )
        return error
