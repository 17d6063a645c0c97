"""A reader's source of a lane's buckets: the network, or the buffers of the first reader on its host (lanes.py).

On GPUs the host queues work and waits for few things: for a bucket that has arrived, before others may read it, and for buffers
that others read. While it waits, it calls `progress` of all ports, which releases buckets that have been read, so that no two
wait for each other.
Leaves out the content of buckets.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import torch

from bridge.layout.bucket import Bucket, StagePlan
from bridge.layout.lanes import Lane, LanePlan
from bridge.transport.channel import Channel
from bridge.transport.ipc import IpcReader, IpcWriter
from bridge.transport.nccl import NUM_BUFFERS
from bridge.transport.protocol import TransportError
from bridge.transport.shm import ShmReader, ShmWriter

Progress = Callable[[], None]


class Port(Protocol):
    """A reader's source of a lane's buckets."""

    def open(self, deadline: float) -> None:
        """Once: meet the others."""

    def start(self, deadline: float) -> None:
        """Before a pass."""

    def take(self, bucket: Bucket) -> torch.Tensor:
        """The bytes [n] uint8 of the lane's next bucket, valid until `give_back`."""

    def give_back(self) -> None:
        """Call once all reads of the bucket are queued on the current stream."""

    def progress(self) -> None:
        """Release the buckets that have been read; returns at once."""

    def finish(self) -> None:
        """After a pass's last bucket."""

    def abort(self, reason: str) -> None: ...

    def close(self) -> None: ...


class FirstPort:
    """The port of a lane's first reader on a host: reads from the network, forwards to the next host and to its own."""

    def __init__(
        self, lane: Lane, plan: LanePlan, stage: StagePlan, channel: Channel, reader: int, progress_all: Progress
    ) -> None:
        place, device = lane.route.index(reader), channel.device
        self._stage, self._lane, self._channel, self._progress_all = stage, lane, channel, progress_all
        self._next: Channel | None = None
        self._in, former = channel, place > 0 and device.type == "cpu"
        self._from = f"{plan.names[lane.route[place - 1]]} on {lane}" if former else str(lane)
        if former:
            self._in = channel.beside(f"link{place}", 1, 2)
        if place + 1 < len(lane.route) and device.type == "cpu":
            self._next = channel.beside(f"link{place + 1}", 0, 2)
            self._to = f"{plan.names[lane.route[place + 1]]}, to which {lane} goes next,"
        others = [other for other in plan.host_of(reader) if other != reader]
        self._relay: ShmWriter | None = None
        if others:
            names = [plan.names[other] for other in others]
            kind = (stage, names, range(len(others)))
            self._relay = IpcWriter(*kind, device) if device.type == "cuda" else ShmWriter(*kind)
            channel.publish(f"relay{reader}", self._relay.endpoint.encode())
        self._buffers = self._relay.buffers if self._relay is not None else _buffers(stage.buffer_bytes, device)
        self._num_posted = self._num_taken = 0
        self._deadline = 0.0  # of the pass
        self._position = 0  # of the next bucket to be posted in this pass
        self._arrival: tuple[torch.Tensor, Any] = (torch.empty(0), None)
        self._freed: list[Any] = [None] * NUM_BUFFERS
        self._forwards: list[Any] = [None] * NUM_BUFFERS

    def open(self, deadline: float) -> None:
        self._in.others = self._from
        self._in.meet(deadline)
        if self._next is not None:
            self._next.others = self._to
            self._next.meet(deadline)

    def start(self, deadline: float) -> None:
        self._deadline, self._position = deadline, 0
        self._freed, self._forwards = [self._in.mark()] * NUM_BUFFERS, [None] * NUM_BUFFERS  # after they are zeroed
        self._post()

    def _post(self) -> None:
        """Let the next bucket come, if there is one, once the one before the last has left its buffer."""
        if self._position == len(self._stage.buckets):
            return
        bucket, slot = self._stage.buckets[self._position], self._num_posted % NUM_BUFFERS
        if self._relay is not None:
            self._relay.acquire(self._deadline, self._look)
        self._wait_for_next(slot)
        data = self._buffers[slot][: bucket.num_bytes]
        self._arrival = data, self._in.broadcast(data, self._deadline, self._freed[slot])
        self._num_posted, self._position = self._num_posted + 1, self._position + 1

    def _look(self) -> None:
        self._channel.look()
        self._progress_all()

    def take(self, bucket: Bucket) -> torch.Tensor:
        data, arrived = self._arrival
        ready = self._in.wait if self._relay is not None else self._in.order
        ready(arrived, self._deadline, f"{self._stage.describe(bucket)} from {self._from}", self._progress_all)
        if self._next is not None:
            self._forwards[self._num_taken % NUM_BUFFERS] = self._next.broadcast(data, self._deadline)
        if self._relay is not None:
            self._relay.announce(len(data))
        self._post()
        return data

    def give_back(self) -> None:
        self._freed[self._num_taken % NUM_BUFFERS] = self._in.mark()
        self._num_taken += 1

    def progress(self) -> None:
        """Nothing: senders learn from the device, or by the next bucket that is asked for, which buffers are free."""

    def finish(self) -> None:
        for slot in range(NUM_BUFFERS):
            self._wait_for_next(slot)

    def _wait_for_next(self, slot: int) -> None:
        """Until the next host has taken what lies in the buffer."""
        forward, self._forwards[slot] = self._forwards[slot], None
        if self._next is not None:
            self._next.wait(forward, self._deadline, f"{self._to} to take a bucket", self._progress_all)

    def abort(self, reason: str) -> None:
        if self._relay is not None:
            self._relay.abort(reason)
        self._channel.abort(reason)
        self.close()

    def close(self) -> None:
        for channel in (self._channel, self._in, self._next):
            if channel is not None:
                channel.close()
        self._buffers = []
        if self._relay is not None:
            self._relay.close()
            self._relay = None


