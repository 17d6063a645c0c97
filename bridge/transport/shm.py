"""Buckets through shared memory, on one host: one writer (the sender of a stage), many readers (vLLM workers).

The writer packs bucket k straight into buffer k % 2 of a segment (segment.py) while the readers still read bucket k - 1 from
the other. The payload is written first, then digest and size, the sequence number last; readers poll it, and count what they
have read in a word of their own. Anyone may raise the abort flag with a reason, which wakes everybody up. Leaves out what a
bucket means.

The order of stores holds on x86-64; elsewhere a torn read shows as a wrong digest.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from bridge.layout.bucket import Bucket, StagePlan
from bridge.layout.digest import BucketDigests, digest_bytes
from bridge.transport.protocol import TransportError
from bridge.transport.segment import NUM_BUFFERS, Segment

SCHEME = "shm:"
POLL_SECONDS_FIRST = 50e-6
_counter = itertools.count()


def endpoint_of(scheme: str, segment: Segment) -> str:
    """Unique to this segment: its path, through a file descriptor, may be reused."""
    return f"{scheme}{segment.path}#{next(_counter)}"


def segment_path(endpoint: str) -> Path:
    """The path from which an endpoint's segment is mapped."""
    return Path(endpoint.partition(":")[2].partition("#")[0])


def _wait(ready: Callable[[], bool], deadline: float, describe: Callable[[], str], longest_pause: float) -> None:
    """Poll until `ready`, with pauses that grow to the longest.

    Raises:
        TransportError: time.monotonic() passed `deadline`; `describe` says who waits for whom.
    """
    pause = POLL_SECONDS_FIRST
    while not ready():
        if time.monotonic() > deadline:
            raise TransportError(f"deadline passed: {describe()}")
        time.sleep(pause)
        pause = min(2 * pause, longest_pause)


class ShmWriter:
    """The sending side of one stage. `sequence` counts buckets over all passes."""

    longest_pause = 1e-3  # seconds between two looks
    digests: BucketDigests | None = None

    def __init__(self, stage: StagePlan, readers: list[str], own: Sequence[int], buffer_bytes: int | None = None) -> None:
        """`readers`: all readers' names; those of the indices `own` read here. `buffer_bytes`: other than the stage's."""
        self._stage, self._readers, self.own = stage, readers, list(own)
        self.segment = Segment.create(stage.buffer_bytes if buffer_bytes is None else buffer_bytes, len(readers))
        self.endpoint = endpoint_of(SCHEME, self.segment)
        self.buffers = self.segment.buffers
        self.sequence = 0

    def start(self, deadline: float, check: Callable[[], None]) -> None:
        """Readers come whenever they like."""

    def finish(self, deadline: float, check: Callable[[], None]) -> None:
        """Published buckets stay until they are read."""

    def abort(self, reason: str) -> None:
        self.segment.abort(reason)

    def close(self) -> None:
        self.buffers = []
        self.segment.close()

    def acquire(self, deadline: float, check: Callable[[], None]) -> torch.Tensor:
        needed = self.sequence - NUM_BUFFERS + 1

        def ready() -> bool:
            check()
            self.raise_if_aborted()
            consumed = self.segment.consumed
            return all(consumed[reader] >= needed for reader in self.own)

        _wait(ready, deadline, lambda: self._describe_wait(needed), self.longest_pause)
        return self.buffers[self.sequence % NUM_BUFFERS]

    def publish(self, num_bytes: int, *, verify: bool) -> None:
        buffer = self.buffers[self.sequence % NUM_BUFFERS]
        digest = digest_bytes(buffer[:num_bytes]) if verify else 0
        self.announce(num_bytes, digest)

    def announce(self, num_bytes: int, digest: int = 0) -> None:
        """Let readers read the acquired buffer, in which all bytes lie."""
        self.segment.announce(self.sequence, num_bytes, digest)
        self.sequence += 1

    def raise_if_aborted(self) -> None:
        reason = self.segment.abort_reason
        if reason is not None:
            raise TransportError(reason)

    def _describe_wait(self, needed: int) -> str:
        """The readers that the sender waits for: the number of buckets that they have read, and the next one."""
        stage, read = self._stage, []
        for reader, number in enumerate(self.segment.consumed):
            if reader in self.own and number < needed:
                following = stage.describe(stage.buckets[number % len(stage.buckets)])
                read.append(f"{self._readers[reader]} has read {number}, next is {following}")
        return f"the sender of stage {stage.index} waits until {needed} buckets are read; {'; '.join(read)}"


class ShmReader:
    """One vLLM worker's view of all stages' segments; `reader` is its index among all workers of all replicas."""

    interleaves = False
    longest_pause = 1e-3

    def __init__(self, endpoints: tuple[str, ...], reader: int, device: torch.device) -> None:
        self.endpoints, self._reader = endpoints, reader
        self.lends_memory = device.type == "cpu"
        self._segments = [Segment(segment_path(endpoint)) for endpoint in endpoints]
        self._buffers = [segment.buffers for segment in self._segments]

    def buckets(
        self, stage: StagePlan, sync_index: int, deadline: float, *, verify: bool
    ) -> Iterator[tuple[Bucket, torch.Tensor]]:
        """A thread waits for the next bucket and checks its digest while the one before is loaded."""
        if stage.buffer_bytes != self._buffers[stage.index][0].numel():
            raise TransportError(f"stage {stage.index}: buffers and bucket size do not fit together")
        first = sync_index * len(stage.buckets)

        def read(bucket: Bucket) -> torch.Tensor:
            try:
                return self.read(stage.index, first + bucket.index, bucket.num_bytes, deadline, verify=verify)
            except TransportError as error:
                raise TransportError(f"{stage.describe(bucket)} {error}") from error

        thread = ThreadPoolExecutor(1, thread_name_prefix="megasync-read")
        try:
            coming = [thread.submit(read, bucket) for bucket in stage.buckets[:1]]
            for bucket in stage.buckets:
                data = coming.pop().result()
                coming = [thread.submit(read, following) for following in stage.buckets[bucket.index + 1 : bucket.index + 2]]
                yield bucket, data
                self.release(stage.index)
        finally:
            thread.shutdown(wait=False, cancel_futures=True)
        if verify:
            self.finish(stage, first + len(stage.buckets), deadline)

    def read(self, stage: int, sequence: int, num_bytes: int, deadline: float, *, verify: bool) -> torch.Tensor:
        """Bucket `sequence` of a stage: a view [num_bytes] uint8, good until `release`."""
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

    def release(self, stage: int) -> None:
        """The view that `read` gave is no longer needed."""
        self.count_read(stage)

    def count_read(self, stage: int) -> None:
        """All bytes of the view have been read."""
        self._segments[stage].count_consumed(self._reader)

    def finish(self, stage: StagePlan, num_buckets: int, deadline: float) -> None:
        """After a pass's last bucket, `num_buckets` since the segment was made. `read` has checked all digests."""

    def digests(self, stage: int) -> BucketDigests | None:
        """`read` checks them."""
        return None

    def _wait(self, ready: Callable[[], bool], deadline: float, late: str) -> None:
        """Like the function `_wait`; also raises TransportError when another side aborts."""

        def look() -> bool:
            for each in self._segments:
                if (reason := each.abort_reason) is not None:
                    raise TransportError(f"aborted: {reason}")
            return ready()

        _wait(look, deadline, lambda: late, self.longest_pause)

    def abort(self, reason: str) -> None:
        for segment in self._segments:
            segment.abort(reason)

    def close(self) -> None:
        self._buffers = []
        for segment in self._segments:
            segment.close()
