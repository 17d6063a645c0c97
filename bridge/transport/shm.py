"""Buckets through shared memory, on one host: one writer (the sender of a stage), many readers (vLLM workers).

A segment is a file in /dev/shm: a header page, then two buffers. The writer packs bucket k straight into buffer k % 2
while the readers still read bucket k - 1 from the other. There are no messages and no locks: the payload is written
first, then digest and size, the sequence number last; readers poll it, and count what they have read in a word of
their own. Anyone may raise the abort flag with a reason, which wakes everybody up. Leaves out what a bucket means.

The order of stores holds on x86-64; elsewhere a torn read shows as a wrong digest.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import time
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from bridge.digest import digest_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bridge.digest import BucketDigests

FOLDER = Path("/dev/shm")  # noqa: S108
PREFIX = "megasync-"
MAGIC = 0x6D65676173796E63  # "megasync"
HEADER_BYTES = 8192
REASON_OFFSET, REASON_BYTES = 4096, 4096
NUM_BUFFERS = 2
MAX_READERS = 480
# Words of 8 bytes in the header.
WORD_MAGIC, WORD_READERS, WORD_BUFFER_BYTES, WORD_ABORTED = range(4)
WORD_BUFFERS = 8  # of each buffer: sequence + 1 of the bucket in it, its digest, its number of bytes
WORD_CONSUMED = 24  # of each reader: how many buckets it has read since the segment was made
WORD_CHECKED = WORD_CONSUMED + MAX_READERS  # for how many buckets the digests that come at the end of a pass are there (ipc.py)
POLL_SECONDS_FIRST = 50e-6


class TransportError(RuntimeError):
    """A bucket did not get through: aborted by another side, over the deadline, or damaged on the way."""


class DamagedError(TransportError):
    """Buckets of a stage whose digests differ from the sender's."""

    def __init__(self, stage: int, buckets: list[int]) -> None:
        super().__init__(f"buckets {buckets} of stage {stage} arrived damaged: their digests differ from the sender's")
        self.stage, self.buckets = stage, buckets


class Segment:
    """A mapped segment, for writer, readers and whoever watches. `close` unmaps; the creator also unlinks."""

    def __init__(self, path: Path, *, owner: bool) -> None:
        self.path = path
        self._unlink = weakref.finalize(self, _unlink, path, os.getpid()) if owner else None
        self._file = path.open("r+b")
        if owner:  # held until this process ends, however it ends: what tells a live segment from a stale one
            fcntl.flock(self._file, fcntl.LOCK_EX)
        self._map = mmap.mmap(self._file.fileno(), 0)
        self._words = memoryview(self._map).cast("Q")
        if self._words[WORD_MAGIC] != MAGIC and not owner:
            raise TransportError(f"{path} is no segment of this transport")
        size = (len(self._map) - HEADER_BYTES) // NUM_BUFFERS
        payload = torch.frombuffer(self._map, dtype=torch.uint8, offset=HEADER_BYTES)
        self.buffers = [payload[index * size : (index + 1) * size] for index in range(NUM_BUFFERS)]

    @staticmethod
    def create(name: str, buffer_bytes: int, num_readers: int) -> Segment:
        """Make the file and reserve its memory.

        Raises:
            ValueError: not that much shared memory is left, or too many readers.
        """
        if num_readers > MAX_READERS:
            raise ValueError(f"{num_readers} vLLM workers read one segment; at most {MAX_READERS} can")
        path = FOLDER / f"{PREFIX}{os.getpid()}-{name}"
        size = HEADER_BYTES + NUM_BUFFERS * buffer_bytes
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, size)
        except OSError as error:
            path.unlink()
            raise ValueError(
                f"{FOLDER} has no room for {size} bytes ({error.strerror}); "
                "lower sync.bucket_bytes or enlarge shared memory (docker: --shm-size)"
            ) from error
        finally:
            os.close(descriptor)
        segment = Segment(path, owner=True)
        segment._words[WORD_READERS] = num_readers
        segment._words[WORD_BUFFER_BYTES] = buffer_bytes
        segment._words[WORD_MAGIC] = MAGIC
        return segment

    @property
    def num_readers(self) -> int:
        return self._words[WORD_READERS]

    @property
    def consumed(self) -> list[int]:
        """How many buckets each reader has read."""
        return list(self._words[WORD_CONSUMED : WORD_CONSUMED + self.num_readers])

    def count_consumed(self, reader: int) -> None:
        self._words[WORD_CONSUMED + reader] += 1

    def announce(self, sequence: int, num_bytes: int, digest: int) -> None:
        """Tell the readers that bucket `sequence` lies in its buffer. The sequence number goes last."""
        base = WORD_BUFFERS + 3 * (sequence % NUM_BUFFERS)
        self._words[base + 1] = digest
        self._words[base + 2] = num_bytes
        self._words[base] = sequence + 1

    def announced(self, sequence: int) -> tuple[int, int] | None:
        """(number of bytes, digest) of bucket `sequence` once it is there."""
        base = WORD_BUFFERS + 3 * (sequence % NUM_BUFFERS)
        if self._words[base] != sequence + 1:
            return None
        return self._words[base + 2], self._words[base + 1]

    @property
    def num_checked(self) -> int:
        """For how many buckets since the segment was made `announce_checked` was called."""
        return self._words[WORD_CHECKED]

    def announce_checked(self, num_buckets: int) -> None:
        self._words[WORD_CHECKED] = num_buckets

    def abort(self, reason: str) -> None:
        """Raise the flag; the first reason stays."""
        if self._words[WORD_ABORTED]:
            return
        text = reason.encode()[: REASON_BYTES - 1]
        self._map[REASON_OFFSET : REASON_OFFSET + len(text) + 1] = text + b"\0"
        self._words[WORD_ABORTED] = 1

    @property
    def abort_reason(self) -> str | None:
        if not self._words[WORD_ABORTED]:
            return None
        raw = self._map[REASON_OFFSET : REASON_OFFSET + REASON_BYTES]
        return raw.split(b"\0", 1)[0].decode(errors="replace")

    def close(self) -> None:
        """Drop the mapping (its memory goes with the last view of a buffer) and, for the creator, the file."""
        self.buffers = []
        self._words.release()
        self._file.close()
        if self._unlink is not None:
            self._unlink()


def abort_segment(path: Path, reason: str) -> None:
    """Wake up everyone who waits at another process's segment; nothing where its creator has closed it, at any moment."""
    try:
        segment = Segment(path, owner=False)
    except FileNotFoundError:
        return
    segment.abort(reason)
    segment.close()


def _unlink(path: Path, creator: int) -> None:
    """Also at the interpreter's exit; a forked child leaves it alone."""
    if os.getpid() == creator:
        path.unlink(missing_ok=True)


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


def sweep_stale_segments() -> list[Path]:
    """Remove the segments that crashed processes left in /dev/shm; those removed are returned."""
    removed = []
    for path in FOLDER.glob(f"{PREFIX}*"):
        pid = path.name.removeprefix(PREFIX).split("-", 1)[0]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists() and not _is_locked(path):
            path.unlink(missing_ok=True)
            removed.append(path)
    return removed


def _is_locked(path: Path) -> bool:
    """Whether a live process holds it, also one of another container (whose process ids say nothing here)."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    return False
