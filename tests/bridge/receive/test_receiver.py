"""A worker's side without vLLM: lent tensors get memory of their own before a bucket is used again; stages by plan or not."""

from __future__ import annotations

import threading
import time
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge.layout.bucket import StagePlan, SyncPlan, plan_buckets
from bridge.layout.manifest import Manifest, TensorSpec
from bridge.messages import BeginSync
from bridge.layout.plan import LoadPlan
from bridge.layout.regions import Copy, Region
from bridge.transport.protocol import TransportError
from bridge.transport.shm import ShmReader, ShmWriter
from bridge.receive.receiver import SLEPT_BESIDE_OTHERS, WorkerExtension
from bridge.receive.unpack import Unpacker, _Lent, _lend, _take_back
from bridge.vllm.weights.adapter import with_own_a

SPECS = (TensorSpec("a", "float32", (2, 3)), TensorSpec("b", "bfloat16", (4,)), TensorSpec("c", "float32", (1,)))


@pytest.fixture(params=[torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])
def lent(request: pytest.FixtureRequest) -> tuple[torch.Tensor, list[torch.Tensor], list[_Lent]]:
    """A bucket full of bytes, its tensors, and the receiver's notes about them; in either mode of vLLM's workers."""
    (bucket,) = plan_buckets(Manifest(SPECS), 4096)
    with request.param():
        data = torch.arange(bucket.num_bytes, dtype=torch.uint8)
        notes: list[_Lent] = []
        return data, [_lend(data, SPECS[piece.tensor], piece, notes) for piece in bucket.pieces], notes


def test_a_lent_tensor_is_a_view_until_it_is_taken_back(lent) -> None:
    data, tensors, notes = lent
    assert [(t.shape, t.dtype) for t in tensors] == [
        ((2, 3), torch.float32),
        ((4,), torch.bfloat16),
        ((1,), torch.float32),
    ]
    assert torch.equal(tensors[0].view(-1).view(torch.uint8), data[:24])
    start = data.data_ptr()
    assert [t.data_ptr() - start for t in tensors] == [0, 64, 128]
    held = {"held by a loader": tensors[0]}
    before = tensors[0].clone()
    del tensors
    _take_back(notes)
    assert not start <= held["held by a loader"].data_ptr() < start + data.numel()
    with torch.inference_mode():
        data.fill_(0)
    assert torch.equal(held["held by a loader"], before)


def test_a_part_that_is_kept_is_refused(lent) -> None:
    _, tensors, notes = lent
    part = tensors[0][1]
    with pytest.raises(TransportError, match="keeps a part of a, whose memory"):
        _take_back(notes)
    del part
    _take_back(notes)


SIZES = [5, 64, 0, 33, 200, 17]  # float32 elements of each tensor; the first two are one stage's, the others another's
BUCKET_BYTES = 256


def send(writer: ShmWriter, stage: StagePlan, values: list[torch.Tensor]) -> None:
    for bucket in stage.buckets:
        buffer = writer.acquire(time.monotonic() + 60, lambda: None)
        for piece in bucket.pieces:
            raw = values[stage.first_tensor + piece.tensor].view(torch.uint8)
            part = raw[piece.tensor_offset : piece.tensor_offset + piece.num_bytes]
            buffer[piece.bucket_offset : piece.bucket_offset + piece.num_bytes] = part
        writer.publish(bucket.num_bytes, verify=True)


