"""A run's weights on their way out: the replicas with the bridge to them, and the Hugging Face folder.

Every public method is collective unless it says otherwise. Leaves out when it is done, which is the loop's.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import torch

from bridge.export.adapter import AdapterSource, AdapterSpec
from bridge.export.exporter import Exporter
from bridge.export.source import WeightSource, whole_tensors
from bridge.layout.digest import digest_tensor
from bridge.messages import SyncError, SyncReport
from bridge.processes import host_identity
from bridge.replicas import actors as bridge_actors
from bridge.replicas.pool import ReplicaPool
from bridge.send.connection import Ranks, choose_way
from bridge.send.publish import Publisher
from bridge.transport.open import resolve_transport
from engine.checkpoint import hf_folder
from engine.engine import Engine
from engine.runtime import parallel
from megasync.config.files import VERSIONS
from megasync.config.schema import Config
from megasync.reporting.log import RunLog
from megasync.run.canary import Canary
from megasync.run.placement import DeviceSharing
from megasync.run.rank_zero import TooFewReplicasError, control_group, on_rank_zero
from megasync.run.replica_start import ReplicaStart
from megasync.run.scaling import Scaling
from megasync.run.versions import VersionLog

MERGE_ERROR_NOTE = 0.5
SYNC_ATTEMPTS = 3


class Weights:
    """The engine's weights, and the replicas that they are brought to once `start_replicas` was called."""

    def __init__(self, config: Config, engine: Engine, log: RunLog, replica_start: ReplicaStart | None = None) -> None:
        """`replica_start`: rank 0's, where there are to be replicas."""
        self.config, self.engine, self.layout, self.log = config, engine, engine.layout, log
        self.exporter = build_exporter(engine, on_all_ranks=uses_ipc(config))  # of syncs
        self.pool: ReplicaPool | None = None  # rank 0's
        self.publisher: Publisher | None = None
        self.canary: Canary | None = None
        self.scaling: Scaling | None = None  # rank 0's
        self.version_log: VersionLog | None = None
        self.syncs: list[dict[str, float]] = []
        self.devices = DeviceSharing(config, engine, log.timeline)
        self._replica_start = replica_start
        self.noted_merge_error = False
        lora = config.engine.lora
        self.sends_adapters = lora.rank > 0 and lora.sync == "adapter"

    def start_replicas(self) -> None:
        """Wait until vLLM is up, on rank 0, and connect the weight bridge."""
        self.devices.give_to_replicas()
        on_rank_zero(self._finish_start)
        self.devices.pool = self.pool
        hosts = on_rank_zero(lambda: self.pool.reader_hosts() if self.pool is not None else [])
        everywhere = {*hosts, *Ranks(control_group()).gather(host_identity())}
        if choose_way(self.config.sync, everywhere, shares_devices=self.config.rollout.is_colocated).has_lanes:
            self.exporter = self._all_ranks_exporter
        source = build_adapter_source(self.engine) if self.sends_adapters else self.exporter
        self.publisher = build_publisher(source, self.pool, self.config)

    def publish(self, version: int) -> dict[str, float]:
        """Bring every replica to the trainer's weights as `version`; one that fails is started anew, and joins a later sync.

        Raises:
            SyncError: the sync was refused, or failed SYNC_ATTEMPTS times.
            CanaryError: a replica computes otherwise than the trainer.
            TooFewReplicasError: on every rank; the weights are whole.
        """
        canary = self.canary
        with self.devices.sync():
            if canary is not None:
                canary.score_by_trainer(self.engine)
            report = self._publish(version)
            found = self._log_version(version)  # before the canary may stop the run: the version can be looked at then
            found |= canary.compare(version, self.pool, self.publisher) if canary is not None else {}
        for stage in report.stages:
            self.log.timeline.add(stage.name, "sync", stage.start, stage.end, {"version": version})
        metrics = {
            "sync/seconds": report.seconds,
            "sync/bytes": float(report.num_bytes),
            "sync/gb_per_second": report.gb_per_second,
            "sync/pause_seconds": report.pause_seconds,
            "sync/verified": float(report.verified),
            **({"sync/replicas": float(len(self.pool.members))} if self.pool is not None else {}),
            **found,
        }
        if report.sent_bytes is not None:
            metrics["sync/sent_bytes"] = float(report.sent_bytes)
        if self.config.engine.lora.rank and not self.sends_adapters:
            metrics["lora/merge_error"] = self._merge_error()
        self.syncs.append(metrics)
        return metrics

    def _log_version(self, version: int) -> dict[str, float]:
        """Into the run's log of versions, where it keeps one; metrics."""
        if self.config.sync.log == "off":
            return {}
        self.version_log = self.version_log or VersionLog(self.config, self.exporter)
        return self.version_log.write(version)

    def prune_versions(self) -> None:
        """What the log of versions keeps no longer."""
        if self.version_log is not None:
            self.version_log.prune()

    def _publish(self, version: int) -> SyncReport:
        assert self.publisher is not None
        for _ in range(SYNC_ATTEMPTS - 1):
            self._let_rejoin(version)
            try:
                return self.publisher.publish(version)
            except SyncError as error:
                if error.refused or not (error.failed_replicas or error.stale_replicas):
                    raise
                self.log.note(f"{error}; the sync is repeated")
                if self.pool is not None:
                    self.pool.replace(*error.failed_replicas)
        self._let_rejoin(version)
        return self.publisher.publish(version)

    def _let_rejoin(self, version: int) -> None:
        """Replicas that were started anew, or that were asked for, take part from now on, and those that were to leave and have
        nothing to do take none; waits for some where there are too few.
        """
        assert self.publisher is not None
        is_changed, too_few = on_rank_zero(lambda: self._rejoin(version))
        if too_few:
            raise TooFewReplicasError(too_few)
        if is_changed:
            self.publisher.close()  # the next sync connects to the members that there are then

    def _rejoin(self, version: int) -> tuple[bool, str]:
        """On rank 0: whether the members changed, and why there are too few. Says which replicas did not start anew."""
        assert self.pool is not None
        rollout = self.config.rollout
        try:
            if self.scaling is not None:
                self.scaling.look(version)
            is_changed = self.pool.rejoin(rollout.min_replicas, rollout.restart_timeout_seconds)
            if self.scaling is not None:
                self.scaling.tell(version)
        except bridge_actors.TooFewReplicasError as error:
            return False, str(error)
        else:
            return is_changed, ""
        finally:
            for problem in self.pool.take_untold():
                self.log.note(problem)

    def end_replicas(self) -> None:
        """Where trainer and replicas share devices, these are the trainer's from now on."""
        if self.devices.is_shared:
            on_rank_zero(lambda: self.pool.close() if self.pool is not None else None)
            self.devices.reclaim()

    def export(self, folder: Path) -> None:
        """Write the weights as a Hugging Face folder: whole, under a temporary name first."""
        partial = folder.with_name(f".partial_{folder.name}")

        def begin() -> None:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)

        def finish() -> None:
            hf_folder.finish_folder(partial, Path(self.config.model.path))
            shutil.rmtree(folder, ignore_errors=True)
            partial.rename(folder)

        on_rank_zero(begin)
        with self.devices.training():
            hf_folder.save_weights(partial, self.whole_tensors(), hf_folder.Share.of(self.layout), digest_tensor)
        on_rank_zero(lambda: None)  # every stage has written its file
        on_rank_zero(finish)

    def whole_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights of this rank's pipeline stage, on all of its ranks, one tensor at a time."""
        return whole_tensors(self._all_ranks_exporter)

    @cached_property
    def _all_ranks_exporter(self) -> Exporter:
        """That of syncs where all ranks of a stage have its tensors, or are one."""
        is_alone = self.layout.world_size == self.layout.pipeline_size
        is_everywhere = is_alone or uses_ipc(self.config)
        return self.exporter if is_everywhere else build_exporter(self.engine, on_all_ranks=True)

    def _finish_start(self) -> None:
        assert self._replica_start is not None
        self.pool = self._replica_start.finish()

    def close(self) -> None:
        """Take the bridge down, before the replicas. Not collective; safe after any failure."""
        if self.publisher is not None:
            self.publisher.close()

    def _merge_error(self) -> float:
        """How much of the adapters' update the last merge lost; a note once it is more than MERGE_ERROR_NOTE."""
        error = self.exporter.merge_error()
        if error > MERGE_ERROR_NOTE and not self.noted_merge_error:
            self.noted_merge_error = True
            dtype = self.config.model.dtype
            self.log.note(
                f"lora/merge_error is {error:.2f}: rounding W + B A to {dtype} loses that share of the update, so that vLLM "
                "samples from nearly the base model; raise engine.optimizer.learning_rate or engine.lora.alpha"
            )
        return error


