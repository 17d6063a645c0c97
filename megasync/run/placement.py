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
from megasync.report.timeline import Timeline
from megasync.run.rank_zero import RankZero

PARAMETERS = "parameters"


def make_room_for_replicas(config: Config, engine: Engine, timeline: Timeline) -> Offload:
    """Before replicas start on the trainer's devices: offload its state. Nothing where they have devices of their own."""
    offload = Offload(engine)
    if config.rollout.is_colocated:
        with timeline.span("offload", "trainer"):
            offload.offload(config.rollout.offload_trainer)
    return offload


class DeviceSharing:
    """Every method is collective, and does nothing unless the placement is colocated.

    While the replicas are awake they have all of their memory, and the trainer only what `rollout.offload_trainer` leaves on the
    device; during a sync also its parameters. While they sleep the trainer has all of its own.
    """

    def __init__(self, config: Config, offload: Offload, pool: RankZero[ReplicaPool], timeline: Timeline) -> None:
        """`offload`: that of `make_room_for_replicas`, before these started."""
        self.is_shared = config.rollout.is_colocated
        self.keeps_weights = config.engine.lora.rank > 0 and config.engine.lora.sync == "adapter"  # the base is never sent
        self.kinds, self.timeline = config.rollout.offload_trainer, timeline
        self.offload, self.pool = offload, pool
        self.trainer_has_devices = not self.is_shared

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
            self.trainer_has_devices = False  # also where the block raises, for `end_replicas`
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
                self.pool.call(lambda pool: pool.sleep(keep_weights=keep))
                self.offload.reload()
            self.trainer_has_devices = True

    def end_replicas(self) -> None:
        """End replicas that share the trainer's devices, and reload the trainer's state."""
        if self.is_shared:
            self.pool.call(lambda pool: pool.close())
            if not self.trainer_has_devices:
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
            self.pool.call(lambda pool: pool.wake())
