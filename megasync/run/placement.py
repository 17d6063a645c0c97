"""Trainer and replicas on the same GPUs take turns with their memory. With GPUs of their own there is nothing to do.

Leaves out how memory is given up (engine/offload.py for the trainer, vLLM's sleep for the replicas), and who is put where
(devices.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from bridge.replicas.pool import ReplicaPool
from engine.engine import Engine
from engine.offload import Offload
from megasync.config.schema import Config
from megasync.reporting.timeline import Timeline
from megasync.run.rank_zero import on_rank_zero

PARAMETERS = "parameters"


class DeviceSharing:
    """Every method is collective, and does nothing unless the placement is colocated.

    While the replicas are awake they have all of their memory, and the trainer only what `rollout.offload_trainer` leaves on the
    device; during a sync also its parameters. While they sleep the trainer has all of its own.
    """

    def __init__(self, config: Config, engine: Engine, timeline: Timeline) -> None:
        self.is_shared = config.rollout.is_colocated
        self.keeps_weights = config.engine.lora.rank > 0 and config.engine.lora.sync == "adapter"  # the base is never sent
        self.kinds, self.timeline = config.rollout.offload_trainer, timeline
        self.offload = Offload(engine)
        self.trainer_has_devices = True
        self.pool: ReplicaPool | None = None  # rank 0's

    def give_to_replicas(self) -> None:
        """Offloads the trainer's state; the replicas wake by themselves."""
        if self.is_shared:
            with self.timeline.span("offload", "trainer"):
                self.offload.offload(self.kinds)
            self.trainer_has_devices = False

    @contextmanager
    def sync(self) -> Iterator[None]:
        """Within the block the trainer's parameters are on the device; afterwards they are offloaded."""
        if self.is_shared:
            self.trainer_has_devices = False  # from here on, also where the block raises: `reclaim` has to know
            with self.timeline.span("offload", "trainer"):
                self.offload.offload([kind for kind in self.kinds if kind != PARAMETERS])
                self.offload.reload([PARAMETERS])
        yield
        self.give_to_replicas()

    def acquire_for_training(self, *, keep_weights: bool = False) -> None:
        """Puts the replicas to sleep, and reloads the trainer's state. Their weights are dropped, or kept in host memory."""
        if self.is_shared and not self.trainer_has_devices:
            with self.timeline.span("sleep", "trainer"):
                keep = keep_weights or self.keeps_weights
                on_rank_zero(lambda: self.pool.sleep(keep_weights=keep) if self.pool is not None else None)
                self.offload.reload()
            self.trainer_has_devices = True

    def reclaim(self) -> None:
        """Once the replicas have ended: all is the trainer's."""
        if self.is_shared and not self.trainer_has_devices:
            self.pool = None
            self.offload.reload()
            self.trainer_has_devices = True

    @contextmanager
    def training(self) -> Iterator[None]:
        """Within the block the trainer's state is on the device; replicas that were awake serve the same weights afterwards."""
        borrowed = self.is_shared and not self.trainer_has_devices
        self.acquire_for_training(keep_weights=True)
        yield
        if borrowed:
            self.give_to_replicas()
            on_rank_zero(lambda: self.pool.wake() if self.pool is not None else None)
