"""Who has the devices. Where trainer and replicas have their own there is nothing to do; where they share them, they take turns.

Leaves out how memory is given up: engine/offload.py for the trainer, vLLM's sleep for the replicas.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from engine.offload import Offload
from megasync.rank_zero import on_rank_zero

if TYPE_CHECKING:
    from bridge.replicas.pool import ReplicaPool
    from engine.engine import Engine
    from megasync.config.schema import Config
    from megasync.reporting.timeline import Timeline

PARAMETERS = "parameters"


class Turns:
    """Moves devices between trainer and replicas. Every method is collective, and does nothing unless the placement is colocated.

    Awake, the replicas have all of their memory and the trainer nothing but what `rollout.offload_trainer` leaves it; in a sync
    it has its parameters besides. Asleep, it is the other way round.
    """

    def __init__(self, config: Config, engine: Engine, timeline: Timeline) -> None:
        self.is_shared = config.rollout.is_colocated
        self.keeps_weights = config.engine.lora.rank > 0 and config.engine.lora.sync == "adapter"  # the base is sent never
        self.kinds, self.timeline = config.rollout.offload_trainer, timeline
        self.offload = Offload(engine)
        self.trainer_has_devices = True
        self.pool: ReplicaPool | None = None  # rank 0's

    def to_replicas(self) -> None:
        """The trainer gives up what it can; what the replicas do about it is theirs."""
        if self.is_shared:
            with self._span("offload"):
                self.offload.offload(self.kinds)
            self.trainer_has_devices = False

    @contextmanager
    def sync(self) -> Iterator[None]:
        """The trainer's parameters are there to be sent, and gone afterwards."""
        if self.is_shared:
            with self._span("offload"):
                self.offload.offload([kind for kind in self.kinds if kind != PARAMETERS])
                self.offload.reload([PARAMETERS])
        yield
        self.to_replicas()

    def to_trainer(self, *, keep_weights: bool = False) -> None:
        """The replicas sleep, their weights given up too unless they are to be kept."""
        if self.is_shared and not self.trainer_has_devices:
            with self._span("sleep"):
                keep = keep_weights or self.keeps_weights
                on_rank_zero(lambda: self.pool.sleep(keep_weights=keep) if self.pool is not None else None)
                self.offload.reload()
            self.trainer_has_devices = True

    @contextmanager
    def trainer(self) -> Iterator[None]:
        """The trainer has the devices; then whoever had them before, with what they held."""
        borrowed = self.is_shared and not self.trainer_has_devices
        self.to_trainer(keep_weights=True)
        yield
        if borrowed:
            self.to_replicas()
            on_rank_zero(lambda: self.pool.resume() if self.pool is not None else None)

    @contextmanager
    def _span(self, name: str) -> Iterator[None]:
        begin = time.time()
        yield
        self.timeline.add(name, "trainer", begin, time.time(), {})


def leave_gpus_to_ray(num_trainer_gpus: int) -> None:
    """Let a Ray that this process starts see only the GPUs behind those of the trainer ranks of this machine."""
    if torch.cuda.is_available():
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(_visible_devices()[num_trainer_gpus:])


def shared_devices(config: Config) -> tuple[str, ...]:
    """`replica_devices` where replicas are on the trainer's GPUs; nothing where they have their own."""
    return replica_devices(config) if config.rollout.is_colocated else ()


def replica_devices(config: Config) -> tuple[str, ...]:
    """What CUDA_VISIBLE_DEVICES is to be for each replica on the GPUs visible here, from the first on; nothing without any."""
    if not torch.cuda.is_available():
        return ()
    visible, width = _visible_devices(), config.rollout.tensor_parallel
    return tuple(",".join(visible[first * width : (first + 1) * width]) for first in range(config.rollout.replicas))


def _visible_devices() -> list[str]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return visible if visible != [""] else [str(index) for index in range(torch.cuda.device_count())]
