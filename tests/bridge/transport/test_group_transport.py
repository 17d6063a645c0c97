"""Buckets through a process group, over gloo between threads: what arrives, damage, aborts and deadlines. No vLLM, no Ray.

python -m pytest tests/bridge/transport/test_group_transport.py
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch

from bridge.layout.bucket import StagePlan, SyncPlan
from bridge.transport.channel import WATCH_SECONDS, Channel
from bridge.transport.protocol import DamagedError, TransportError
from bridge.transport.nccl import GroupReader, GroupWriter
from bridge.transport.store import ABORT
from tests.support.manifests import make_manifest

CPU = torch.device("cpu")


def stage_of(num_bytes: list[int], bucket_bytes: int) -> StagePlan:
    return SyncPlan(make_manifest([("uint8", [size]) for size in num_bytes]), (len(num_bytes),), bucket_bytes).stages[0]


STAGE = stage_of([4000, 4096, 4096 + 320], 4096)
SIZES = [bucket.num_bytes for bucket in STAGE.buckets]


class Group:
    """A writer of stage 0 and readers in threads of their own, which note what arrives."""

    def __init__(self, num_readers: int = 2) -> None:
        self.writer = GroupWriter(STAGE, num_readers, CPU)
        self.readers = [GroupReader((self.writer.endpoint,), reader, num_readers, CPU) for reader in range(num_readers)]
        self.threads = ThreadPoolExecutor(num_readers)

    def receive(self, seconds: float = 20.0) -> list[Future[list[torch.Tensor]]]:
        def run(reader: GroupReader) -> list[torch.Tensor]:
            try:
                stream = reader.buckets(STAGE, 0, time.monotonic() + seconds, verify=True)
                return [data.clone() for _, data in stream]
            except RuntimeError as error:
                reader.abort(f"a reader: {error}")
                raise

        return [self.threads.submit(run, reader) for reader in self.readers]

    def send(self, seconds: float = 20.0, damage: int = -1, stop_at: int = -1) -> list[torch.Tensor]:
        sent, deadline = [], time.monotonic() + seconds
        self.writer.start(deadline, lambda: None)
        for index, size in enumerate(SIZES):
            if index == stop_at:
                return sent
            data = self.writer.acquire(deadline, lambda: None)[:size]
            data.copy_(torch.randint(0, 256, (size,), dtype=torch.uint8))
            sent.append(data.clone())
            self.writer.publish(size, verify=True)
            if index == damage:
                self.writer.digests._sums[index] ^= 1
        self.writer.finish(deadline, lambda: None)
        return sent

    def close(self) -> None:
        self.writer.close()
        for reader in self.readers:
            reader.close()
        self.threads.shutdown()


@pytest.fixture
def group():
    made = Group()
    yield made
    made.close()


def test_all_buckets_arrive_time_after_time(group) -> None:
    for _ in range(4):
        futures = group.receive()
        sent = group.send()
        for future in futures:
            assert all(torch.equal(a, b) for a, b in zip(future.result(120), sent, strict=True))


def test_damage_is_found_at_the_end_and_named(group) -> None:
    futures = group.receive()
    with suppress(TransportError):  # it may hear of it before it ends
        group.send(damage=2)
    reported = []
    for future in futures:  # one finds it, the other one finds it too or hears of it
        with pytest.raises(TransportError, match=r"bucket 2 of \d of stage 0 \(.*\) arrived damaged") as caught:
            future.result(120)
        reported.append(caught.type)
    assert DamagedError in reported


def test_a_reader_that_fails_stops_the_sender_and_the_other_readers() -> None:
    group = Group()
    group.readers[1].buckets = lambda *args, **kwargs: iter(_raise())  # type: ignore[method-assign]
    futures = group.receive()
    with pytest.raises(TransportError, match="aborted: a reader: out of memory"):
        group.send()
    with pytest.raises(TransportError, match="aborted: a reader: out of memory"):
        futures[0].result(120)
    group.close()


def _raise():
    raise RuntimeError("out of memory")
    yield


def test_a_sender_that_fails_stops_the_readers(group) -> None:
    futures = group.receive()
    group.send(stop_at=3)
    time.sleep(0.2)
    group.writer.abort("the weight source failed")
    for future in futures:
        with pytest.raises(TransportError, match="the weight source failed"):
            future.result(120)


def test_deadlines_name_who_waits_for_what(group) -> None:
    with pytest.raises(TransportError, match="deadline passed: waits for members of the group to join"):
        group.send(seconds=0.5)


def test_a_reader_names_the_bucket_that_is_late(group) -> None:
    futures = group.receive(seconds=2.0)
    group.send(stop_at=2)
    for future in futures:
        with pytest.raises(TransportError, match=r"deadline passed: waits for bucket 2 of stage 0|aborted: a reader"):
            future.result(120)


def test_nobody_listens() -> None:
    reader = GroupReader(("tcp://127.0.0.1:9",), 0, 1, CPU)
    with pytest.raises((TransportError, RuntimeError), match=r"cannot reach the sender|timed out|refused"):
        next(reader.buckets(stage_of([1], 64), 0, time.monotonic() + 1, verify=False))


class UnderWay:
    """Stands for a CUDA group with a broadcast whose other side is gone: it is over once the group is ended."""

    def __init__(self) -> None:
        self.ended = threading.Event()

    def abort(self) -> None:
        self.ended.set()

    def query(self) -> bool:
        return self.ended.is_set()


@pytest.mark.parametrize(
    ("aborts", "deadline", "reported"),
    [(True, 60.0, "aborted: a reader died"), (False, -60.0, "deadline passed: waits for the others")],
)
def test_what_waits_in_a_call_is_freed_and_nothing_is_taken_for_arrived(aborts: bool, deadline: float, reported: str) -> None:
    """On GPUs a call can wait where a kernel is loaded behind a broadcast that never ends; nobody looks for aborts then."""
    channel, _ = Channel.listen(1, CPU)
    channel.others, channel.stream, under_way = "the others", UnderWay(), UnderWay()
    channel._deadline = time.monotonic() + deadline
    channel._under_way.append(under_way)
    watch = threading.Thread(target=channel._watch, args=(under_way,))
    watch.start()
    time.sleep(2 * WATCH_SECONDS)
    if aborts:
        assert not under_way.ended.is_set()
        channel.publish(ABORT, b"a reader died")
    assert under_way.ended.wait(60)
    with pytest.raises(TransportError, match=reported):
        channel.wait(under_way, time.monotonic() + 60, "a broadcast")
    watch.join()


def test_a_group_that_was_left_is_not_watched() -> None:
    channel, _ = Channel.listen(1, CPU)
    watch = threading.Thread(target=channel._watch, args=(UnderWay(),))
    watch.start()
    channel.close()
    watch.join(60)
    assert not watch.is_alive()


@pytest.mark.gpu(2)
def test_buckets_arrive_between_two_gpus() -> None:
    """NCCL, in threads of one process; needs 2 devices."""
    size, devices = 2**24, [torch.device("cuda", index) for index in range(2)]
    stage = stage_of([size] * 3, size)
    writer = GroupWriter(stage, 1, devices[0])
    reader = GroupReader((writer.endpoint,), 0, 1, devices[1])
    got: list[torch.Tensor] = []

    def receive() -> None:
        torch.cuda.set_device(1)
        got.extend(data.clone() for _, data in reader.buckets(stage, 0, time.monotonic() + 60, verify=True))

    thread = threading.Thread(target=receive)
    thread.start()
    torch.cuda.set_device(0)
    sent, deadline = [], time.monotonic() + 60
    writer.start(deadline, lambda: None)
    for _ in range(3):
        data = writer.acquire(deadline, lambda: None)
        data.copy_(torch.randint(0, 256, (size,), dtype=torch.uint8, device=devices[0]))
        sent.append(data.clone())
        writer.publish(size, verify=True)
    writer.finish(deadline, lambda: None)
    thread.join(60)
    assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(got, sent, strict=True)) and len(got) == 3
    writer.close()
    reader.close()
