"""A segment of shared memory on one host: a file in /dev/shm without a name, a header page and two buffers for buckets.

The header holds words that one side writes and others poll: the content of each buffer, the progress of each reader, and whether
somebody gave up, and why. There are no messages, and no locks around the words: a sequence number is written last. The file is
unlinked before it gets any memory: others map it through its creator's file descriptor, and its memory goes with the
last process that has it mapped, however that ends. Leaves out who waits for what (shm.py, ipc.py).
"""

from __future__ import annotations

import itertools
import mmap
import os
import weakref
from pathlib import Path

import torch

from bridge.transport.protocol import TransportError

FOLDER = Path("/dev/shm")  # noqa: S108
PREFIX = "megasync-"
MAGIC = 0x6D65676173796E63  # "megasync"
HEADER_BYTES = 8192
REASON_OFFSET, REASON_BYTES = 4096, 4096
NUM_BUFFERS = 2
WORD_BYTES = 8
MAX_READERS = 480
_numbers = itertools.count()
# Words of 8 bytes in the header.
WORD_MAGIC, WORD_READERS, WORD_BUFFER_BYTES, WORD_ABORTED = range(4)
WORD_BUFFERS = 8  # of each buffer: sequence + 1 of the bucket in it, its digest, its number of bytes
WORD_CONSUMED = 24  # of each reader: how many buckets it has read since the segment was made
WORD_CHECKED = WORD_CONSUMED + MAX_READERS  # for how many buckets the digests that come at the end of a pass are there (ipc.py)


class Segment:
    """A mapped segment, for writer, readers and observers. `path` is for other processes of the same user."""

    def __init__(self, path: Path) -> None:
        """Raises TransportError where the path is no segment's, as after its creator's end."""
        self.path = path
        try:
            with path.open("r+b") as file:
                self._map = mmap.mmap(file.fileno(), 0)
        except (OSError, ValueError) as error:
            raise TransportError(
                f"cannot map the sender's shared memory ({error}): it is gone, or trainer and replica are not "
                "processes of one user on one host, in one container; set sync.transport to nccl there"
            ) from None
        words = memoryview(self._map)
        if words[:WORD_BYTES] != MAGIC.to_bytes(WORD_BYTES, "little"):  # another file, of any length
            raise TransportError(f"{path} is no segment of this transport")
        self._words = words[:HEADER_BYTES].cast("Q")
        size = (len(self._map) - HEADER_BYTES) // NUM_BUFFERS
        payload = torch.frombuffer(self._map, dtype=torch.uint8, offset=HEADER_BYTES)
        self.buffers = [payload[index * size : (index + 1) * size] for index in range(NUM_BUFFERS)]
        self._file: UnlinkedFile | None = None  # the creator's

    @staticmethod
    def create(buffer_bytes: int, num_readers: int) -> Segment:
        """Reserve the memory.

        Raises:
            ValueError: not that much shared memory is left, or too many readers.
        """
        if num_readers > MAX_READERS:
            raise ValueError(f"{num_readers} vLLM workers read one segment; at most {MAX_READERS} can")
        size = HEADER_BYTES + NUM_BUFFERS * buffer_bytes
        file = UnlinkedFile()
        try:
            os.posix_fallocate(file.descriptor, 0, size)
        except OSError as error:
            file.close()
            raise ValueError(
                f"{FOLDER} has no room for {size} bytes ({error.strerror}); "
                "lower sync.bucket_bytes or enlarge shared memory (docker: --shm-size)"
            ) from error
        words = {WORD_MAGIC: MAGIC, WORD_READERS: num_readers, WORD_BUFFER_BYTES: buffer_bytes}
        for word, value in words.items():
            os.pwrite(file.descriptor, value.to_bytes(WORD_BYTES, "little"), WORD_BYTES * word)
        segment = Segment(file.path)
        segment._file = file
        return segment

    @property
    def consumed(self) -> list[int]:
        """Number of buckets that each reader has read."""
        return list(self._words[WORD_CONSUMED : WORD_CONSUMED + self._words[WORD_READERS]])

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
        """Number of buckets since the segment was made whose digests are there."""
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
        """Drop the mapping, whose memory goes with the last view of a buffer; the creator also closes it to new readers."""
        self.buffers = []
        self._words.release()
        if self._file is not None:
            self._file.close()


class UnlinkedFile:
    """A new file in /dev/shm that has lost its name already. Other processes of the user open `path` until it is closed."""

    def __init__(self) -> None:
        named = FOLDER / f"{PREFIX}{os.getpid()}-{next(_numbers)}"  # what /proc/PID/maps shows
        self.descriptor = os.open(named, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        named.unlink()
        self.path = Path(f"/proc/{os.getpid()}/fd/{self.descriptor}")
        self.close = weakref.finalize(self, os.close, self.descriptor)


def abort_segment(path: Path, reason: str) -> None:
    """Wake up everyone who waits at another process's segment; nothing where its creator has closed it, at any moment."""
    try:
        segment = Segment(path)
    except TransportError:
        return
    segment.abort(reason)
    segment.close()
