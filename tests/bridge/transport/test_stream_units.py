"""One pass over a source of weights into shared memory, and who takes part in it. No vLLM, no Ray.

python -m pytest tests/bridge/transport/test_stream_units.py
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge.export.source import Part
from bridge.generation import NO_ADAPTER
from bridge.layout.bucket import ALIGNMENT_BYTES, SyncPlan
from bridge.config import ReplicaConfig, SyncConfig
from bridge.send.connection import RankRole, assign_readers
from bridge.layout.digest import as_bytes, digest_value
from bridge.layout.manifest import ITEM_BYTES
from bridge.messages import BeginSync, SyncError
from bridge.replicas.generator import Generator
from bridge.replicas.pool import ReplicaPool
from bridge.send.publish import Publisher
from bridge.send.sender import StageSender
from bridge.transport.open import abort_endpoints, open_reader, open_writer
from bridge.transport.segment import FOLDER, PREFIX
from tests.support.manifests import SPECS, soon, stage_of
from tests.support.pools import ReadingPool
from tests.support.sources import DictSource

CPU = torch.device("cpu")


def test_a_misspelt_verification_starts_nothing() -> None:
    source = DictSource({"t": torch.zeros(3)})
    with pytest.raises(ValueError, match=r"verify\n.*'none', 'digest' or 'readback'.*'digset'"):
        SyncConfig(verify="digset")
    with pytest.raises(ValueError, match=r"verify = 'digset'; choices: none, digest, readback"):
        Publisher(source, object(), SyncConfig()).publish(1, verify="digset")
    assert source.num_given == 0


class LostPool(ReadingPool):
    """Replicas of which neither a sync nor the way out of it hears."""

    def pause(self, slot: int = 0) -> None:
        raise RuntimeError("the replicas do not answer")

    def abort(self, timeout: float) -> tuple[list[int], list[int]]:
        raise ConnectionError("Ray is gone")


def test_an_error_on_leaving_a_sync_is_reported_and_hides_nothing() -> None:
    publisher = Publisher(DictSource({"t": torch.zeros(3)}), LostPool({}), SyncConfig(transport="shm"))
    with pytest.raises(SyncError, match=r"the replicas do not answer.*rank 0: on leaving the sync: ConnectionError: Ray is"):
        publisher.publish(1)
    assert not list(FOLDER.glob(f"{PREFIX}{os.getpid()}-*"))


class LateLostPool(ReadingPool):
    """A replica whose actor is gone once it has paused: who looks after it has taken it out, or Ray is gone."""

    def __init__(self, error: Exception) -> None:
        super().__init__({})
        self.error = error

    def receive(self, _message: BeginSync) -> list[threading.Thread]:
        raise self.error


@pytest.mark.parametrize("kind", [RuntimeError, ConnectionError])
def test_a_replica_that_is_lost_after_its_pause_ends_the_sync_on_all_ranks(kind: type[Exception]) -> None:
    """They walk the source to the end, in whose collectives all ranks of a stage take part, and hear of it then."""
    source = DictSource({f"tensor {number}": torch.ones(8) for number in range(5)})
    publisher = Publisher(source, LateLostPool(kind("replica 0 is not there")), SyncConfig(transport="shm"))
    with pytest.raises(SyncError, match="replica 0 is not there") as caught:
        publisher.publish(1)
    assert caught.value.failed_replicas == (0,) and source.num_given == 5


TENSORS = {f"tensor {number}": torch.full((8,), float(number)) for number in range(5)}
DIGESTS = {name: digest_value(tensor) for name, tensor in TENSORS.items()}


def publisher_to(pool: ReadingPool, timeout_seconds: float = 60.0) -> Publisher:
    return Publisher(DictSource(TENSORS), pool, SyncConfig(transport="shm", timeout_seconds=timeout_seconds))


@pytest.mark.parametrize(("verify", "is_verified"), [("none", False), ("digest", True), ("readback", True)])
def test_workers_compare_digests_unless_nothing_is_to_be_verified(verify: str, is_verified: bool) -> None:
    pool = ReadingPool(DIGESTS)
    publisher = publisher_to(pool)
    report = publisher.publish(7, verify=verify)
    assert (pool.version, report.verified, pool.messages[0].verify) == (7, is_verified, is_verified)
    publisher.close()


@pytest.mark.parametrize("wrong", [{}, {"tensor 3": 1}])
def test_a_tensor_that_is_missing_or_other_at_the_read_back_is_named(wrong: dict[str, int]) -> None:
    held = {name: digest for name, digest in DIGESTS.items() if name != "tensor 3"} | wrong
    with pytest.raises(SyncError, match=r"replica 0 holds other values than were sent in tensor 3$"):
        publisher_to(ReadingPool(held)).publish(1, verify="readback")


@pytest.mark.timeout(60)
def test_a_replica_that_never_ends_loading_is_named_at_the_deadline() -> None:
    with pytest.raises(SyncError, match=r"deadline passed \(sync.timeout_seconds\).*by replica 0"):
        publisher_to(ReadingPool(DIGESTS, ends=False), timeout_seconds=0.5).publish(1)


@settings(deadline=None, max_examples=30)
@given(SPECS.filter(len), st.integers(ALIGNMENT_BYTES, 4000))
def test_a_stream_arrives_bit_for_bit(specs, bucket_bytes) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for i, (dtype, shape) in enumerate(specs):
        raw = torch.randint(0, 255, (*shape, ITEM_BYTES[dtype]), generator=generator, dtype=torch.uint8)
        tensors[f"t{i}"] = raw.view(getattr(torch, dtype)).squeeze(-1)
    source = DictSource(tensors)
    stage = stage_of(source.manifest(), bucket_bytes)
    writer = open_writer("shm", stage, ["r"], [0])
    sender = StageSender(source, stage, writer)
    received: dict[int, bytearray] = {i: bytearray(s.num_bytes) for i, s in enumerate(stage.manifest.tensors)}

    def read() -> None:
        reader = open_reader((writer.endpoint,), 0, 1, CPU)
        for bucket, data in reader.buckets(stage, 0, soon(), verify=True):
            for p in bucket.pieces:
                part = data[p.bucket_offset : p.bucket_offset + p.num_bytes].numpy().tobytes()
                received[p.tensor][p.tensor_offset : p.tensor_offset + p.num_bytes] = part

    thread = threading.Thread(target=read)
    thread.start()
    result = sender.run(soon(), lambda: None, "readback")
    thread.join()
    writer.close()
    assert result.problem is None
    assert result.digests == [digest_value(tensor) for tensor in tensors.values()]
    for index, tensor in enumerate(tensors.values()):
        assert bytes(received[index]) == as_bytes(tensor).numpy().tobytes()


@pytest.mark.parametrize("transport", ["shm", "ipc", "nccl", "delta"])
def test_a_stage_without_tensors_holds_nobody_up(transport: str) -> None:
    """As where the adapters of a model are all in the layers of other stages."""
    sources = DictSource({"t": torch.arange(40.0)}), DictSource({}, stage=1)
    plan = SyncPlan(sources[0].manifest(), (1, 0), 4096)
    writers = [open_writer(transport, stage, ["r"], [0]) for stage in plan.stages]
    reader = open_reader(tuple(writer.endpoint for writer in writers), 0, 1, CPU)
    with ThreadPoolExecutor(2) as threads:
        senders = [StageSender(*each) for each in zip(sources, plan.stages, writers, strict=True)]
        sent = [threads.submit(sender.run, soon(), lambda: None, "digest") for sender in senders]
        for index in range(2):
            came = [list(reader.buckets(stage, index, soon(), verify=True)) for stage in plan.stages]
            assert [len(each) for each in came] == [1, 0]
            assert [each.result().problem for each in sent] == [None, None]
            sent = [threads.submit(sender.run, soon(), lambda: None, "digest") for sender in senders if not index]
    reader.close()
    for writer in writers:
        writer.close()


class Elsewhere(DictSource):
    """Has the same tensors in memory of other names, as merged weights are."""

    def parts(self) -> Iterator[Part]:
        for part in super().parts():
            copies = [tuple(copy._replace(buffer=f"merged {copy.buffer}") for copy in each) for each in part.copies]
            yield Part(copies, {f"merged {name}": flat for name, flat in part.memory.items()})


@pytest.mark.parametrize("part_size", [1, 3])
def test_a_source_that_takes_anothers_place_may_have_its_tensors_elsewhere(part_size) -> None:
    """As in `bench sync`, where full weights and merged ones go through one publisher in turns."""
    stage = stage_of(DictSource({f"t{i}": torch.zeros(64) for i in range(7)}).manifest(), 300)
    writer = open_writer("shm", stage, ["r"], [0])
    sources = [kind({f"t{i}": torch.rand(64) for i in range(7)}) for kind in (DictSource, Elsewhere)]
    sources[1].part_size = part_size
    sender, received = StageSender(sources[0], stage, writer), bytearray(stage.manifest.total_bytes)

    def read(sync: int) -> None:
        reader = open_reader((writer.endpoint,), 0, 1, CPU)
        for bucket, data in reader.buckets(stage, sync, soon(), verify=True):
            for p in bucket.pieces:
                part, first = data[p.bucket_offset : p.bucket_offset + p.num_bytes], p.tensor * 256 + p.tensor_offset
                received[first : first + p.num_bytes] = part.numpy().tobytes()

    for sync, source in enumerate([*sources, *sources]):
        sender.source = source
        thread = threading.Thread(target=read, args=(sync,))
        thread.start()
        result = sender.run(soon(), lambda: None, "digest")
        thread.join()
        assert result.problem is None
        assert received == b"".join(as_bytes(tensor).numpy().tobytes() for tensor in source.tensors.values())
    writer.close()


@pytest.mark.parametrize("fails", ["endpoint", "check"])
def test_a_source_is_drained_after_an_error_of_any_kind(fails) -> None:
    """Other ranks of its stage are in the source's collectives."""
    source = DictSource({f"t{i}": torch.full((64,), float(i)) for i in range(20)})
    stage = stage_of(source.manifest(), 256)
    writer = open_writer("shm", stage, ["a", "b"], [0, 1])
    if fails == "endpoint":
        abort_endpoints([writer.endpoint], "replica 1 worker 0: no memory")

    def check() -> None:
        if fails == "check":
            raise ConnectionError("Ray is gone")

    result = StageSender(source, stage, writer).run(soon(), check, "digest")
    assert result.problem is not None
    assert "no memory" in result.problem if fails == "endpoint" else result.problem == "ConnectionError: Ray is gone"
    assert source.num_given == 20
    writer.close()


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"a": torch.zeros(4)}, "gave 1 of 2 tensors"),
        ({"a": torch.zeros(4), "b": torch.zeros(5)}, r"gave 5 elements of float32 for b float32\[4\]"),
        ({"a": torch.zeros(4), "b": torch.zeros(4).half()}, r"gave 4 elements of float16 for b float32\[4\]"),
        ({"a": torch.zeros(4), "b": torch.zeros(4), "c": torch.zeros(1)}, "gave 3 of 2 tensors"),
    ],
)
@pytest.mark.parametrize("part_size", [1, 3])
def test_a_source_that_breaks_its_manifest_is_named(tensors, message, part_size) -> None:
    stage = stage_of(DictSource({"a": torch.zeros(4), "b": torch.zeros(4)}).manifest(), 256)
    writer = open_writer("shm", stage, ["a", "b"], [0, 1])
    problem = StageSender(DictSource(tensors, part_size=part_size), stage, writer).run(soon(), lambda: None, "digest").problem
    writer.close()
    with pytest.raises(RuntimeError, match=message):
        raise RuntimeError(problem)


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 9), st.booleans(), st.booleans())
def test_each_reader_has_one_rank_for_each_stage(num_stages, width, num_readers, spread, on_all_ranks) -> None:
    """`width` ranks a stage, the first of which is its sender."""
    roles = [RankRole(rank // width, rank % width == 0, on_all_ranks or rank % width == 0) for rank in range(num_stages * width)]
    shared = assign_readers(roles, range(num_readers), spread=spread)
    assert all(shared.values()) and (spread or all(roles[rank].is_sender for rank in shared))
    served = sorted((roles[rank].stage, reader) for rank, readers in shared.items() for reader in readers)
    assert served == [(stage, reader) for stage in range(num_stages) for reader in range(num_readers)]
    if spread and on_all_ranks:
        assert all(reader in shared[reader] for reader in range(min(num_readers, len(roles))))


def test_a_replica_on_a_ranks_device_reads_from_that_rank_also_where_others_are_lost() -> None:
    pool = ReplicaPool(ReplicaConfig("nowhere", tensor_parallel=2), 3)
    pool.members = [1, 2]
    roles = [RankRole(0, is_sender=rank == 0, has_tensors=True) for rank in range(6)]
    assert assign_readers(roles, pool.reader_numbers, spread=True) == {2: [0], 3: [1], 4: [2], 5: [3]}


def test_a_sync_goes_before_groups_that_wait_to_be_handed_in() -> None:
    async def order() -> list[str]:
        generator, taken = Generator(None, 0, "continue", serving=lambda _slot: (0, NO_ADAPTER), explain=lambda error: error), []

        async def hand_in(name: str, *, yields_to_sync: bool = True) -> None:
            async with generator._turn(yields_to_sync=yields_to_sync):
                taken.append(name)

        await generator.lock.acquire()
        waiting = [asyncio.create_task(hand_in("batch", yields_to_sync=False))]
        waiting += [asyncio.create_task(hand_in(f"group {number}")) for number in range(3)]
        await asyncio.sleep(0)
        sync = asyncio.create_task(generator.acquire_for_sync())
        await asyncio.sleep(0)
        generator.lock.release()
        await sync
        taken.append("sync")
        generator.lock.release()
        await asyncio.gather(*waiting)
        return taken

    assert asyncio.run(order()) == ["batch", "sync", "group 0", "group 1", "group 2"]
