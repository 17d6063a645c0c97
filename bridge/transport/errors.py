"""What goes wrong in all transports."""

from __future__ import annotations


class TransportError(RuntimeError):
    """A bucket did not get through: aborted by another side, over the deadline, or damaged on the way."""


class DamagedError(TransportError):
    """Buckets of a stage whose digests differ from the sender's."""

    def __init__(self, stage: int, buckets: list[int]) -> None:
        super().__init__(f"buckets {buckets} of stage {stage} arrived damaged: their digests differ from the sender's")
        self.stage, self.buckets = stage, buckets
