"""What goes wrong in all transports."""

from __future__ import annotations

from bridge.layout.bucket import StagePlan


class TransportError(RuntimeError):
    """A bucket did not get through: aborted by another side, over the deadline, or damaged on the way."""


class DamagedError(TransportError):
    """Buckets of a stage, by index, whose digests differ from the sender's."""

    def __init__(self, stage: StagePlan, buckets: list[int]) -> None:
        told = ", ".join(stage.describe(stage.buckets[index]) for index in buckets)
        super().__init__(f"{told} arrived damaged: its digest differs from the sender's")
        self.buckets = buckets
