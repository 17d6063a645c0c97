"""Buckets through memory that two processes map: handles, protocol, what is left behind. CPU memory stands for a GPU's."""

from __future__ import annotations

import multiprocessing
import os
import time
from typing import Any

import pytest
import torch

from bridge.layout.bucket import SyncPlan
from bridge.transport.protocol import DamagedError, TransportError
from bridge.transport.ipc import IpcReader, IpcWriter
from bridge.transport.segment import FOLDER, PREFIX
from tests.support.manifests import make_manifest

CPU = torch.device("cpu")
NUM_BUCKETS, NUM_BYTES = 5, 9984
STAGE = SyncPlan(make_manifest([("uint8", [NUM_BYTES])] * NUM_BUCKETS), (NUM_BUCKETS,), NUM_BYTES).stages[0]


def bucket(index: int) -> torch.Tensor:
    return torch.arange(NUM_BYTES).add(index).to(torch.uint8)


def read_all(endpoint: str, answers: Any) -> None:
    """Another process: whether each bucket is what was sent."""
    reader = IpcReader((endpoint,), 0, CPU)
    for each, data in reader.buckets(STAGE, 0, time.monotonic() + 60, verify=True):
        answers.put(torch.equal(data, bucket(each.index)))
    reader.close()


def test_another_process_reads_what_was_sent() -> None:
    writer = IpcWriter(STAGE, ["replica 0 worker 0"], [0], CPU)
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    process = context.Process(target=read_all, args=(writer.endpoint, answers))
    process.start()
    try:
        for index in range(NUM_BUCKETS):
            writer.acquire(time.monotonic() + 60, lambda: None).copy_(bucket(index))
            writer.publish(NUM_BYTES, verify=True)
        writer.finish(time.monotonic() + 60, lambda: None)
        assert [answers.get(timeout=60) for _ in range(NUM_BUCKETS)] == [True] * NUM_BUCKETS
    finally:
        process.join(120)
        process.kill()
        writer.close()
    assert process.exitcode == 0
    assert list(FOLDER.glob(f"{PREFIX}{os.getpid()}-*")) == []


def test_a_damaged_bucket_and_an_abort_are_found() -> None:
    writer = IpcWriter(STAGE, ["replica 0 worker 0"], [0], CPU)
    reader = IpcReader((writer.endpoint,), 0, CPU)
    try:
        buffer = writer.acquire(time.monotonic() + 60, lambda: None)
        buffer.copy_(bucket(0))
        writer.publish(NUM_BYTES, verify=True)
        writer.acquire(time.monotonic() + 60, lambda: None).copy_(bucket(1))
        writer.publish(NUM_BYTES, verify=True)
        assert torch.equal(reader.read(0, 0, NUM_BYTES, time.monotonic() + 60, verify=True), bucket(0))
        reader.release(0)
        reader.read(0, 1, NUM_BYTES, time.monotonic() + 60, verify=True)
        writer.buffers[1][17] += 1
        reader.release(0)
        with pytest.raises(TransportError, match="waits for the digests of stage 0"):
            reader.finish(STAGE, 2, time.monotonic() + 0.2)
        writer.finish(time.monotonic() + 60, lambda: None)
        with pytest.raises(DamagedError) as caught:
            reader.finish(STAGE, 2, time.monotonic() + 60)
        assert caught.value.buckets == [1] and "bucket 1 of 5 of stage 0 (t1) arrived damaged" in str(caught.value)
        reader.abort("the reader gives up")
        with pytest.raises(TransportError, match="the reader gives up"):
            writer.acquire(time.monotonic() + 60, lambda: None)
    finally:
        reader.close()
        writer.close()
