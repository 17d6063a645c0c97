"""Buckets on two lanes, over gloo between processes on the loopback: from host to host, on inside of one, damaged, cut off.

python -m pytest tests/bridge/transport/test_lane_transport.py
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from bridge.layout.bucket import SyncPlan
from bridge.layout.lanes import Holder, plan_lanes
from bridge.send.sender import StageSender
from bridge.transport.lanes import LaneReader, LaneWriter
from tests.bridge.transport.lane_cases import BUCKET_BYTES, CPU, NAMES, SECONDS, Lanes, expected
from tests.support.sources import DictSource

BOTH_DEVICES = pytest.mark.parametrize(
    ("num_readers", "device"), [(3, "cpu"), pytest.param(2, "cuda", marks=pytest.mark.gpu(2))]
)


@pytest.fixture
def lanes() -> Iterator[Lanes]:
    made = Lanes()
    yield made
    made.close()


@BOTH_DEVICES
def test_all_readers_get_all_of_it_time_after_time_and_find_damage_on_every_way(num_readers: int, device: str) -> None:
    """Each reader is the first one of a lane, behind another host, or behind another reader of its own host; on two GPUs each
    brings the other one, by NCCL, what it passes on, by CUDA IPC.
    """
    lanes = Lanes(num_readers, device)
    try:
        for index in range(3):
            lanes.sync(10 + index, index)
            assert lanes.results() == [expected(10 + index)] * num_readers
            assert [pipe.recv() for pipe in lanes.senders] == [None, None]
        lanes.sync(20, 3, damaged=(-1, 2))
        seen = lanes.results()
        assert all("bucket 5 of" in text and "arrived damaged" in text for text in seen), seen
    finally:
        lanes.close()


def test_a_lane_without_buckets_has_no_digests_to_wait_for() -> None:
    """One bucket, two lanes."""
    tensors = {"t": torch.randn(16)}
    plan = plan_lanes([Holder(0, 0, "a"), Holder(1, 0, "b")], ["c", "d"], NAMES[:2], links=1)
    (stage,) = SyncPlan(DictSource(tensors).manifest(), (1,), BUCKET_BYTES).stages
    stages = [stage.lane(lane.buckets(stage.num_buckets)) for lane in plan.lanes]
    assert [len(each.buckets) for each in stages] == [1, 0]
    writers = [LaneWriter(own, lane, plan, CPU) for own, lane in zip(stages, plan.lanes, strict=True)]
    senders = [StageSender(DictSource(tensors), own, writer) for own, writer in zip(stages, writers, strict=True)]
    readers = [LaneReader(tuple(writer.endpoint for writer in writers), index, plan, CPU) for index in range(2)]

    def read(reader: LaneReader, index: int) -> list[bytes]:
        stream = reader.buckets(stage, index, time.monotonic() + SECONDS, verify=True)
        return [data[: tensors["t"].nbytes].numpy().tobytes() for _, data in stream]

    with ThreadPoolExecutor(4) as threads:
        for index in range(2):
            sent = [threads.submit(sender.run, time.monotonic() + SECONDS, lambda: None, "digest") for sender in senders]
            came = [threads.submit(read, reader, index) for reader in readers]
            assert [each.result().problem for each in sent] == [None, None]
            assert [each.result() for each in came] == [[tensors["t"].numpy().tobytes()]] * 2
    for reader in readers:
        reader.close()
    for writer in writers:
        writer.close()


def test_a_sender_that_is_killed_is_named(lanes: Lanes) -> None:
    lanes.sync(10, 0, seconds=0.3)
    lanes.kill(1)
    seen = lanes.results()
    assert all("lane 1 of 2 of stage 0, from trainer rank 1" in text for text in seen), seen


@BOTH_DEVICES
def test_a_reader_that_is_killed_is_named_by_who_sends_to_it_and_who_waits_behind_it(num_readers: int, device: str) -> None:
    """Reader 0 has lane 0 first, before all others."""
    lanes = Lanes(num_readers, device)
    try:
        lanes.sync(10, 0, seconds=0.3)
        lanes.kill(2)
        seen = lanes.results([1, 2][: num_readers - 1])
        assert any("replica 0 worker 0" in text for text in seen), seen
        assert all("replica 0 worker 0" in text or "lane 0 of 2 of stage 0, from trainer rank 0" in text for text in seen), seen
        assert "replica 0 worker 0" in lanes.reported(0)
    finally:
        lanes.close()
