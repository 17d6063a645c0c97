"""Two senders and two or three readers of lanes, processes on the loopback; hosts are made up. For test_lane_transport.py.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import torch

from bridge.export.source import Part
from bridge.layout.bucket import SyncPlan
from bridge.layout.digest import digest_bytes
from bridge.layout.lanes import Holder, LanePlan, plan_lanes
from bridge.send.sender import StageSender
from bridge.transport.lanes import LaneReader, LaneWriter
from tests.support.ranks import process_context
from tests.support.sources import DictSource

CPU = torch.device("cpu")
NAMES = ["replica 0 worker 0", "replica 0 worker 1", "replica 1 worker 0"]
SECONDS = 30.0
BUCKET_BYTES = 4096


def plan(num_readers: int) -> LanePlan:
    """Lane 0 goes to reader 0, lane 1 to reader 1, both on one host, and from there to reader 2 on another, if there is one."""
    made = plan_lanes([Holder(0, 0, "a"), Holder(1, 0, "b")], ["c", "c", "d"][:num_readers], NAMES[:num_readers], links=1)
    assert [lane.route for lane in made.lanes] == [(0, 2)[: num_readers - 1], (1, 2)[: num_readers - 1]]
    return made


def use(device: torch.device) -> torch.device:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


class SlowSource(DictSource):
    """With so many seconds between its parts."""

    seconds = 0.0

    def parts(self) -> Iterator[Part]:
        for part in super().parts():
            time.sleep(self.seconds)
            yield part


def source(version: int) -> SlowSource:
    generator = torch.Generator().manual_seed(version)
    return SlowSource({f"t{i}": torch.randn(300 + 61 * i, generator=generator) for i in range(30)})


def sync_plan() -> SyncPlan:
    manifest = source(0).manifest()
    return SyncPlan(manifest, (len(manifest.tensors),), BUCKET_BYTES)


def expected(version: int) -> list[int]:
    """The digest of each tensor."""
    return [digest_bytes(tensor.view(torch.uint8)) for tensor in source(version).tensors.values()]


class DamagingWriter(LaneWriter):
    """It tells a wrong digest of bucket `damaged`, counted in the lane."""

    damaged = -1

    def publish(self, num_bytes: int, *, verify: bool) -> None:
        super().publish(num_bytes, verify=verify)
        if self._count == self.damaged + 1:
            self._digests._sums[self.damaged] ^= 1


def send(pipe: Connection, rank: int, num_readers: int, device: torch.device) -> None:
    """For each (version, seconds between parts, bucket that is damaged) a pass; says what went wrong."""
    lane, stage = plan(num_readers).lanes[rank], sync_plan().stages[0]
    stage = stage.lane(lane.buckets(stage.num_buckets))
    writer = DamagingWriter(stage, lane, plan(num_readers), use(device))
    pipe.send(writer.endpoint)
    slow = source(0)
    sender = StageSender(slow, stage, writer)
    while (call := pipe.recv()) is not None:
        version, slow.seconds, writer.damaged = call
        slow.tensors = {name: tensor.to(device) for name, tensor in source(version).tensors.items()}
        pipe.send(sender.run(time.monotonic() + SECONDS, lambda: None, "digest").problem)
    writer.close()


def read(pipe: Connection, index: int, num_readers: int, device: torch.device, endpoints: tuple[str, ...]) -> None:
    """For each number of a pass the digests of the tensors that came, or what went wrong; tells of its third bucket."""
    reader, stage = LaneReader(endpoints, index, plan(num_readers), use(device)), sync_plan().stages[0]
    while (sync_index := pipe.recv()) is not None:
        came = [bytearray(spec.num_bytes) for spec in stage.manifest.tensors]
        try:
            for bucket, data in reader.buckets(stage, sync_index, time.monotonic() + SECONDS, verify=True):
                for piece in bucket.pieces:
                    part = data[piece.bucket_offset : piece.bucket_offset + piece.num_bytes].cpu().numpy().tobytes()
                    came[piece.tensor][piece.tensor_offset : piece.tensor_offset + piece.num_bytes] = part
                if bucket.index == 2:
                    pipe.send("under way")
        except RuntimeError as error:
            reader.abort(f"{NAMES[index]}: {error}")
            pipe.send(str(error))
            return
        pipe.send([digest_bytes(torch.frombuffer(each, dtype=torch.uint8)) for each in came])
    reader.close()


class Lanes:
    """All processes, and a pipe to each; on two GPUs each of the two lanes goes from one to the other."""

    def __init__(self, num_readers: int = 3, device: str = "cpu") -> None:
        self.processes: list[Any] = []
        self.num_readers = num_readers
        devices = [torch.device(device, index) if device == "cuda" else CPU for index in range(2)]
        self.senders = [self._start(send, rank, num_readers, devices[rank]) for rank in range(2)]
        endpoints = tuple(pipe.recv() for pipe in self.senders)
        self.readers = [
            self._start(read, index, num_readers, devices[(index + 1) % 2], endpoints) for index in range(num_readers)
        ]

    def _start(self, target: Any, *arguments: Any) -> Connection:
        context = process_context()
        ours, theirs = context.Pipe()
        self.processes.append(context.Process(target=target, args=(theirs, *arguments)))
        self.processes[-1].start()
        theirs.close()
        return ours

    def sync(self, version: int, sync_index: int, seconds: float = 0.0, damaged: tuple[int, int] = (-1, -1)) -> None:
        """Begin a pass; `damaged`: of each lane the bucket, counted in the lane, whose digest is wrong."""
        for pipe in self.readers:
            pipe.send(sync_index)
        for pipe, bucket in zip(self.senders, damaged, strict=True):
            pipe.send((version, seconds, bucket))

    def results(self, who: list[int] | None = None) -> list[Any]:
        """Of these readers, once they are through."""
        found = []
        for index in range(self.num_readers) if who is None else who:
            reported = self.readers[index].recv() if self.readers[index].poll(SECONDS + 10) else "no answer"
            found.append(self.readers[index].recv() if reported == "under way" else reported)
        return found

    def reported(self, rank: int) -> str:
        """What went wrong for this sender, once its pass is over."""
        return str(self.senders[rank].recv()) if self.senders[rank].poll(SECONDS + 10) else "no answer"

    def kill(self, number: int) -> None:
        """The senders are 0 and 1, the readers 2 to 4; once reader 0 has had two buckets."""
        assert self.readers[0].recv() == "under way"
        self.processes[number].kill()

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


