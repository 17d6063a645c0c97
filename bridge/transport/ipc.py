"""Buckets through memory that trainer and replicas share on a device, for replicas on the trainer's own GPUs: CUDA IPC.

Control words and their protocol are those of shm.py; instead of its two buffers the segment holds what another
process needs to map the sender's two buffers: CUDA's IPC handles, or without CUDA the path of a file that has no name. Both sides
compute digests on their device and compare them after the last bucket, so that nobody waits for one. Leaves out what a
bucket means.
"""

from __future__ import annotations

import os
import pickle
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from bridge.layout.bucket import StagePlan
from bridge.layout.digest import BucketDigests
from bridge.transport.protocol import DamagedError
from bridge.transport.segment import NUM_BUFFERS, UnlinkedFile
from bridge.transport.shm import ShmReader, ShmWriter, endpoint_of

SCHEME = "ipc:"
HANDLE_BYTES = 4096
LENGTH_BYTES = 8
DEVICE_ARGUMENT = 6  # of torch.multiprocessing.reductions.rebuild_cuda_tensor
ENVIRONMENT = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # torch's own settings of its allocator


class IpcWriter(ShmWriter):
    """The sending side of one stage; its two buffers are its own memory on `device`."""

    longest_pause = 100e-6  # a bucket takes a GPU a millisecond

    def __init__(self, stage: StagePlan, readers: list[str], own: Sequence[int], device: torch.device) -> None:
        super().__init__(stage, readers, own, HANDLE_BYTES + 8 * len(stage.buckets))
        self.digests = self._digests = BucketDigests(len(stage.buckets), device)
        self._verify = False
        self.endpoint = endpoint_of(SCHEME, self.segment)
        self._device = device
        self._files: list[UnlinkedFile] = []  # without CUDA
        self.buffers = []
        for slot in self.segment.buffers:
            buffer, handle = self._share(stage.buffer_bytes)
            self.buffers.append(buffer)
            packed = len(handle).to_bytes(LENGTH_BYTES, "little") + handle
            slot[: len(packed)] = torch.frombuffer(bytearray(packed), dtype=torch.uint8)

    def _share(self, num_bytes: int) -> tuple[torch.Tensor, bytes]:
        """A new buffer [num_bytes] uint8, and what `_open` takes."""
        if self._device.type == "cuda":
            from torch.multiprocessing.reductions import reduce_tensor

            with _mappable():
                buffer = torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)
            return buffer, pickle.dumps(reduce_tensor(buffer))  # type: ignore[no-untyped-call]
        self._files.append(UnlinkedFile())
        path = str(self._files[-1].path)
        return torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8), pickle.dumps((path, num_bytes))

    def publish(self, num_bytes: int, *, verify: bool) -> None:
        """Like ShmWriter, but the bucket has to be complete on the device, and its digest is sent at the end of the pass."""
        with _scope(self._device):
            data = self.buffers[self.sequence % NUM_BUFFERS][:num_bytes]
            _synchronize(self._device)
            self.announce(num_bytes)
            if verify:  # beside the readers' copies
                self._digests.finish(data)
        self._verify = verify

    def finish(self, deadline: float, check: Callable[[], None]) -> None:
        """Tell the digests."""
        if self._verify:
            values = self._digests.join().cpu()
            self.segment.buffers[0][HANDLE_BYTES:].view(torch.int64)[: len(values)].copy_(values)
            self.segment.announce_checked(self.sequence)

    def close(self) -> None:
        super().close()
        for file in self._files:
            file.close()


class IpcReader(ShmReader):
    """One vLLM worker's view of all stages' buffers, which lie on the trainer's devices."""

    longest_pause = 100e-6

    def __init__(self, endpoints: tuple[str, ...], reader: int, device: torch.device) -> None:
        super().__init__(endpoints, reader, device)
        self._device = device
        self._digests = [BucketDigests((each.buffers[0].numel() - HANDLE_BYTES) // 8, device) for each in self._segments]
        self._unchecked: deque[torch.Tensor] = deque()  # buckets that are out
        self._buffers = [[_open(slot, device) for slot in segment.buffers] for segment in self._segments]

    def read(self, stage: int, sequence: int, num_bytes: int, deadline: float, *, verify: bool) -> torch.Tensor:
        """Like ShmReader, but `finish` detects damage."""
        data = super().read(stage, sequence, num_bytes, deadline, verify=False)
        if verify:
            self._unchecked.append(data)
        return data

    def digests(self, stage: int) -> BucketDigests:
        return self._digests[stage]

    def finish(self, stage: StagePlan, num_buckets: int, deadline: float) -> None:
        """Compare the digests of the stage's buckets."""
        segment = self._segments[stage.index]
        late = f"waits for the digests of stage {stage.index}"
        self._wait(lambda: segment.num_checked >= num_buckets, deadline, late)
        mine = self._digests[stage.index].join().cpu()
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


def _open(slot: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The sender's buffer, mapped here. `slot`: written by the sender into its segment, and trusted, like all of it."""
    raw = slot.numpy().tobytes()
    length = int.from_bytes(raw[:LENGTH_BYTES], "little")
    handle: Any = pickle.loads(raw[LENGTH_BYTES : LENGTH_BYTES + length])  # noqa: S301
    if device.type != "cuda":
        path, num_bytes = handle
        return torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8)
    rebuild, arguments = handle
    here = list(arguments)
    here[DEVICE_ARGUMENT] = device.index  # the sender numbers its devices in its own way
    return rebuild(*here)  # type: ignore[no-any-return]


@contextmanager
def _mappable() -> Iterator[None]:
    """Within the block torch's allocator uses segments that it does not extend: CUDA exports handles of those only.

    What is made afterwards may lie in others again (get_free_block in c10/cuda/CUDACachingAllocator.cpp looks at the setting each
    time). Where the user has settings of the allocator, these stay.
    """
    is_extended = torch.cuda.memory._snapshot()["allocator_settings"]["expandable_segments"]
    if not is_extended or any(os.environ.get(name) for name in ENVIRONMENT):
        yield
        return
    torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
    try:
        yield
    finally:
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")


def _scope(device: torch.device) -> Any:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
