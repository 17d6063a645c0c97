"""Buckets on lanes, for trainer and replicas on several hosts: over the network to one reader a host, which passes them on.

Each lane (layout/lanes.py) has a store at its sender, as a group has (channel.py). On GPUs the sender and its first readers are
one NCCL group, whose broadcasts run from host to host by themselves. On CPUs gloo's would send several copies from one host, so
that each link of the route is a group of two: a first reader sends a bucket on while the next one arrives. It receives into the
buffers of a writer of its host's own (shm.py, ipc.py), from which the host's other readers take it. All readers take all buckets
in the same order, each lane has its next bucket under way, and nobody waits for one that comes later in that order.

The sender's digests come through the store after the last bucket, and every reader compares them with those of the bytes that it
read itself, whichever way they came. Leaves out what a bucket means.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

from bridge.layout.bucket import Bucket, StagePlan
from bridge.layout.digest import BucketDigests
from bridge.layout.lanes import Lane, LanePlan
from bridge.transport.channel import Channel, abort_all
from bridge.transport.errors import DamagedError, TransportError
from bridge.transport.ipc import IpcReader, IpcWriter
from bridge.transport.nccl import NUM_BUFFERS, GroupWriter
from bridge.transport.shm import ShmReader, ShmWriter


def _digests_key(num_passes: int) -> str:
    return f"digests{num_passes}"


class LaneWriter(GroupWriter):
    """The sending side of a lane; `stage` has its buckets alone. Buckets go to the first host, on GPUs to all of them."""

    def __init__(self, stage: StagePlan, lane: Lane, plan: LanePlan, device: torch.device) -> None:
        direct = lane.route if device.type == "cuda" else lane.route[:1]
        super().__init__(stage, len(direct), device)
        self._channel.owner = str(lane)
        self._to = f"{' and '.join(plan.names[reader] for reader in direct)} to take {{}} buckets of {lane}"
        self._num_passes = 0

    def finish(self, deadline: float, check: Callable[[], None]) -> None:
        """Tell the digests and wait until all is sent."""
        if self._verify:
            self._channel.tell(_digests_key(self._num_passes), self._digests.join().cpu().numpy().tobytes())
            if self._num_passes:
                self._channel.forget(_digests_key(self._num_passes - 1))
        for done in self._sent:
            self._channel.wait(done, deadline, self._waits(self._count), check)
        self._num_passes += 1


class Port(Protocol):
    """Where one reader gets a lane's buckets from."""

    def open(self, deadline: float) -> None:
        """Once: meet the others."""

    def start(self, deadline: float) -> None:
        """Before a pass."""

    def take(self, bucket: Bucket) -> torch.Tensor:
        """The lane's next bucket, its bytes [n] uint8, good until `give_back`."""

    def give_back(self) -> None: ...

    def finish(self) -> None:
        """After a pass's last bucket."""

    def abort(self, reason: str) -> None: ...

    def close(self) -> None: ...


class FirstPort:
    """Of the lane's first reader on a host: from the network, and on to the next host and to the others of its own."""

    def __init__(self, lane: Lane, plan: LanePlan, stage: StagePlan, channel: Channel, reader: int) -> None:
        place, device = lane.route.index(reader), channel.device
        self._stage, self._lane, self._channel = stage, lane, channel
        self._next: Channel | None = None
        self._in, former = channel, place > 0 and device.type == "cpu"
        self._from = f"{plan.names[lane.route[place - 1]]} on {lane}" if former else str(lane)
        if former:
            self._in = channel.beside(f"link{place}", 1, 2)
        if place + 1 < len(lane.route) and device.type == "cpu":
            self._next = channel.beside(f"link{place + 1}", 0, 2)
            self._to = f"{plan.names[lane.route[place + 1]]} to take buckets of {lane}"
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
        self._in.meet(deadline)
        if self._next is not None:
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
            self._relay.acquire(self._deadline, self._channel.look)
        self._wait_for_next(slot)
        data = self._buffers[slot][: bucket.num_bytes]
        self._arrival = data, self._in.broadcast(data, self._deadline, self._freed[slot])
        self._num_posted, self._position = self._num_posted + 1, self._position + 1

    def take(self, bucket: Bucket) -> torch.Tensor:
        data, arrived = self._arrival
        self._in.order(arrived, self._deadline, f"{self._stage.describe(bucket)} from {self._from}")
        if self._next is not None:
            self._forwards[self._num_taken % NUM_BUFFERS] = self._next.broadcast(data, self._deadline)
        if self._relay is not None:
            self._relay.publish(len(data), verify=False)
        self._post()
        return data

    def give_back(self) -> None:
        self._freed[self._num_taken % NUM_BUFFERS] = self._in.mark()
        self._num_taken += 1

    def finish(self) -> None:
        for slot in range(NUM_BUFFERS):
            self._wait_for_next(slot)

    def _wait_for_next(self, slot: int) -> None:
        """Until the next host has taken what lies in the buffer."""
        forward, self._forwards[slot] = self._forwards[slot], None
        if self._next is not None:
            self._next.wait(forward, self._deadline, self._to)

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


class _Relayed(ShmReader):
    """It hears of aborts through the lane's store too: who passes buckets on may be gone."""

    channel: Channel
    who: str

    def _wait(self, ready: Callable[[], bool], deadline: float, late: str) -> None:
        def look() -> bool:
            self.channel.look()
            return ready()

        super()._wait(look, deadline, f"waits for {self.who}")


