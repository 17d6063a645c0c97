"""The protocol of all transports: the sending and the receiving side of buckets, and their errors.

All methods but `abort` and `close` raise TransportError: aborted by another side, over the deadline, or damaged. Opened by
open.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import torch

from bridge.layout.bucket import Bucket, StagePlan
from bridge.layout.digest import BucketDigests


class TransportError(RuntimeError):
    """A bucket did not get through: aborted by another side, over the deadline, or damaged on the way."""


class DamagedError(TransportError):
    """Buckets of a stage, by index, whose digests differ from the sender's."""

    def __init__(self, stage: StagePlan, buckets: list[int]) -> None:
        names = ", ".join(stage.describe(stage.buckets[index]) for index in buckets)
        super().__init__(f"{names} arrived damaged: its digest differs from the sender's")
        self.buckets = buckets


class Writer(Protocol):
    """The sending side of one stage. A pass is `start`, then `acquire` and `publish` for each bucket, then `finish`.

    `check` is called while waiting and may raise. Deadlines are time.monotonic() of this process.
    """

    endpoint: str  # where readers find it; its scheme says which transport it is
    digests: BucketDigests | None  # to which copies into a bucket may add its digest; None: `publish` takes it in any case

    def start(self, deadline: float, check: Callable[[], None]) -> None:
        """Before a pass; the first one waits for all readers where the transport needs them."""

    def acquire(self, deadline: float, check: Callable[[], None]) -> torch.Tensor:
        """The buffer [buffer_bytes] uint8 for the next bucket, once its former contents have left."""

    def publish(self, num_bytes: int, *, verify: bool) -> None:
        """Hand the acquired buffer's first `num_bytes` to the readers, with `verify` their digest as well."""

    def finish(self, deadline: float, check: Callable[[], None]) -> None:
        """After a pass's last bucket."""

    def abort(self, reason: str) -> None:
        """Wake up everyone who waits at the endpoint; the first reason stays."""

    def close(self) -> None: ...


class Reader(Protocol):
    """One vLLM worker's side of all stages, an endpoint a stage."""

    endpoints: tuple[str, ...]
    interleaves: bool  # stages are read in turn, a bucket of each; else one after another
    lends_memory: bool  # buckets lie in host memory, where the worker computes: tensors may be views of them meanwhile

    def buckets(
        self, stage: StagePlan, sync_index: int, deadline: float, *, verify: bool
    ) -> Iterator[tuple[Bucket, torch.Tensor]]:
        """The stage's buckets in order with their bytes, [n] uint8, good until the next is asked for. Iterate to the end.

        `sync_index` counts the passes of these endpoints from 0. Raises DamagedError, after the last bucket at the latest.
        """

    def digests(self, stage: int) -> BucketDigests | None:
        """Digests to which copies out of the stage's current bucket may add; None where the reader computes them itself."""

    def abort(self, reason: str) -> None:
        """Wake up everyone who waits at the endpoints; the first reason stays."""

    def close(self) -> None: ...
