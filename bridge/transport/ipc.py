"""Buckets through memory that trainer and replicas share on a device, for replicas on the trainer's own GPUs: CUDA IPC.

Control words and their protocol are those of shm.py; where a segment there has two buffers, it has here what another
process needs to map the sender's two buffers: CUDA's IPC handles, or without CUDA a file's path. Both sides take digests on
their device, which are compared after the last bucket, so that nobody waits for one. Leaves out what a bucket means.
"""

from __future__ import annotations

import os
import pickle
from collections import deque
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import torch

from bridge.layout.digest import BucketDigests
from bridge.transport.errors import DamagedError
from bridge.transport.segment import FOLDER, NUM_BUFFERS, PREFIX, Segment
from bridge.transport.shm import ShmReader, ShmWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

SCHEME = "ipc:"
HANDLE_BYTES = 4096
LENGTH_BYTES = 8
DEVICE_ARGUMENT = 6  # of torch.multiprocessing.reductions.rebuild_cuda_tensor


class IpcWriter(ShmWriter):
    """The sending side of one stage; its two buffers are its own memory on `device`."""

    longest_pause = 100e-6  # a bucket takes a GPU a millisecond

    def __init__(
        self,
        name: str,
        buffer_bytes: int,
        stage: int,
        reader_names: list[str],
        device: torch.device,
        num_buckets: int,
        own: Sequence[int] | None = None,
    ) -> None:
        """`num_buckets`: of a pass; `own`: as ShmWriter."""
        super().__init__(Segment.create(name, HANDLE_BYTES + 8 * num_buckets, len(reader_names)), stage, reader_names, own)
        self.digests = self._digests = BucketDigests(num_buckets, device)
        self._verify = False
        self.endpoint = f"{SCHEME}{self.segment.path}"
        self._device = device
        self._files: list[Path] = []
        self.buffers = []
        for slot in self.segment.buffers:
            buffer, handle = _share(buffer_bytes, device, self._files)
            self.buffers.append(buffer)
            packed = len(handle).to_bytes(LENGTH_BYTES, "little") + handle
            slot[: len(packed)] = torch.frombuffer(bytearray(packed), dtype=torch.uint8)

    def publish(self, num_bytes: int, *, verify: bool) -> None:
        """As ShmWriter; but the bucket has to be complete on the device, and its digest is told at the end of the pass."""
        with _scope(self._device):
            data = self.buffers[self.sequence % NUM_BUFFERS][:num_bytes]
            _synchronize(self._device)
            self.segment.announce(self.sequence, num_bytes, 0)
            if verify:  # beside the readers' copies
                self._digests.finish(data)
        self._verify = verify
        self.sequence += 1

    def finish(self, deadline: float, check: Callable[[], None]) -> None:
        """Tell the digests."""
        if self._verify:
            values = self._digests.join().cpu()
            self.segment.buffers[0][HANDLE_BYTES:].view(torch.int64)[: len(values)].copy_(values)
            self.segment.announce_checked(self.sequence)

    def close(self) -> None:
        for path in self._files:
            path.unlink(missing_ok=True)
        super().close()


class IpcReader(ShmReader):
    """One vLLM worker's view of all stages' buffers, which lie on the trainer's devices."""

    longest_pause = 100e-6

    def __init__(self, endpoints: tuple[str, ...], reader: int, device: torch.device) -> None:
        super().__init__(tuple(endpoint.removeprefix(SCHEME) for endpoint in endpoints), reader)
        self.endpoints, self._device = endpoints, device
        self._digests = [BucketDigests((each.buffers[0].numel() - HANDLE_BYTES) // 8, device) for each in self._segments]
        self._unchecked: deque[torch.Tensor] = deque()  # buckets that are out
        self._buffers = [[_open(slot, device) for slot in segment.buffers] for segment in self._segments]

    def read(self, stage: int, sequence: int, num_bytes: int, deadline: float, *, verify: bool) -> torch.Tensor:
        """As ShmReader, but damage shows in `finish`."""
        data = super().read(stage, sequence, num_bytes, deadline, verify=False)
        if verify:
            self._unchecked.append(data)
        return data

    def digests(self, stage: int) -> BucketDigests:
        return self._digests[stage]

    def finish(self, stage: int, num_buckets: int, deadline: float) -> None:
        """Compare the digests of the stage's buckets.

        Raises:
            DamagedError: some differ.
            TransportError: aborted by another side, or over the deadline.
        """
        segment = self._segments[stage]
        late = f"waits for the digests of stage {stage}"
        self._wait(lambda: segment.num_checked >= num_buckets, deadline, late)
        mine = self._digests[stage].join().cpu()
        theirs = segment.buffers[0][HANDLE_BYTES:].view(torch.int64)[: len(mine)]
        wrong = (mine != theirs).nonzero().flatten().tolist()
        if wrong:
            raise DamagedError(stage, wrong)

    def release(self, stage: int) -> None:
        """The copies out of the view are queued on this thread's stream: they have to be over."""
        with _scope(self._device):
            if self._unchecked:
                self._digests[stage].finish(self._unchecked.popleft())
            _synchronize(self._device)
        super().release(stage)


def is_ipc_endpoint(endpoint: str) -> bool:
    return endpoint.startswith(SCHEME)


def segment_path(endpoint: str) -> Path:
    """Where the control words lie."""
    return Path(endpoint.removeprefix(SCHEME))


def _share(num_bytes: int, device: torch.device, files: list[Path]) -> tuple[torch.Tensor, bytes]:
    """A new buffer [num_bytes] uint8, and what `_open` takes; a file that has come with it goes to `files`."""
    if device.type == "cuda":
        from torch.multiprocessing.reductions import reduce_tensor

        buffer = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        return buffer, pickle.dumps(reduce_tensor(buffer))  # type: ignore[no-untyped-call]
    path = FOLDER / f"{PREFIX}{os.getpid()}-ipc-{uuid4().hex[:8]}"
    files.append(path)
    buffer = torch.from_file(str(path), shared=True, size=num_bytes, dtype=torch.uint8)
    return buffer, pickle.dumps((str(path), num_bytes))


def _open(slot: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The sender's buffer, mapped here. `slot`: what the sender wrote into its segment; it is trusted, like all of it."""
    raw = slot.numpy().tobytes()
    length = int.from_bytes(raw[:LENGTH_BYTES], "little")
    handle: Any = pickle.loads(raw[LENGTH_BYTES : LENGTH_BYTES + length])  # noqa: S301
    if device.type != "cuda":
        path, num_bytes = handle
        return torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8)
    rebuild, arguments = handle
    here = list(arguments)
    here[DEVICE_ARGUMENT] = device.index  # the sender numbers its devices in its own way
    buffer: torch.Tensor = rebuild(*here)
    return buffer


def _scope(device: torch.device) -> Any:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