class _RelayedIpc(_Relayed, IpcReader):
    pass


class RelayedPort:
    """Of the other readers: out of the buffers of the first one on their host."""

    def __init__(self, lane: Lane, plan: LanePlan, channel: Channel, reader: int) -> None:
        self._channel = channel
        self._first = plan.first_of(lane, reader)
        self._place = [other for other in plan.host_of(reader) if other != self._first].index(reader)
        self._who = f"{plan.names[self._first]}, which passes {lane} on"
        self._reader: _Relayed | None = None
        self._num_taken = 0

    def open(self, deadline: float) -> None:
        endpoint = self._channel.ask(f"relay{self._first}", deadline, self._who).decode()
        kind = _RelayedIpc if self._channel.device.type == "cuda" else _Relayed
        self._reader = kind((endpoint,), self._place, self._channel.device)
        self._reader.channel, self._reader.who = self._channel, self._who

    def start(self, deadline: float) -> None:
        self._deadline = deadline

    def take(self, bucket: Bucket) -> torch.Tensor:
        assert self._reader is not None
        try:
            return self._reader.read(0, self._num_taken, bucket.num_bytes, self._deadline, verify=False)
        except TransportError as error:
            raise TransportError(f"bucket {bucket.index}: {error}") from error

    def give_back(self) -> None:
        assert self._reader is not None
        self._reader.release(0)
        self._num_taken += 1

    def finish(self) -> None:
        """All is read."""

    def abort(self, reason: str) -> None:
        if self._reader is not None:
            self._reader.abort(reason)
        self._channel.abort(reason)

    def close(self) -> None:
        self._channel.close()
        if self._reader is not None:
            self._reader.close()
            self._reader = None


class LaneReader:
    """One vLLM worker's side of all lanes, an endpoint each; `reader` is its index among the workers of all replicas."""

    interleaves = True

    def __init__(self, endpoints: tuple[str, ...], reader: int, plan: LanePlan, device: torch.device) -> None:
        self.endpoints, self.lends_memory = endpoints, device.type == "cpu"
        self._reader, self._plan, self._device = reader, plan, device
        self._ports: dict[int, Port] = {}  # by the lane's index among all
        self._digests: dict[int, BucketDigests] = {}  # by stage
        self._channels: dict[int, Channel] = {}

    def digests(self, stage: int) -> BucketDigests:
        return self._digests[stage]

    def buckets(
        self, stage: StagePlan, sync_index: int, deadline: float, *, verify: bool
    ) -> Iterator[tuple[Bucket, torch.Tensor]]:
        """Each lane's next bucket is on the wire while one is loaded; digests are compared after the last."""
        lanes = self._plan.of_stage(stage.index)
        ports = [self._join(index, lane, stage, deadline) for index, lane in lanes]
        for port in ports:
            port.start(deadline)
        digests = self._digests.setdefault(stage.index, BucketDigests(len(stage.buckets), self._device))
        for bucket in stage.buckets:
            port = ports[bucket.index % len(ports)]
            data = port.take(bucket)
            yield bucket, data
            if verify:
                digests.finish(data)
            port.give_back()
        for port in ports:
            port.finish()
        if verify:
            self._compare(stage, sync_index, digests.join().cpu(), deadline)

    def _join(self, index: int, lane: Lane, stage: StagePlan, deadline: float) -> Port:
        """All lanes are joined in one order by all readers, so that nobody waits for one who waits for him."""
        if index not in self._ports:
            is_first, device = self._reader in lane.route, self._device
            place = lane.route.index(self._reader) if is_first else 0
            rank, size = (1 + place, 1 + len(lane.route)) if device.type == "cuda" else (1, 2)
            channel = self._channels[index] = Channel.connect(self.endpoints[index], rank, size, device, deadline)
            channel.owner = str(lane)
            own = stage.lane(lane.buckets(len(stage.buckets)))
            if is_first:
                self._ports[index] = FirstPort(lane, self._plan, own, channel, self._reader)
            else:
                self._ports[index] = RelayedPort(lane, self._plan, channel, self._reader)
            self._ports[index].open(deadline)
        return self._ports[index]

    def _compare(self, stage: StagePlan, sync_index: int, digests: torch.Tensor, deadline: float) -> None:
        """With those of the senders."""
        wrong: list[int] = []
        for index, lane in self._plan.of_stage(stage.index):
            told = self._channels[index].ask(_digests_key(sync_index), deadline, f"the digests of {lane}")
            theirs = torch.frombuffer(bytearray(told), dtype=torch.int64) if told else digests[:0]
            own = list(lane.buckets(len(stage.buckets)))
            wrong += [own[place] for place in (digests[own] != theirs).nonzero().flatten().tolist()]
        if wrong:
            raise DamagedError(stage, sorted(wrong))

    def abort(self, reason: str) -> None:
        for port in self._ports.values():
            port.abort(reason)
        abort_all([endpoint for index, endpoint in enumerate(self.endpoints) if index not in self._ports], reason)

    def close(self) -> None:
        for port in self._ports.values():
            port.close()
        self._ports, self._channels, self._digests = {}, {}, {}


def _buffers(num_bytes: int, device: torch.device) -> list[torch.Tensor]:
    return [torch.zeros(num_bytes, dtype=torch.uint8, device=device) for _ in range(NUM_BUFFERS)]
