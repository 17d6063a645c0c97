"""Segments of shared memory, and one pass over a source of weights into them. No vLLM, no Ray.

python -m pytest tests/test_stream_units.py
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge.layout.bucket import ALIGNMENT_BYTES, buffer_bytes, plan_buckets
from bridge.config import SyncConfig
from bridge.send.connection import Giver, assign_readers
from bridge.layout.digest import as_bytes
from bridge.layout.manifest import ITEM_BYTES, Manifest, TensorSpec
from bridge.messages import SyncError
from bridge.send.publish import Publisher
from bridge.send.sender import StageStream
from bridge.transport.errors import TransportError
from bridge.transport.segment import FOLDER, PREFIX, Segment, abort_segment, sweep_stale_segments
from bridge.transport.shm import ShmReader, ShmWriter
from tests.manifests import SPECS


# Shared memory.


@pytest.fixture
def segment():
    made = Segment.create(f"test-{time.monotonic_ns()}", 256, 2)
    yield made
    made.close()
    assert not made.path.exists()


def soon(seconds: float = 10.0) -> float:
    return time.time() + seconds


def test_two_readers_get_all_buckets_in_order(segment) -> None:
    writer = ShmWriter(segment, 0, ["replica 0 worker 0", "replica 1 worker 0"])
    got: list[list[int]] = [[], []]

    def read(reader: int) -> None:
        mapped = ShmReader((str(segment.path),), reader)
        for sequence in range(50):
            data = mapped.read(0, sequence, 256, soon(), verify=True)
            got[reader].append(int(data[0]))
            mapped.release(0)
        mapped.close()

    threads = [threading.Thread(target=read, args=(reader,)) for reader in range(2)]
    for thread in threads:
        thread.start()
    for value in range(50):
        writer.acquire(soon(), lambda: None).fill_(value)
        writer.publish(256, verify=True)
    for thread in threads:
        thread.join()
    assert got == [list(range(50))] * 2


def test_damage_deadline_and_abort(segment) -> None:
    writer = ShmWriter(segment, 3, ["replica 0 worker 0", "replica 1 worker 0"])
    reader = ShmReader((str(segment.path),), 0)
    writer.acquire(soon(), lambda: None).fill_(1)
    writer.publish(256, verify=True)
    segment.buffers[0][17] ^= 4
    with pytest.raises(TransportError, match="damaged"):
        reader.read(0, 0, 256, soon(), verify=True)
    with pytest.raises(TransportError, match="holds 256 bytes"):
        reader.read(0, 0, 128, soon(), verify=True)
    reader.read(0, 0, 256, soon(), verify=False)
    reader.release(0)
    with pytest.raises(TransportError, match="waits for the sender of stage 0, which sent no bucket 1"):
        reader.read(0, 1, 256, soon(0.05), verify=True)
    writer.acquire(soon(), lambda: None)
    writer.publish(256, verify=True)
    late = "sender of stage 3 waits until 1 buckets are read; replica 1 worker 0 has read 0$"
    with pytest.raises(TransportError, match=late):
        writer.acquire(soon(0.05), lambda: None)
    reader.abort("replica 0 worker 0: no more")
    reader.abort("a later reason")
    with pytest.raises(TransportError, match="no more"):
        writer.acquire(soon(), lambda: None)


def test_too_little_shared_memory_is_said() -> None:
    with pytest.raises(ValueError, match=r"lower sync.bucket_bytes"):
        Segment.create(f"test-{time.monotonic_ns()}", 2**50, 1)
    assert not list(FOLDER.glob(f"{PREFIX}{os.getpid()}-test-*"))


def test_a_crashed_process_leaves_nothing_after_a_sweep() -> None:
    script = (
        "import os, signal; from bridge.transport.segment import Segment; s = Segment.create('crash', 64, 1);"
        "print(s.path, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    output = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False).stdout
    path = Path(output.strip())
    assert path.exists()
    alive = Segment.create("alive", 64, 1)
    assert path in sweep_stale_segments()
    assert not path.exists()
    assert alive.path.exists()
    alive.close()


def test_whoever_leaves_a_sync_may_find_a_segment_gone(segment) -> None:
    reader = ShmReader((str(segment.path),), 0)
    abort_segment(segment.path, "no more")
    with pytest.raises(TransportError, match="no more"):
        reader.read(0, 0, 256, soon(), verify=True)
    reader.close()
    abort_segment(segment.path.with_name(f"{PREFIX}gone"), "its creator was faster")


# One pass over a source.


class DictSource:
    """A stage's tensors from a dict."""

    stage, num_stages, is_sender, gives = 0, 1, True, True

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors, self.iterated = tensors, 0

    def manifest(self) -> Manifest:
        return Manifest(
            tuple(TensorSpec(n, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for n, t in self.tensors.items())
        )

    def __iter__(self):
        for name, tensor in self.tensors.items():
            self.iterated += 1
            yield name, tensor

    def parts(self) -> None:
        return None


def test_a_misspelt_verification_starts_nothing() -> None:
    source = DictSource({"t": torch.zeros(3)})
    with pytest.raises(ValueError, match=r"verify\n.*'none', 'digest' or 'readback'.*'digset'"):
        SyncConfig(verify="digset")
    with pytest.raises(ValueError, match=r"sync\.verify is digset; choose none, digest or readback"):
        Publisher(source, object(), SyncConfig()).publish(1, verify="digset")
    assert source.iterated == 0


class LostPool:
    """Replicas of which neither a sync nor the way out of it hears."""

    reader_names = ("replica 0 worker 0",)

    def pause(self) -> None:
        raise RuntimeError("the replicas do not answer")

    def abort(self, reason: str, timeout: float) -> list[int]:
        raise ConnectionError("Ray is gone")


def test_an_error_on_leaving_a_sync_is_told_and_hides_nothing() -> None:
    publisher = Publisher(DictSource({"t": torch.zeros(3)}), LostPool(), SyncConfig(transport="shm"))
    with pytest.raises(SyncError, match=r"the replicas do not answer.*rank 0: on leaving the sync: ConnectionError: Ray is"):
        publisher.publish(1)
    assert not list(FOLDER.glob(f"{PREFIX}{os.getpid()}-0-*"))


@settings(deadline=None, max_examples=30)
@given(SPECS.filter(len), st.integers(ALIGNMENT_BYTES, 4000))
def test_a_stream_arrives_bit_for_bit(specs, bucket_bytes) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for i, (dtype, shape) in enumerate(specs):
        raw = torch.randint(0, 255, (*shape, ITEM_BYTES[dtype]), generator=generator, dtype=torch.uint8)
        tensors[f"t{i}"] = raw.view(getattr(torch, dtype)).squeeze(-1)
    source = DictSource(tensors)
    manifest = source.manifest()
    made = Segment.create(f"test-{time.monotonic_ns()}", buffer_bytes(manifest, bucket_bytes), 1)
    stream = StageStream(source, manifest, bucket_bytes, ShmWriter(made, 0, ["r"]), verify="readback")
    received: dict[int, bytearray] = {i: bytearray(s.num_bytes) for i, s in enumerate(manifest.tensors)}

    def read() -> None:
        reader = ShmReader((str(made.path),), 0)
        for bucket in plan_buckets(manifest, bucket_bytes):
            data = reader.read(0, bucket.index, bucket.num_bytes, soon(), verify=True)
            for p in bucket.pieces:
                part = data[p.bucket_offset : p.bucket_offset + p.num_bytes].numpy().tobytes()
                received[p.tensor][p.tensor_offset : p.tensor_offset + p.num_bytes] = part
            reader.release(0)

    thread = threading.Thread(target=read)
    thread.start()
    result = stream.run(soon(), lambda: None)
    thread.join()
    made.close()
    assert result.problem is None
    assert len(result.digests) == len(specs)
    for index, tensor in enumerate(tensors.values()):
        assert bytes(received[index]) == as_bytes(tensor).numpy().tobytes()


def test_a_source_is_drained_after_an_error(segment) -> None:
    source = DictSource({f"t{i}": torch.full((64,), float(i)) for i in range(20)})
    stream = StageStream(source, source.manifest(), 256, ShmWriter(segment, 0, ["a", "b"]), verify="digest")
    segment.abort("replica 1 worker 0: no memory")
    result = stream.run(soon(), lambda: None)
    assert "no memory" in result.problem
    assert source.iterated == 20


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"a": torch.zeros(4), "x": torch.zeros(4)}, "gave x float32"),
        ({"a": torch.zeros(4)}, "ended before b"),
        ({"a": torch.zeros(4), "b": torch.zeros(5)}, r"gave b float32\[5\] where its manifest has b float32\[4\]"),
        ({"a": torch.zeros(4), "b": torch.zeros(4), "c": torch.zeros(1)}, "gave c, which its manifest lacks"),
    ],
)
def test_a_source_that_breaks_its_manifest_is_named(segment, tensors, message) -> None:
    manifest = DictSource({"a": torch.zeros(4), "b": torch.zeros(4)}).manifest()
    stream = StageStream(DictSource(tensors), manifest, 256, ShmWriter(segment, 0, ["a", "b"]), verify="digest")
    problem = stream.run(soon(), lambda: None).problem
    with pytest.raises(RuntimeError, match=message):
        raise RuntimeError(problem)


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 9), st.booleans(), st.booleans())
def test_each_reader_has_one_rank_for_each_stage(num_stages, width, num_readers, spread, everywhere) -> None:
    """`width` ranks a stage, the first of which is its sender."""
    givers = [Giver(rank // width, rank % width == 0, everywhere or rank % width == 0) for rank in range(num_stages * width)]
    shared = assign_readers(givers, num_readers, spread=spread)
    assert all(shared.values()) and (spread or all(givers[rank].is_sender for rank in shared))
    served = sorted((givers[rank].stage, reader) for rank, readers in shared.items() for reader in readers)
    assert served == [(stage, reader) for stage in range(num_stages) for reader in range(num_readers)]
    if spread and everywhere:
        assert all(reader in shared[reader] for reader in range(min(num_readers, len(givers))))