def build_publisher(source: WeightSource, pool: ReplicaPool | None, config: Config) -> Publisher:
    """Of whole weights, with adapters merged, or of the adapters alone."""
    ipc = config.sync.model_copy(update={"transport": "ipc"})
    sync = ipc if uses_ipc(config) else config.sync  # auto: by the hosts that there are
    if isinstance(source, AdapterSource):
        return Publisher(source, pool, source.sync_config(sync), control_group(), adapter=source.spec)
    log = (config.run.folder / VERSIONS).resolve() if config.sync.log == "deltas" else None
    return Publisher(source, pool, sync, control_group(), log=log)


def uses_ipc(config: Config) -> bool:
    """Whether trainer and replicas share GPUs, so that each rank sends to the worker on its own."""
    return resolve_transport(config.sync.transport, shares_devices=config.rollout.is_colocated) == "ipc"


def build_exporter(engine: Engine, *, on_all_ranks: bool = False) -> Exporter:
    """The weights of this rank's pipeline stage as Hugging Face tensors."""
    layout = engine.layout
    return Exporter(
        engine.whole_parameters,
        engine.mbridge,
        tensor_group=engine.mbridge.mpu.tp_group,
        stage=layout.pipeline_rank,
        num_stages=layout.pipeline_size,
        data_rank=layout.copy_rank,
        expert_group=parallel.expert_group(),
        expert_data_rank=layout.expert_data_rank,
        is_in_place=engine.wrapped.is_in_place,
        on_all_ranks=on_all_ranks,
    )


def build_adapter_source(engine: Engine) -> AdapterSource:
    """The adapters of this rank's pipeline stage in PEFT's names."""
    lora, layout = engine.config.lora, engine.layout
    return AdapterSource(
        engine.adapter_tensors,
        AdapterSpec(lora.rank, lora.scale),
        stage=layout.pipeline_rank,
        num_stages=layout.pipeline_size,
        is_sender=layout.is_sender,
        is_in_place=engine.wrapped.is_in_place and layout.tensor_size == 1,
    )
