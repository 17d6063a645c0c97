"""Segments of shared memory, as readers and writers have them. No vLLM, no Ray.

python -m pytest tests/bridge/transport/test_segment.py
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from bridge.transport.protocol import TransportError
from bridge.transport.open import abort_endpoints, open_reader
from bridge.transport.segment import FOLDER, PREFIX, Segment
from bridge.transport.shm import ShmReader, ShmWriter
from tests.support.manifests import make_manifest, soon, stage_of

CPU = torch.device("cpu")
TWO = ["replica 0 worker 0", "replica 1 worker 0"]




BUCKETS = stage_of(make_manifest([("uint8", [256 * 50])]), 256)  # 50 of 256 bytes


@pytest.fixture
def writer():
    made = ShmWriter(BUCKETS, TWO, range(2))
    yield made
    made.close()




def test_two_readers_get_all_buckets_in_order(writer) -> None:
    """Two passes."""
    got: list[list[int]] = [[], []]

    def read(reader: int) -> None:
        mapped = ShmReader((writer.endpoint,), reader, CPU)
        for index in range(2):
            got[reader] += [int(data[0]) for _, data in mapped.buckets(BUCKETS, index, soon(), verify=True)]
        mapped.close()

    threads = [threading.Thread(target=read, args=(reader,)) for reader in range(2)]
    for thread in threads:
        thread.start()
    for value in range(100):
        writer.acquire(soon(), lambda: None).fill_(value)
        writer.publish(256, verify=True)
    for thread in threads:
        thread.join()
    assert got == [list(range(100))] * 2


def test_damage_deadline_and_abort(writer) -> None:
    reader = ShmReader((writer.endpoint,), 0, CPU)
    writer.acquire(soon(), lambda: None).fill_(1)
    writer.publish(256, verify=True)
    writer.buffers[0][17] ^= 4
    with pytest.raises(TransportError, match=r"bucket 0 of 50 of stage 0 \(t0\) arrived damaged"):
        next(reader.buckets(BUCKETS, 0, soon(), verify=True))
    with pytest.raises(TransportError, match="holds 256 bytes"):
        reader.read(0, 0, 128, soon(), verify=True)
    with pytest.raises(TransportError, match="buffers and bucket size do not fit"):
        next(reader.buckets(stage_of(BUCKETS.manifest, 128), 0, soon(), verify=True))
    reader.read(0, 0, 256, soon(), verify=False)
    reader.release(0)
    with pytest.raises(TransportError, match="waits for the sender of stage 0, which sent no bucket 1"):
        reader.read(0, 1, 256, soon(0.05), verify=True)
    writer.acquire(soon(), lambda: None)
    writer.publish(256, verify=True)
    late = r"sender of stage 0 waits until 1 buckets are read; replica 1 worker 0 has read 0, next is bucket 0 of 50 of stage 0"
    with pytest.raises(TransportError, match=late):
        writer.acquire(soon(0.05), lambda: None)
    reader.abort("replica 0 worker 0: no more")
    reader.abort("a later reason")
    with pytest.raises(TransportError, match="no more"):
        writer.acquire(soon(), lambda: None)


def test_too_little_shared_memory_is_said() -> None:
    with pytest.raises(ValueError, match=r"lower sync.bucket_bytes"):
        Segment.create(2**50, 1)


SENDER = """
import os, signal, sys, torch
from bridge.layout.bucket import SyncPlan
from bridge.layout.manifest import Manifest, TensorSpec
from bridge.transport.open import open_writer
plan = SyncPlan(Manifest((TensorSpec("t", "uint8", (100,)),)), (1,), 64)
writer = open_writer(sys.argv[1], plan.stages[0], ["r"], [0])
writer.acquire(2e10, lambda: None).fill_(7)
writer.publish(64, verify=True)
print(writer.endpoint, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("transport", ["shm", "ipc"])
def test_a_killed_sender_leaves_nothing_in_shared_memory(transport) -> None:
    """What is mapped stays readable for those who have it."""
    before = set(FOLDER.iterdir())
    command = [sys.executable, "-c", SENDER, transport]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as sender:
        assert sender.stdout is not None
        endpoint = sender.stdout.readline().strip()
        reader = open_reader((endpoint,), 0, 1, CPU)
        sender.kill()
    stage = stage_of(make_manifest([("uint8", [100])]), 64)
    _, data = next(reader.buckets(stage, 0, soon(), verify=True))
    assert data.tolist() == [7] * 64
    reader.close()
    assert {path for path in set(FOLDER.iterdir()) - before if path.name.startswith(f"{PREFIX}{sender.pid}-")} == set()
    with pytest.raises(TransportError, match="cannot map the sender's shared memory"):
        open_reader((endpoint,), 0, 1, CPU)


def test_a_sync_can_be_left_when_its_segment_is_gone(writer) -> None:
    reader = open_reader((writer.endpoint,), 0, 2, CPU)
    abort_endpoints([writer.endpoint], "no more")
    with pytest.raises(TransportError, match="no more"):
        next(reader.buckets(BUCKETS, 0, soon(), verify=True))
    reader.close()
    abort_endpoints([f"shm:/proc/{os.getpid()}/fd/999999"], "its creator was faster")


@pytest.mark.parametrize("num_bytes", [0, 13, 9001])
def test_a_path_that_is_another_files_by_now_is_left_alone(num_bytes: int, tmp_path: Path) -> None:
    """A descriptor's number is given out again, once its segment was closed."""
    other = tmp_path / "other"
    other.write_bytes(b"x" * num_bytes)
    abort_endpoints([f"shm:{other}#0"], "its creator has closed it")
    with pytest.raises(TransportError):
        open_reader((f"shm:{other}#0",), 0, 1, CPU)
    assert other.read_bytes() == b"x" * num_bytes


# One pass over a source.
