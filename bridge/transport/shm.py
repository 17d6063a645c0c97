"""Buckets through shared memory, on one host: one writer (the sender of a stage), many readers (vLLM workers).

The writer packs bucket k straight into buffer k % 2 of a segment (segment.py) while the readers still read bucket k - 1 from
the other. The payload is written first, then digest and size, the sequence number last; readers poll it, and count what they
have read in a word of their own. Anyone may raise the abort flag with a reason, which wakes everybody up. Leaves out what a
bucket means.

The order of stores holds on x86-64; elsewhere a torn read shows as a wrong digest.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from bridge.layout.digest import digest_bytes
from bridge.transport.errors import TransportError
from bridge.transport.segment import NUM_BUFFERS, Segment

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from bridge.layout.digest import BucketDigests

POLL_SECONDS_FIRST = 50e-6


def _wait(ready: Callable[[], bool], deadline: float, describe: Callable[[], str], longest_pause: float) -> None:
    """Poll until `ready`, with pauses that grow to the longest.

    Raises:
        TransportError: the wall clock passed `deadline`; `describe` says who waits for whom.
    """
    pause = POLL_SECONDS_FIRST
    while not ready():
        if time.time() > deadline:
            raise TransportError(f"deadline passed: {describe()}")
        time.sleep(pause)
        pause = min(2 * pause, longest_pause)


class ShmWriter:
    """The sending side of one stage. `sequence` counts buckets over all syncs of this segment."""

    longest_pause = 1e-3  # seconds between two looks
    digests: BucketDigests | None = None

    def __init__(self, segment: Segment, stage: int, reader_names: list[str], own: Sequence[int] | None = None) -> None:
        """`own`: the readers that read this segment; all of them where it is None."""
        self.segment, self.stage, self._reader_names = segment, stage, reader_names
        self._own = list(range(len(reader_names)) if own is None else own)
        self.endpoint = str(segment.path)
        self.buffers = segment.buffers
        self.sequence = 0

    def start(self, deadline: float, check: Callable[[], None]) -> None:
        """Nothing to do before a pass."""

    def finish(self, deadline: float, check: Callable[[], None]) -> None:
        """Nothing to wait for: what is published stays until it is read."""

    def abort(self, reason: str) -> None:
        """Wake up everyone who waits at the segment."""
        self.segment.abort(reason)

    def close(self) -> None:
        self.buffers = []
        self.segment.close()

    def acquire(self, deadline: float, check: Callable[[], None]) -> torch.Tensor:
        """The buffer [buffer_bytes] uint8 for the next bucket, once every reader has left it.

        `check` is called while waiting and may raise. Raises TransportError on abort and at the deadline.
        """
        needed = self.sequence - NUM_BUFFERS + 1

        def ready() -> bool:
            check()
            self.raise_if_aborted()
            consumed = self.segment.consumed
            return all(consumed[reader] >= needed for reader in self._own)

        _wait(ready, deadline, lambda: self._describe_wait(needed), self.longest_pause)
        return self.buffers[self.sequence % NUM_BUFFERS]

    def publish(self, num_bytes: int, *, verify: bool) -> None:
        """Hand the acquired buffer's first `num_bytes` to the readers, with their digest when `verify`."""
        buffer = self.buffers[self.sequence % NUM_BUFFERS]
        digest = digest_bytes(buffer[:num_bytes]) if verify else 0
        self.segment.announce(self.sequence, num_bytes, digest)
        self.sequence += 1

    def raise_if_aborted(self) -> None:
        reason = self.segment.abort_reason
        if reason is not None:
            raise TransportError(reason)

    def _describe_wait(self, needed: int) -> str:
        consumed = self.segment.consumed
        late = [f"{self._reader_names[reader]} has read {consumed[reader]}" for reader in self._own if consumed[reader] < needed]
        return f"the sender of stage {self.stage} waits until {needed} buckets are read; {', '.join(late)}"


class ShmReader:
    """One vLLM worker's view of all stages' segments; `reader` is its index among all workers of all replicas."""

    longest_pause = 1e-3

    def __init__(self, endpoints: tuple[str, ...], reader: int) -> None:
        self.endpoints, self.reader = endpoints, reader
        self._segments = [Segment(Path(path), owner=False) for path in endpoints]
        self._buffers = [segment.buffers for segment in self._segments]

    def read(self, stage: int, sequence: int, num_bytes: int, deadline: float, *, verify: bool) -> torch.Tensor:
        """Bucket `sequence` of a stage: a view [num_bytes] uint8, good until `release`.

        Raises:
            TransportError: aborted by another side, over the deadline, or the bytes are not those that were sent.
        """
        segment = self._segments[stage]

        late = f"waits for the sender of stage {stage}, which sent no bucket {sequence}"
        self._wait(lambda: segment.announced(sequence) is not None, deadline, late)
        announced = segment.announced(sequence)
        assert announced is not None
        data = self._buffers[stage][sequence % NUM_BUFFERS][:num_bytes]
        if announced[0] != num_bytes:
            raise TransportError(f"holds {announced[0]} bytes, planned are {num_bytes}")
        if verify and digest_bytes(data) != announced[1]:
            raise TransportError("arrived damaged: its digest differs from the sender's")
        return data

    def finish(self, stage: int, num_buckets: int, deadline: float) -> None:
        """After the stage's last bucket, `num_buckets` since the segment was made. Nothing is left to be checked."""

    def _wait(self, ready: Callable[[], bool], deadline: float, late: str) -> None:
        """As `_wait`; raises TransportError too when another side aborts."""

        def look() -> bool:
            for each in self._segments:
                if (reason := each.abort_reason) is not None:
                    raise TransportError(f"aborted: {reason}")
            return ready()

        _wait(look, deadline, lambda: late, self.longest_pause)

    def digests(self, stage: int) -> BucketDigests | None:
        """To which copies out of the stage's current bucket may add its digest; None where `read` checks it itself."""
        return None

    def buffer_bytes(self, stage: int) -> int:
        return self._buffers[stage][0].numel()

    def release(self, stage: int) -> None:
        """The view that `read` gave is no longer needed."""
        self._segments[stage].count_consumed(self.reader)

    def abort(self, reason: str) -> None:
        for segment in self._segments:
            segment.abort(reason)

    def close(self) -> None:
        self._buffers = []
        for segment in self._segments:
            segment.close()
