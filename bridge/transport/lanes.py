"""Buckets on lanes, for trainer and replicas on several hosts: over the network to one reader per host, which forwards them.

Each lane (layout/lanes.py) has a store at its sender, as a group has (channel.py). On GPUs the sender and its first readers are
one NCCL group, whose broadcasts run from host to host by themselves. On CPUs gloo's would send several copies from one host, so
that each link of the route is a group of two: a first reader sends a bucket on while the next one arrives. It receives into the
buffers of a writer of its host's own (shm.py, ipc.py), from which the host's other readers take it. All readers take all buckets
in the same order, each lane has its next bucket in flight, and no reader waits for a bucket later in that order.

The sender's digests come through the store after the last bucket, and every reader compares them with digests of the bytes that
it read, by network or relay. Leaves out the content of buckets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from bridge.layout.bucket import Bucket, StagePlan
from bridge.layout.digest import BucketDigests
from bridge.layout.lanes import Lane, LanePlan
from bridge.transport.channel import Channel
from bridge.transport.nccl import GroupWriter
from bridge.transport.ports import FirstPort, Port, RelayedPort, Staging
from bridge.transport.protocol import DamagedError
from bridge.transport.store import abort_all


def _digests_key(num_passes: int) -> str:
    return f"digests{num_passes}"


class LaneWriter(GroupWriter):
    """The sending side of a lane; `stage` has its buckets alone. Buckets go to the first host, on GPUs to all of them."""

    def __init__(self, stage: StagePlan, lane: Lane, plan: LanePlan, device: torch.device) -> None:
        direct = lane.route if device.type == "cuda" else lane.route[:1]
        super().__init__(stage, len(direct), device)
        names = " and ".join(plan.names[reader] for reader in direct)
        self._channel.owner, self._channel.others = str(lane), f"{names}, which {lane} goes to,"
        self._to = f"{names} to take {{}} buckets of {lane}"
        self._num_passes = 0

    def finish(self, deadline: float, check: Callable[[], None]) -> None:
        """Publish the digests and wait until all is sent."""
        if self._verify:
            digests = self._digests.join()
            self._channel.wait(self._channel.mark(), deadline, self._waits(self._count), check)  # `cpu` would wait for ever
            self._channel.publish(_digests_key(self._num_passes), digests.cpu().numpy().tobytes())
            if self._num_passes:
                self._channel.withdraw(_digests_key(self._num_passes - 1))
        for done in self._sent:
            self._channel.wait(done, deadline, self._waits(self._count), check)
        self._num_passes += 1


class LaneReader:
    """One vLLM worker's side of all lanes, an endpoint each; `reader` is its index among the workers of all replicas."""

    interleaves = True

    def __init__(self, endpoints: tuple[str, ...], reader: int, plan: LanePlan, device: torch.device) -> None:
        self.endpoints, self.lends_memory = endpoints, device.type == "cpu"
        self._reader, self._plan, self._device = reader, plan, device
        self._ports: dict[int, Port] = {}  # by the lane's index among all
        self._digests: dict[int, BucketDigests] = {}  # by stage
        self._channels: dict[int, Channel] = {}
        self._staging: Staging | None = None

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
        for index, _ in lanes:  # each may have been aborted
            channel = self._channels[index]
            channel.wait(channel.mark(), deadline, f"the last bucket of stage {stage.index}", self._progress)
        if verify:
            self._compare(stage, sync_index, digests.join().cpu(), deadline)

    def _join(self, index: int, lane: Lane, stage: StagePlan, deadline: float) -> Port:
        """All readers join all lanes in one order, so that no two wait for each other."""
        if index not in self._ports:
            is_first, device = self._reader in lane.route, self._device
            place = lane.route.index(self._reader) if is_first else 0
            rank, size = (1 + place, 1 + len(lane.route)) if device.type == "cuda" else (1, 2)
            channel = self._channels[index] = Channel.connect(self.endpoints[index], rank, size, device, deadline)
            channel.owner = str(lane)
            own = stage.lane(lane.buckets(len(stage.buckets)))
            if is_first:
                self._ports[index] = FirstPort(lane, self._plan, own, channel, self._reader, self._progress)
            else:
                staging = self._staging_of(stage)
                self._ports[index] = RelayedPort(lane, self._plan, channel, self._reader, self._progress, staging)
            self._ports[index].open(deadline)
        return self._ports[index]

    def _staging_of(self, stage: StagePlan) -> Staging | None:
        """One staging for all lanes. With several stages it would need a bucket of each; then buckets are loaded in place."""
        is_only = all(lane.stage == stage.index for lane in self._plan.lanes)
        if self._staging is None and self._device.type == "cuda" and is_only:
            self._staging = Staging(stage.buffer_bytes, self._device)
        return self._staging

    def _progress(self) -> None:
        for port in self._ports.values():
            port.progress()

    def _compare(self, stage: StagePlan, sync_index: int, digests: torch.Tensor, deadline: float) -> None:
        """Compare with the senders' digests."""
        wrong: list[int] = []
        for index, lane in self._plan.of_stage(stage.index):
            if not (own := list(lane.buckets(len(stage.buckets)))):
                continue  # fewer buckets than lanes
            found = self._channels[index].wait_for(_digests_key(sync_index), deadline, f"the digests of {lane}", self._progress)
            theirs = torch.frombuffer(bytearray(found), dtype=torch.int64)
            wrong += [own[place] for place in (digests[own] != theirs).nonzero().flatten().tolist()]
        if wrong:
            raise DamagedError(stage, sorted(wrong))

    def abort(self, reason: str) -> None:
        for port in self._ports.values():
            port.abort(reason)
        abort_all([endpoint for index, endpoint in enumerate(self.endpoints) if index not in self._ports], reason)

    def close(self) -> None:
        """Close the ports that read from the network first: a relayed bucket's copy may wait for one that never arrives."""
        for port in sorted(self._ports.values(), key=lambda port: isinstance(port, RelayedPort)):
            port.close()
        self._ports, self._channels, self._digests, self._staging = {}, {}, {}, None
