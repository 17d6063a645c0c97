"""Buckets as what changed in them, over gloo between threads: what travels, readers that come late, logs that are torn, damage.

python -m pytest tests/bridge/transport/test_delta_transport.py
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge.layout.bucket import ALIGNMENT_BYTES, StagePlan, SyncPlan
from bridge.layout.manifest import ITEM_BYTES
from bridge.send.sender import StageSender
from bridge.transport import delta as transport
from bridge.transport.delta import DeltaReader, DeltaWriter, Store, decode, encode, from_log
from bridge.transport.protocol import Reader, TransportError
from bridge.transport.open import open_reader, open_writer
from bridge.versions.file import path_of
from bridge.versions.writer import VersionWriter
from tests.support.manifests import SPECS as SPECS_OF_ANY
from tests.support.manifests import make_manifest
from tests.support.sources import DictSource

CPU = torch.device("cpu")
SPECS: list[tuple[str, list[int]]] = [("bfloat16", [300, 7]), ("float32", [50]), ("bfloat16", [4000]), ("uint8", [33])]
STAGE = SyncPlan(make_manifest(SPECS), (len(SPECS),), 4096).stages[0]
NAMES = [spec.name for spec in STAGE.manifest.tensors]
Weights = dict[str, torch.Tensor]


def weights(version: int) -> Weights:
    """Of which few elements change from one version to the next."""
    generator = torch.Generator().manual_seed(0)
    found = {name: torch.randn(shape, generator=generator) for name, (_, shape) in zip(NAMES, SPECS, strict=True)}
    for number in range(version):
        for tensor in found.values():
            tensor.view(-1)[number :: tensor.numel() // 3] += 1
    kinds = zip(NAMES, SPECS, strict=True)
    return {name: (100 * found[name].abs()).to(getattr(torch, dtype)) for name, (dtype, _) in kinds}


def buckets_of(version: int) -> list[torch.Tensor]:
    flat = [tensor.view(-1).view(torch.uint8) for tensor in weights(version).values()]
    found = []
    for bucket in STAGE.buckets:
        data = torch.full((bucket.num_bytes,), 7, dtype=torch.uint8)  # between tensors there is rubbish
        for piece in bucket.pieces:
            part = flat[piece.tensor][piece.tensor_offset : piece.tensor_offset + piece.num_bytes]
            data[piece.bucket_offset : piece.bucket_offset + piece.num_bytes] = part
        found.append(data)
    return found


def tensors_of(buckets: Sequence[torch.Tensor]) -> Weights:
    flat = {spec.name: torch.zeros(spec.num_bytes, dtype=torch.uint8) for spec in STAGE.manifest.tensors}
    for data, bucket in zip(buckets, STAGE.buckets, strict=True):
        for piece in bucket.pieces:
            part = data[piece.bucket_offset : piece.bucket_offset + piece.num_bytes]
            flat[NAMES[piece.tensor]][piece.tensor_offset : piece.tensor_offset + piece.num_bytes] = part
    return {name: flat[name].view(tensor.dtype).view(tensor.shape) for name, tensor in weights(0).items()}


class Link:
    """A connection of a sender and readers, each with what it has kept."""

    def __init__(self, sender: Store, readers: list[Store], log: Path | None = None, device: torch.device = CPU) -> None:
        self.writer = DeltaWriter(STAGE, len(readers), device, log, sender)
        ends = (self.writer.endpoint,)
        self.readers = [DeltaReader(ends, number, len(readers), device, store) for number, store in enumerate(readers)]
        self.num_passes = 0

    def send(self, version: int) -> list[Weights]:
        """What each reader has then."""
        deadline = time.monotonic() + 60
        with ThreadPoolExecutor(len(self.readers)) as threads:
            coming = [threads.submit(self._read, reader, deadline) for reader in self.readers]
            self.writer.start(deadline, lambda: None)
            for data in buckets_of(version):
                self.writer.acquire(deadline, lambda: None)[: len(data)].copy_(data)
                self.writer.publish(len(data), verify=True)
            self.writer.finish(deadline, lambda: None)
            self.num_passes += 1
            return [tensors_of(each.result()) for each in coming]

    def _read(self, reader: DeltaReader, deadline: float) -> list[torch.Tensor]:
        try:
            return [data.to(CPU, copy=True) for _, data in reader.buckets(STAGE, self.num_passes, deadline, verify=True)]
        except TransportError as error:
            reader.abort(str(error))
            raise

    def close(self) -> None:
        for reader in self.readers:
            reader.close()
        self.writer.close()


def is_version(found: list[Weights], version: int) -> bool:
    return all(torch.equal(held[name], tensor) for held in found for name, tensor in weights(version).items())


def write_log(folder: Path, versions: range) -> None:
    writer = VersionWriter(folder, stage=0, num_stages=1, keeps_weights=True, full_every=3)
    for version in versions:
        writer.write(version, iter(weights(version).items()))


@settings(deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(0, 300), st.sampled_from([0.0, 0.01, 0.5, 1.0]))
def test_a_bucket_comes_back_in_no_more_bytes_than_it_has(seed: int, size: int, share: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    former, other = (torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator) for _ in range(2))
    data = torch.where(torch.rand(size, generator=generator) < share, other, former)
    held = former.clone()
    encoding, payload, kept = encode(data, held)
    assert len(payload) <= size and torch.equal(decode(encoding, payload, former), data)
    assert torch.equal(kept, data)
    assert encode(data, None)[0] == "whole"


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_after_the_first_pass_few_bytes_travel(device: str) -> None:
    link = Link({}, [{}, {}], device=torch.device(device))
    assert is_version(link.send(1), 1) and link.writer.sent_bytes == sum(bucket.num_bytes for bucket in STAGE.buckets)
    for version in (2, 3, 3, 9):
        assert is_version(link.send(version), version) and link.writer.sent_bytes < STAGE.manifest.total_bytes / 10
    link.close()


@pytest.mark.parametrize("damage", ["none", "torn", "missing", "no log"])
def test_a_reader_that_comes_late_is_brought_up_by_the_log(tmp_path: Path, damage: str) -> None:
    """Version 5 is made of the whole 3 and two deltas. Where the log cannot give it, whole buckets travel."""
    sender, first = Store(), Store()
    link = Link(sender, [first])
    for version in (4, 5):
        assert is_version(link.send(version), version)
    link.close()
    write_log(tmp_path, range(6))
    if damage == "torn":
        path = path_of(tmp_path, 4, 0)
        path.write_bytes(path.read_bytes()[:-10])
    if damage == "missing":
        path_of(tmp_path, 3, 0).unlink()
    later = Link(sender, [first, {}], None if damage == "no log" else tmp_path)
    assert is_version(later.send(6), 6)
    whole = later.writer.sent_bytes >= STAGE.manifest.total_bytes
    assert whole == (damage != "none")
    assert is_version(later.send(7), 7) and later.writer.sent_bytes < STAGE.manifest.total_bytes / 10, "both have the base now"
    later.close()


def test_a_log_of_another_version_or_too_long_to_read_is_of_no_use(tmp_path: Path) -> None:
    sender = Store()
    link = Link(sender, [{}])
    link.send(1)
    link.close()
    write_log(tmp_path, range(3))  # its newest is no longer what was sent last
    later = Link(sender, [{}], tmp_path)
    assert is_version(later.send(4), 4) and later.writer.sent_bytes >= STAGE.manifest.total_bytes
    later.close()
    assert from_log(tmp_path, STAGE, 1.0) is not None and from_log(tmp_path, STAGE, 0.0) is None
    assert from_log(tmp_path / "nowhere", STAGE, 1.0) is None


def test_a_base_that_was_damaged_is_named() -> None:
    readers = Store()
    link = Link({}, [readers])
    link.send(1)
    readers[0].buckets[1][5] ^= 1
    with pytest.raises(TransportError, match=r"aborted: bucket 1 of .* arrived damaged"):
        link.send(2)
    link.close()
    assert not readers[0].state, "what it has is of no use any more"


def test_a_pass_that_broke_off_is_no_base() -> None:
    sender, reader = Store(), Store()
    link = Link(sender, [reader])
    link.send(1)
    link.close()
    transport.cache_of(sender, STAGE).state = ""
    later = Link(sender, [reader])
    assert is_version(later.send(2), 2) and later.writer.sent_bytes >= STAGE.manifest.total_bytes
    later.close()


def test_a_reader_that_took_no_part_in_a_pass_gets_whole_buckets() -> None:
    """As a replica that was out of service for a sync: its bytes are those of a version before."""
    sender, always, sometimes = Store(), Store(), Store()
    for version, readers in ((1, [always, sometimes]), (2, [always]), (3, [always, sometimes])):
        link = Link(sender, readers)
        assert is_version(link.send(version), version)
        assert (link.writer.sent_bytes >= STAGE.manifest.total_bytes) == (version != 2)
        link.close()


@settings(deadline=None, max_examples=20)
@given(SPECS_OF_ANY.filter(len), st.integers(ALIGNMENT_BYTES, 4000), st.integers(0, 2**16))
def test_a_source_arrives_bit_for_bit_pass_after_pass(specs: list[tuple[str, list[int]]], bucket_bytes: int, seed: int) -> None:
    """As a run opens both sides, through the sender that packs: the second pass changes one byte in eight, the third nothing."""
    generator, names = torch.Generator().manual_seed(seed), [f"t{number}" for number in range(len(specs))]
    shapes = [(*shape, ITEM_BYTES[dtype]) for dtype, shape in specs]
    raw = [torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8) for shape in shapes]
    source, manifest = DictSource({}), make_manifest(specs)
    stage = SyncPlan(manifest, (len(specs),), bucket_bytes).stages[0]
    writer = open_writer("delta", stage, ["r"], [0])
    sender, reader = StageSender(source, stage, writer), open_reader((writer.endpoint,), 0, 1, CPU)
    with ThreadPoolExecutor(1) as thread:
        for number in range(3):
            source.tensors = {
                name: one.clone().view(getattr(torch, dtype)).squeeze(-1)
                for name, one, (dtype, _) in zip(names, raw, specs, strict=True)
            }
            coming = thread.submit(received, stage, reader, number)
            assert sender.run(time.monotonic() + 60, lambda: None, "digest").problem is None
            assert coming.result() == [one.numpy().tobytes() for one in raw]
            assert isinstance(writer, DeltaWriter) and (number < 2 or writer.sent_bytes == 0)
            if number == 0:
                changed = [torch.rand(shape, generator=generator) < 0.125 for shape in shapes]
                raw = [torch.where(mask, one ^ 1, one) for mask, one in zip(changed, raw, strict=True)]
    reader.close()
    writer.close()


def received(stage: StagePlan, reader: Reader, sync_index: int) -> list[bytes]:
    """Of each tensor."""
    found = [bytearray(spec.num_bytes) for spec in stage.manifest.tensors]
    for bucket, data in reader.buckets(stage, sync_index, time.monotonic() + 60, verify=True):
        for piece in bucket.pieces:
            part = data[piece.bucket_offset : piece.bucket_offset + piece.num_bytes].numpy().tobytes()
            found[piece.tensor][piece.tensor_offset : piece.tensor_offset + piece.num_bytes] = part
    return [bytes(each) for each in found]