class Staging:
    """Two buffers on a reader's own GPU, into which its copy engines copy what lies on others' while a kernel loads a bucket.

    A kernel that loads from the other GPU itself would keep cores from NCCL's, by which the reader's own lanes arrive.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._device = device
        self._buffers = _buffers(num_bytes, device)
        self._loaded: list[Any] = [None] * NUM_BUFFERS
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(device))  # which fills the buffers with zeros
        for buffer in self._buffers:
            buffer.record_stream(self._stream)
        self._count = 0

    def copy_in(self, data: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """A copy of `data` [n] uint8 for the current stream, good until `free`, and the event after which `data` is read."""
        slot = self._count % NUM_BUFFERS
        here = self._buffers[slot][: len(data)]
        if self._loaded[slot] is not None:
            self._stream.wait_event(self._loaded[slot])
        with torch.cuda.stream(self._stream):
            here.copy_(data, non_blocking=True)
            copied = self._stream.record_event()
        torch.cuda.current_stream(self._device).wait_event(copied)
        return here, copied

    def free(self) -> None:
        """Call once all reads of the bucket are queued on the current stream."""
        self._loaded[self._count % NUM_BUFFERS] = torch.cuda.current_stream(self._device).record_event()
        self._count += 1


class _Relayed(ShmReader):
    """Aborts also come through the lane's store, since the forwarding reader may have ended."""

    channel: Channel
    who: str
    progress_all: Progress

    def _wait(self, ready: Callable[[], bool], deadline: float, late: str) -> None:
        def look() -> bool:
            self.channel.look()
            self.progress_all()
            return ready()

        super()._wait(look, deadline, f"waits for {self.who}")


class _RelayedIpc(_Relayed, IpcReader):
    pass


class RelayedPort:
    """The port of other readers: reads the buffers of the first reader on their host, on GPUs through `staging` if given."""

    def __init__(
        self, lane: Lane, plan: LanePlan, channel: Channel, reader: int, progress_all: Progress, staging: Staging | None
    ) -> None:
        self._channel, self._progress_all, self._staging = channel, progress_all, staging
        self._first = plan.first_of(lane, reader)
        self._place = [other for other in plan.host_of(reader) if other != self._first].index(reader)
        self._who = f"{plan.names[self._first]}, which passes {lane} on"
        self._reader: _Relayed | None = None
        self._deadline = 0.0  # of the pass
        self._num_taken = 0
        self._copied: Any = None  # the event after which the bucket that is out is in `staging`
        self._unreleased: deque[Any] = deque()  # of each bucket that was given back the event after which it is read

    def open(self, deadline: float) -> None:
        endpoint = self._channel.wait_for(f"relay{self._first}", deadline, self._who, self._progress_all).decode()
        kind = _RelayedIpc if self._channel.device.type == "cuda" else _Relayed
        self._reader = kind((endpoint,), self._place, self._channel.device)
        self._reader.channel, self._reader.who, self._reader.progress_all = self._channel, self._who, self._progress_all

    def start(self, deadline: float) -> None:
        self._deadline = deadline

    def take(self, bucket: Bucket) -> torch.Tensor:
        assert self._reader is not None
        try:
            data = self._reader.read(0, self._num_taken, bucket.num_bytes, self._deadline, verify=False)
        except TransportError as error:
            raise TransportError(f"bucket {bucket.index}: {error}") from error
        if self._staging is not None:
            data, self._copied = self._staging.copy_in(data)
        return data

    def give_back(self) -> None:
        if self._staging is not None:
            self._staging.free()
        self._unreleased.append(self._copied if self._staging is not None else self._channel.mark())
        self._num_taken += 1
        self.progress()

    def progress(self) -> None:
        while self._unreleased and (self._unreleased[0] is None or self._unreleased[0].query()):
            self._unreleased.popleft()
            assert self._reader is not None
            self._reader.count_read(0)

    def finish(self) -> None:
        """All is read."""
        what = "the copies out of the last buckets"
        self._channel.poll(lambda: not self._unreleased, self._deadline, what, self._progress_all)

    def abort(self, reason: str) -> None:
        if self._reader is not None:
            self._reader.abort(reason)
        self._channel.abort(reason)

    def close(self) -> None:
        self._channel.close()
        for copied in (*self._unreleased, self._copied):
            if copied is not None:
                copied.synchronize()  # before the memory is unmapped
        self._unreleased.clear()
        if self._reader is not None:
            self._reader.close()
            self._reader = None


def _buffers(num_bytes: int, device: torch.device) -> list[torch.Tensor]:
    return [torch.zeros(num_bytes, dtype=torch.uint8, device=device) for _ in range(NUM_BUFFERS)]
