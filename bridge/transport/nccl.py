"""Buckets through a process group, for replicas with devices of their own: NCCL between GPUs, gloo between CPUs.

The sender of a stage and all vLLM workers are one group (channel.py), with two fixed buffers on each side. While bucket k
is on the wire, the sender packs bucket k + 1 and the readers scatter bucket k - 1. On CUDA all of it is queued on two
streams and the host waits once, at the end. Each side takes the 64-bit digest of every bucket on its own device; the
sender's travel after the last bucket and the readers compare them then, which keeps the pipeline running. Leaves out what a
bucket means.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from bridge.layout.bucket import Bucket, StagePlan
from bridge.layout.digest import BucketDigests
from bridge.transport.channel import Channel, Channels
from bridge.transport.protocol import DamagedError

NUM_BUFFERS = 2


class GroupWriter:
    """The sending side of one stage."""

    digests: BucketDigests | None

    def __init__(self, stage: StagePlan, num_readers: int, device: torch.device) -> None:
        self._stage = stage
        self._channel, self.endpoint = Channel.listen(1 + num_readers, device)
        self._to = f"the workers to take {{}} buckets of stage {stage.index}"
        self.buffers = [torch.zeros(stage.buffer_bytes, dtype=torch.uint8, device=device) for _ in range(NUM_BUFFERS)]
        self.digests = self._digests = BucketDigests(len(stage.buckets), device)
        self._sent: list[Any] = [None] * NUM_BUFFERS
        self._count, self._verify, self._deadline = 0, False, 0.0

    def start(self, deadline: float, check: Callable[[], None]) -> None:
        self._count, self._deadline = 0, deadline
        self._sent = [None] * NUM_BUFFERS
        self._channel.meet(deadline, check)

    def acquire(self, deadline: float, check: Callable[[], None]) -> torch.Tensor:
        """On CUDA the buffer's former contents leave before the next queued operation."""
        check()
        slot = self._count % NUM_BUFFERS
        self._channel.order(self._sent[slot], deadline, self._waits(self._count - NUM_BUFFERS), check)
        return self.buffers[slot]

    def publish(self, num_bytes: int, *, verify: bool) -> None:
        slot = self._count % NUM_BUFFERS
        data = self.buffers[slot][:num_bytes]
        packed = self._channel.mark()
        self._sent[slot] = self._channel.broadcast(data, self._deadline, packed)
        if verify:  # beside the broadcast
            self._digests.finish(data)
        self._verify = verify
        self._count += 1

    def finish(self, deadline: float, check: Callable[[], None]) -> None:
        """Send the digests and wait until all is sent."""
        last: list[Any] = list(self._sent)
        if self._verify:
            last.append(self._channel.broadcast(self._digests.join().view(torch.uint8), deadline, self._channel.mark()))
        for done in last:
            self._channel.wait(done, deadline, self._waits(self._count), check)

    def abort(self, reason: str) -> None:
        self._channel.abort(reason)

    def close(self) -> None:
        self._channel.close()

    def _waits(self, num_buckets: int) -> str:
        return self._to.format(num_buckets)


class GroupReader:
    """One vLLM worker's side of all stages; `reader` is its index among the `num_readers` workers of all replicas."""

    interleaves = lends_memory = False

    def __init__(self, endpoints: tuple[str, ...], reader: int, num_readers: int, device: torch.device) -> None:
        self.endpoints, self._device = endpoints, device
        self._channels = Channels(endpoints, reader, num_readers, device)
        self._buffers: list[torch.Tensor] = []
        self._digests: dict[int, BucketDigests] = {}

    def digests(self, stage: int) -> BucketDigests:
        return self._digests[stage]

    def buckets(
        self, stage: StagePlan, sync_index: int, deadline: float, *, verify: bool
    ) -> Iterator[tuple[Bucket, torch.Tensor]]:
        """The next bucket is on the wire while one is loaded; digests are compared after the last."""
        channel = self._channels.join(stage.index, deadline)
        self._make_buffers(stage.buffer_bytes)
        freed: list[Any] = [channel.mark()] * NUM_BUFFERS  # after they are zeroed

        def take(bucket: Bucket) -> Any:
            data = self._buffers[bucket.index % NUM_BUFFERS][: bucket.num_bytes]
            return channel.broadcast(data, deadline, freed[bucket.index % NUM_BUFFERS])

        digests = self._digests.setdefault(stage.index, BucketDigests(len(stage.buckets), self._device))
        coming = [take(bucket) for bucket in stage.buckets[:1]]
        for bucket in stage.buckets:
            arrived = coming.pop()
            coming = [take(following) for following in stage.buckets[bucket.index + 1 : bucket.index + 2]]
            channel.order(arrived, deadline, f"bucket {bucket.index} of stage {stage.index}")
            data = self._buffers[bucket.index % NUM_BUFFERS][: bucket.num_bytes]
            yield bucket, data
            if verify:
                digests.finish(data)
            freed[bucket.index % NUM_BUFFERS] = channel.mark()
        if verify and stage.buckets:  # adapters may have none in a stage
            self._compare(channel, stage, digests.join(), deadline)
        channel.wait(channel.mark(), deadline, f"the last bucket of stage {stage.index}")

    def _compare(self, channel: Channel, stage: StagePlan, digests: torch.Tensor, deadline: float) -> None:
        theirs, what = torch.empty_like(digests), f"the digests of stage {stage.index}"
        channel.order(channel.broadcast(theirs.view(torch.uint8), deadline, channel.mark()), deadline, what)
        differ = digests != theirs
        channel.wait(channel.mark(), deadline, what)
        wrong = differ.nonzero().flatten().tolist()
        if wrong:
            raise DamagedError(stage, wrong)

    def _make_buffers(self, buffer_bytes: int) -> None:
        """Two for all stages, as large as the largest stage's."""
        if not self._buffers or self._buffers[0].numel() < buffer_bytes:
            self._buffers = []
            self._buffers = [torch.zeros(buffer_bytes, dtype=torch.uint8, device=self._device) for _ in range(NUM_BUFFERS)]

    def abort(self, reason: str) -> None:
        self._channels.abort(reason)

    def close(self) -> None:
        self._channels.close()
        self._buffers = []
