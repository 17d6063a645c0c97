"""Where one reader gets a lane's buckets from: the network, or the buffers of the first reader on its host (lanes.py).

On GPUs the host queues work and waits for few things: for a bucket that has arrived, before others may read it, and for buffers
that others read. Whoever waits calls `settle` of all ports meanwhile, which gives back what is read: nobody waits in a circle.
Leaves out what a bucket means.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import torch

from bridge.layout.bucket import Bucket, StagePlan
from bridge.layout.lanes import Lane, LanePlan
from bridge.transport.channel import Channel
from bridge.transport.errors import TransportError
from bridge.transport.ipc import IpcReader, IpcWriter
from bridge.transport.nccl import NUM_BUFFERS
from bridge.transport.shm import ShmReader, ShmWriter

Settle = Callable[[], None]


class Port(Protocol):
    """Where one reader gets a lane's buckets from."""

    def open(self, deadline: float) -> None:
        """Once: meet the others."""

    def start(self, deadline: float) -> None:
        """Before a pass."""

    def take(self, bucket: Bucket) -> torch.Tensor:
        """The lane's next bucket, its bytes [n] uint8, good until `give_back`."""

    def give_back(self) -> None:
        """All that reads the bucket is queued on the current stream."""

    def settle(self) -> None:
        """Tell others which buckets have been read; returns at once."""

    def finish(self) -> None:
        """After a pass's last bucket."""

    def abort(self, reason: str) -> None: ...

    def close(self) -> None: ...


class FirstPort:
    """Of the lane's first reader on a host: from the network, and on to the next host and to the others of its own."""

    def __init__(self, lane: Lane, plan: LanePlan, stage: StagePlan, channel: Channel, reader: int, settle_all: Settle) -> None:
        place, device = lane.route.index(reader), channel.device
        self._stage, self._lane, self._channel, self._settle_all = stage, lane, channel, settle_all
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
            channel.tell(f"relay{reader}", self._relay.endpoint.encode())
        self._buffers = self._relay.buffers if self._relay is not None else _buffers(stage.buffer_bytes, device)
        self._num_posted = self._num_taken = 0
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
        self._freed, self._forwards = [None] * NUM_BUFFERS, [None] * NUM_BUFFERS
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
        self._settle_all()

    def take(self, bucket: Bucket) -> torch.Tensor:
        data, arrived = self._arrival
        ready = self._in.wait if self._relay is not None else self._in.order
        ready(arrived, self._deadline, f"{self._stage.describe(bucket)} from {self._from}", self._settle_all)
        if self._next is not None:
            self._forwards[self._num_taken % NUM_BUFFERS] = self._next.broadcast(data, self._deadline)
        if self._relay is not None:
            self._relay.announce(len(data))
        self._post()
        return data

    def give_back(self) -> None:
        self._freed[self._num_taken % NUM_BUFFERS] = self._in.mark()
        self._num_taken += 1

    def settle(self) -> None:
        """Those who send to this reader learn it from the device, or by the next bucket that it asks for."""

    def finish(self) -> None:
        for slot in range(NUM_BUFFERS):
            self._wait_for_next(slot)

    def _wait_for_next(self, slot: int) -> None:
        """Until the next host has taken what lies in the buffer."""
        forward, self._forwards[slot] = self._forwards[slot], None
        if self._next is not None:
            self._next.wait(forward, self._deadline, f"{self._to} to take a bucket", self._settle_all)

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


class Landing:
    """Two buffers on a reader's own GPU, to which its copy engines bring what lies on others' while its cores load a bucket.

    A kernel that reads the other GPU's memory would keep NCCL's kernels, which bring the reader's own lanes, from the cores.
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

    def bring(self, data: torch.Tensor) -> tuple[torch.Tensor, Any]:
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
        """All that reads the bucket is queued on the current stream."""
        self._loaded[self._count % NUM_BUFFERS] = torch.cuda.current_stream(self._device).record_event()
        self._count += 1


class _Relayed(ShmReader):
    """It hears of aborts through the lane's store too: who passes buckets on may be gone."""

    channel: Channel
    who: str
    settle_all: Settle

    def _wait(self, ready: Callable[[], bool], deadline: float, late: str) -> None:
        def look() -> bool:
            self.channel.look()
            self.settle_all()
            return ready()

        super()._wait(look, deadline, f"waits for {self.who}")


class _RelayedIpc(_Relayed, IpcReader):
    pass


class RelayedPort:
    """Of the other readers: out of the buffers of the first one on their host, on GPUs by way of `landing` if there is one."""

    def __init__(
        self, lane: Lane, plan: LanePlan, channel: Channel, reader: int, settle_all: Settle, landing: Landing | None
    ) -> None:
        self._channel, self._settle_all, self._landing = channel, settle_all, landing
        self._first = plan.first_of(lane, reader)
        self._place = [other for other in plan.host_of(reader) if other != self._first].index(reader)
        self._who = f"{plan.names[self._first]}, which passes {lane} on"
        self._reader: _Relayed | None = None
        self._num_taken = 0
        self._copied: Any = None  # the event after which the bucket that is out is in `landing`
        self._unsettled: deque[Any] = deque()  # of each bucket that was given back the event after which it is read

    def open(self, deadline: float) -> None:
        endpoint = self._channel.ask(f"relay{self._first}", deadline, self._who, self._settle_all).decode()
        kind = _RelayedIpc if self._channel.device.type == "cuda" else _Relayed
        self._reader = kind((endpoint,), self._place, self._channel.device)
        self._reader.channel, self._reader.who, self._reader.settle_all = self._channel, self._who, self._settle_all

    def start(self, deadline: float) -> None:
        self._deadline = deadline

    def take(self, bucket: Bucket) -> torch.Tensor:
        assert self._reader is not None
        try:
            data = self._reader.read(0, self._num_taken, bucket.num_bytes, self._deadline, verify=False)
        except TransportError as error:
            raise TransportError(f"bucket {bucket.index}: {error}") from error
        if self._landing is not None:
            data, self._copied = self._landing.bring(data)
        return data

    def give_back(self) -> None:
        if self._landing is not None:
            self._landing.free()
        self._unsettled.append(self._copied if self._landing is not None else self._channel.mark())
        self._num_taken += 1
        self.settle()

    def settle(self) -> None:
        while self._unsettled and (self._unsettled[0] is None or self._unsettled[0].query()):
            self._unsettled.popleft()
            assert self._reader is not None
            self._reader.count_read(0)

    def finish(self) -> None:
        """All is read."""
        what = "the copies out of the last buckets"
        self._channel.poll(lambda: not self._unsettled, self._deadline, what, self._settle_all)

    def abort(self, reason: str) -> None:
        if self._reader is not None:
            self._reader.abort(reason)
        self._channel.abort(reason)

    def close(self) -> None:
        self._channel.close()
        for copied in (*self._unsettled, self._copied):
            if copied is not None:
                copied.synchronize()  # before the memory is unmapped
        self._unsettled.clear()
        if self._reader is not None:
            self._reader.close()
            self._reader = None


def _buffers(num_bytes: int, device: torch.device) -> list[torch.Tensor]:
    return [torch.zeros(num_bytes, dtype=torch.uint8, device=device) for _ in range(NUM_BUFFERS)]
