"""The engine's weights as Hugging Face tensors: for syncs, checkpoints and the exported folder.

Every method is collective. Leaves out the replicas that they are brought to (sync.py).
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import torch

from bridge.export.adapter import AdapterSource, AdapterSpec
from bridge.export.exporter import Exporter, Position
from bridge.export.fp8 import QuantisedSource
from bridge.export.source import WeightSource, whole_tensors
from bridge.layout.digest import digest_tensor
from bridge.replicas.pool import ReplicaPool
from bridge.send.publish import Publisher
from bridge.transport.open import resolve_transport
from engine.checkpoint import hf_folder
from engine.engine import Engine
from engine.runtime import parallel
from megasync.config.files import VERSIONS
from megasync.config.schema import Config
from megasync.run.rank_zero import control_group, on_rank_zero


class Weights:
    """The weights of one engine."""

    def __init__(self, config: Config, engine: Engine) -> None:
        self.config, self.engine, self.layout = config, engine, engine.layout
        self.exporter = build_exporter(engine, on_all_ranks=uses_ipc(config))

    @cached_property
    def all_ranks_exporter(self) -> Exporter:
        """`exporter` where it gives all ranks of a stage its tensors, or a stage has one rank."""
        is_alone = self.layout.world_size == self.layout.pipeline_size
        is_everywhere = is_alone or uses_ipc(self.config)
        return self.exporter if is_everywhere else build_exporter(self.engine, on_all_ranks=True)

    def whole_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights of this rank's pipeline stage, on all of its ranks, one tensor at a time."""
        return whole_tensors(self.all_ranks_exporter)

    def export(self, folder: Path) -> None:
        """Write a Hugging Face folder: first under a temporary name, so that `folder` is always complete."""
        partial = folder.with_name(f".partial_{folder.name}")

        def begin() -> None:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)

        def finish() -> None:
            shutil.rmtree(folder, ignore_errors=True)
            partial.rename(folder)

        on_rank_zero(begin)
        self.write(partial)
        on_rank_zero(finish)

    def write(self, folder: Path) -> None:
        """The files of a Hugging Face folder, into one that is there."""
        weights = hf_folder.as_in(Path(self.config.model.path), self.whole_tensors())
        hf_folder.save_weights(folder, weights, hf_folder.Share.of(self.layout), digest_tensor)
        on_rank_zero(lambda: None)  # every stage has written its file
        on_rank_zero(lambda: hf_folder.finish_folder(folder, Path(self.config.model.path)))


def build_publisher(source: WeightSource, pool: ReplicaPool | None, config: Config) -> Publisher:
    """For whole weights, with adapters merged, or for the adapters alone; quantised by `rollout.dtype`. `pool`: rank 0's."""
    ipc = config.sync.model_copy(update={"transport": "ipc"})
    sync = ipc if uses_ipc(config) else config.sync  # auto: the publisher chooses by the hosts of the ranks and the replicas
    if isinstance(source, AdapterSource):
        return Publisher(source, pool, source.sync_config(sync), control_group(), adapter=source.spec)
    log = (config.run.folder / VERSIONS).resolve() if config.sync.log == "deltas" else None
    return Publisher(as_served(source, config), pool, sync, control_group(), log=log)


def as_served(source: WeightSource, config: Config) -> WeightSource:
    """The source that replicas receive, quantised by `rollout.dtype`."""
    return QuantisedSource(source) if config.rollout.dtype == "fp8" else source


def uses_ipc(config: Config) -> bool:
    """Whether trainer and replicas share GPUs, so that each rank sends to the worker on its own."""
    return resolve_transport(config.sync.transport, shares_devices=config.rollout.is_colocated) == "ipc"


def build_exporter(engine: Engine, *, on_all_ranks: bool = False, is_in_place: bool | None = None) -> Exporter:
    """The weights of this rank's pipeline stage as Hugging Face tensors. `is_in_place`: false where adapters' scale changes."""
    layout = engine.layout
    return Exporter(
        engine.whole_parameters,
        engine.mbridge,
        Position(
            stage=layout.pipeline_rank,
            num_stages=layout.pipeline_size,
            tensor_group=engine.mbridge.mpu.tp_group,
            data_rank=layout.copy_rank,
            expert_group=parallel.expert_group(),
            expert_data_rank=layout.expert_data_rank,
        ),
        is_in_place=engine.wrapped.is_in_place if is_in_place is None else is_in_place,
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