@settings(deadline=None, max_examples=20)
@given(st.none() | st.lists(st.booleans(), min_size=len(SIZES), max_size=len(SIZES)) | st.just([True] * len(SIZES)))
def test_every_tensor_goes_by_plan_or_comes_out(planned: list[bool] | None) -> None:
    """Over two stages, in two syncs."""
    manifest = Manifest(tuple(TensorSpec(f"t{i}", "float32", (size,)) for i, size in enumerate(SIZES)))
    sync_plan = SyncPlan(manifest, (2, 4), BUCKET_BYTES)
    stages = sync_plan.stages
    assert [(stage.first_tensor, len(stage.manifest.tensors)) for stage in stages] == [(0, 2), (2, 4)]
    parameters = {spec.name: torch.zeros(spec.shape) for spec in manifest.tensors}
    copies = [
        (Copy(Region(0, 1, size, size), f"t{i}", Region(0, 1, size, size)),) if planned and planned[i] else None
        for i, size in enumerate(SIZES)
    ]
    plan = LoadPlan(manifest, parameters, copies, {}, []) if planned is not None else None
    writers = [ShmWriter(stage, ["r"], [0]) for stage in stages]
    reader = ShmReader(tuple(writer.endpoint for writer in writers), 0, torch.device("cpu"))
    unpacker = Unpacker(sync_plan, plan, torch.device("cpu"))
    for index in range(2):
        values = [torch.rand(size) for size in SIZES]
        sync = BeginSync(
            version=index, manifest_digest="", manifest_json=None, stage_sizes=(2, 4), bucket_bytes=BUCKET_BYTES, endpoints=((),),
            sync_index=index, first_reader=0, num_readers=1, replica=0, verify=True, timeout_seconds=10,
        )  # fmt: skip
        senders = [threading.Thread(target=send, args=(w, s, values)) for w, s in zip(writers, stages, strict=True)]
        for sender in senders:
            sender.start()
        came = {name: tensor.clone() for name, tensor in unpacker.tensors(sync, reader)}
        for sender in senders:
            sender.join()
        assert unpacker.num_arrived == len(SIZES)
        for i, value in enumerate(values):
            by_plan = planned is not None and planned[i]
            assert (f"t{i}" in came) != by_plan
            assert torch.equal(parameters[f"t{i}"] if by_plan else came[f"t{i}"], value)
    reader.close()
    for writer in writers:
        writer.close()


class TurnsReader(ShmReader):
    """Stages take turns, as lanes do."""

    interleaves = True


def test_a_linear_gets_the_a_that_it_shares_where_stages_take_turns() -> None:
    """An adapter's tensors arrive in another order than they were sent: q, k and v of one layer between those of another."""
    linears = [[f"layers.{layer}.self_attn.{part}_proj" for part in "qkv"] for layer in range(2)]
    names = [[f"{of[0]}.lora_A.weight", *(f"{each}.lora_B.weight" for each in of)] for of in linears]
    manifest = Manifest(tuple(TensorSpec(name, "float32", (64, 1)) for of_layer in names for name in of_layer))
    sync_plan = SyncPlan(manifest, (4, 4), 512)
    sync = BeginSync(
        version=0, manifest_digest="", manifest_json=None, stage_sizes=(4, 4), bucket_bytes=512, endpoints=((),),
        sync_index=0, first_reader=0, num_readers=1, replica=0, verify=True, timeout_seconds=10,
    )  # fmt: skip
    writers = [ShmWriter(stage, ["r"], [0]) for stage in sync_plan.stages]
    values = [torch.rand(64) for _ in manifest.tensors]
    for writer, stage in zip(writers, sync_plan.stages, strict=True):
        send(writer, stage, values)
    reader = TurnsReader(tuple(writer.endpoint for writer in writers), 0, torch.device("cpu"))
    came = {name: tensor.clone() for name, tensor in Unpacker(sync_plan, None, torch.device("cpu")).tensors(sync, reader)}
    assert list(came) != list(manifest.by_name)
    whole = with_own_a(came, manifest.by_name)
    for of_layer, sent in zip(linears, (values[0], values[4]), strict=True):
        assert all(torch.equal(whole[f"{linear}.lora_A.weight"].view(-1), sent) for linear in of_layer)
    reader.close()
    for writer in writers:
        writer.close()


@pytest.mark.parametrize(("says", "passes"), [(SLEPT_BESIDE_OTHERS, True), ("out of memory", False)])
def test_memory_that_another_process_took_meanwhile_does_not_end_a_sleep(says: str, passes: bool) -> None:
    class Worker(WorkerExtension):
        model_runner = SimpleNamespace(get_draft_model=lambda: None)

        def sleep(self, level: int) -> None:
            raise AssertionError(says)

    with nullcontext() if passes else pytest.raises(AssertionError, match=says):
        Worker().megasync_sleep(2)
