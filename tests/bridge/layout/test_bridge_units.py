"""Pure parts of the bridge: manifests, bucket plans, states, shards. No vLLM, no Ray.

python -m pytest tests/bridge/layout/test_bridge_units.py
"""

from __future__ import annotations

import itertools
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from bridge.generation import Collected, Completion, Finished
from bridge.layout.bucket import ALIGNMENT_BYTES, buffer_bytes, plan_buckets
from bridge.layout.manifest import Manifest, TensorSpec, find_differences, read_folder_manifest, without_predictors
from bridge.messages import TRANSITIONS, Event, ReplicaState, SyncError, next_state
from bridge.vllm.weights.readback import in_dtypes
from bridge.replicas.output import find_errors
from bridge.vllm.serving.requests import mix_seed
from tests.support.shards import Packed, assemble, pack
from tests.support.manifests import SPECS, make_manifest
from tests.support.tiny_models import write_tiny_model

# Manifest.


@given(SPECS)
def test_manifest_survives_json_and_its_digest_tells_order(specs) -> None:
    manifest = make_manifest(specs)
    assert Manifest.from_json(manifest.to_json()) == manifest
    turned = Manifest(manifest.tensors[::-1])
    assert (turned.digest == manifest.digest) == (len(specs) < 2)


def test_folder_manifest_matches_the_model(tmp_path) -> None:
    folder = write_tiny_model(tmp_path / "m", "qwen2", dtype=torch.bfloat16)
    manifest = read_folder_manifest(folder)
    assert manifest.by_name["model.layers.0.self_attn.q_proj.bias"] == TensorSpec(
        "model.layers.0.self_attn.q_proj.bias", "bfloat16", (128,)
    )
    assert len(manifest.tensors) == 4 * 12 + 3


def test_sharded_folder_and_cut_off_file(tmp_path) -> None:
    save_file({"a": torch.zeros(3)}, tmp_path / "x-1.safetensors")
    save_file({"b": torch.zeros(2, 2)}, tmp_path / "x-2.safetensors")
    index = '{"weight_map": {"a": "x-1.safetensors", "b": "x-2.safetensors"}}'
    (tmp_path / "model.safetensors.index.json").write_text(index)
    assert [t.name for t in read_folder_manifest(tmp_path).tensors] == ["a", "b"]
    whole = (tmp_path / "x-2.safetensors").read_bytes()
    for kept in (3, 20, len(whole) - 1):
        (tmp_path / "x-2.safetensors").write_bytes(whole[:kept])
        with pytest.raises(ValueError, match=r"x-2.safetensors is not a whole"):
            read_folder_manifest(tmp_path)
    (tmp_path / "x-2.safetensors").unlink()
    with pytest.raises(ValueError, match="lacks"):
        read_folder_manifest(tmp_path)


def test_a_tensor_named_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="twice: a"):
        Manifest((TensorSpec("a", "uint8", (1,)), TensorSpec("a", "uint8", (1,))))


def test_differences_are_named() -> None:
    held = make_manifest([("float32", [2, 3]), ("float32", [4]), ("bfloat16", [5]), ("float32", [6])])
    assert find_differences(held, held, "float32", tied=False) == []
    sent = Manifest(
        (
            TensorSpec("t0", "float32", (3, 2)),
            TensorSpec("t1.x", "float32", (4,)),
            TensorSpec("t2", "bfloat16", (5,)),
            TensorSpec("t3", "float16", (6,)),
        )
    )
    assert find_differences(sent, held, "float32", tied=False) == [
        "missing t1",
        "unknown t1.x",
        "shape of t0 is [3, 2], expected [2, 3]",
        "dtype of t3 is float16, expected float32",
    ]


def test_biases_of_routers_are_float32_in_folders_of_any_dtype() -> None:
    names = "a.weight", "model.layers.1.mlp.gate.e_score_correction_bias"
    sent = Manifest((TensorSpec(names[0], "bfloat16", (9,)), TensorSpec(names[1], "float32", (4,))))
    for dtype in ("float32", "bfloat16"):
        held = Manifest(tuple(TensorSpec(spec.name, dtype, spec.shape) for spec in sent.tensors))
        assert find_differences(sent, held, "bfloat16", tied=False) == []
    assert find_differences(held, sent, "bfloat16", tied=False) == [f"dtype of {names[1]} is bfloat16, expected float32"]


def test_predictors_of_further_tokens_are_left_out() -> None:
    names = "model.layers.1.a", "model.layers.2.eh_proj.weight", "model.layers.12.b", "model.norm.weight", "mtp.fc.weight"
    manifest = Manifest(tuple(TensorSpec(name, "float32", (1,)) for name in names))
    assert [spec.name for spec in without_predictors(manifest, 2).tensors] == [names[0], names[3]]


def test_a_router_that_vllm_has_in_float32_is_read_back_as_it_was_sent() -> None:
    sent = {"gate": TensorSpec("gate", "bfloat16", (2,))}
    ((_, _, same), (_, _, other)) = in_dtypes([(name, (0,), torch.tensor([0.5, 1 / 3])) for name in ("gate", "norm")], sent)
    assert same.dtype is torch.bfloat16 and same[0] == 0.5 and same[1].isnan(), "a third is no bfloat16"
    assert torch.equal(other, torch.tensor([0.5, 1 / 3]))


def test_tied_head_may_come_or_stay_away() -> None:
    body = Manifest((TensorSpec("model.embed_tokens.weight", "float32", (8, 2)),))
    both = Manifest((*body.tensors, TensorSpec("lm_head.weight", "float32", (8, 2))))
    for sent, held in itertools.product((body, both), repeat=2):
        assert find_differences(sent, held, "float32", tied=True) == []
    assert find_differences(body, both, "float32", tied=False) == ["missing lm_head.weight"]
    assert find_differences(both, body, "float32", tied=False) == ["unknown lm_head.weight"]


def test_a_rename_is_guessed() -> None:
    held = Manifest((TensorSpec("model.layers.0.mlp.up_proj.weight", "float32", (2,)),))
    sent = Manifest((TensorSpec("model.layers.0.mlp.upp_proj.weight", "float32", (2,)),))
    assert "renamed from model.layers.0.mlp.up_proj.weight" in "".join(find_differences(sent, held, "float32", tied=False))


# Buckets.


@settings(deadline=None)
@given(SPECS, st.integers(ALIGNMENT_BYTES, 6000))
def test_every_byte_lies_in_one_piece(specs, bucket_bytes) -> None:
    manifest = make_manifest(specs)
    capacity = buffer_bytes(manifest, bucket_bytes)
    buckets = plan_buckets(manifest, bucket_bytes)
    assert capacity <= max(bucket_bytes, ALIGNMENT_BYTES)
    assert buckets == plan_buckets(Manifest.from_json(manifest.to_json()), bucket_bytes)
    done = [0] * len(manifest.tensors)
    pieces = []
    for number, bucket in enumerate(buckets):
        assert bucket.index == number
        end = 0
        for piece in bucket.pieces:
            assert piece.bucket_offset % ALIGNMENT_BYTES == 0
            assert piece.tensor_offset % ALIGNMENT_BYTES == 0
            assert piece.bucket_offset >= end
            assert piece.tensor_offset == done[piece.tensor]
            end = piece.bucket_offset + piece.num_bytes
            done[piece.tensor] += piece.num_bytes
            pieces.append(piece.tensor)
        assert end == bucket.num_bytes <= capacity
    assert done == [spec.num_bytes for spec in manifest.tensors]
    assert pieces == sorted(pieces)
    assert set(pieces) == set(range(len(manifest.tensors)))


def test_buffers_are_no_larger_than_the_model() -> None:
    assert buffer_bytes(make_manifest([("float32", [100])]), 2**29) == 448
    assert buffer_bytes(make_manifest([]), 2**29) == ALIGNMENT_BYTES


# Shards.


def shard(name: str, full: torch.Tensor, offsets: tuple[int, ...], shape: tuple[int, ...]) -> Packed:
    return pack(name, offsets, full[tuple(slice(o, o + s) for o, s in zip(offsets, shape, strict=True))])


def test_shards_become_full_tensors() -> None:
    full = torch.randn(6, 4).bfloat16()
    rows = [shard("rows", full, (0, 0), (3, 4)), shard("rows", full, (3, 0), (3, 4))]
    columns = [shard("columns", full, (0, 0), (6, 2)), shard("columns", full, (0, 2), (6, 2))]
    copies = [shard("copies", full, (0, 0), (6, 4))] * 2
    rebuilt = assemble([*rows, *columns, *copies])
    assert all(torch.equal(tensor, full) for tensor in rebuilt.values())
    with pytest.raises(ValueError, match="no worker holds 12"):
        assemble([shard("rows", full, (3, 0), (3, 4))])
    with pytest.raises(ValueError, match="different values of rows"):
        assemble([*rows, shard("rows", full + 1, (0, 0), (6, 4))])


# States.


def test_only_serving_leads_to_a_sync_and_failed_is_final() -> None:
    """And what broke off within a sync waits for the next one."""
    state = ReplicaState.SERVING
    for event in (Event.PAUSE, Event.BEGIN, Event.RECEIVE, Event.RECEIVED, Event.COMMIT, Event.RESUME):
        state = next_state(state, event)
    assert state is ReplicaState.SERVING
    assert {after for (before, _), after in TRANSITIONS.items() if before is ReplicaState.FAILED} == {ReplicaState.FAILED}
    changed = {ReplicaState.RECEIVING, ReplicaState.RECEIVED, ReplicaState.COMMITTED}
    assert all(next_state(state, Event.ABORT) is ReplicaState.STALE for state in changed)
    assert {event for (before, event), after in TRANSITIONS.items() if before is ReplicaState.STALE} == {
        Event.PAUSE, Event.ABORT, Event.DIE
    }  # fmt: skip
    with pytest.raises(RuntimeError, match="that is failed cannot resume"):
        next_state(ReplicaState.FAILED, Event.RESUME)


def test_sync_error_travels_and_names() -> None:
    error = pickle.loads(pickle.dumps(SyncError(7, ["missing a"], refused=True)))
    assert (error.version, error.reasons, error.refused) == (7, ["missing a"], True)
    assert "version 7 refused; replicas still serve the former version: missing a" in str(error)


def test_seeds_do_not_collide() -> None:
    seeds = {mix_seed(seed, sample) for seed in range(100) for sample in range(100)}
    assert len(seeds) == 10_000
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_the_cause_is_found_in_a_log() -> None:
    log = """(EngineCore pid=14367) ERROR 11-20 22:58:06 [core.py:1510]     raise ValueError(
(EngineCore pid=14367) ERROR 11-20 22:58:06 [core.py:1510] ValueError: no room for the KV cache
Loading shards: 100%
Traceback (most recent call last):
  File "x.py", line 3, in f
ValueError: no room for the KV cache
torch.cuda.OutOfMemoryError: tried 3 GiB
"""
    assert find_errors(log) == ["ValueError: no room for the KV cache", "torch.cuda.OutOfMemoryError: tried 3 GiB"]


@given(st.lists(st.tuples(st.integers(), st.integers(0, 9), st.integers(0, 5), st.booleans()), max_size=6), st.booleans())
def test_what_a_replica_finished_arrives_as_it_was_sent(samples: list[tuple[int, int, int, bool]], has_experts: bool) -> None:
    def completion(length: int, stopped: bool) -> Completion:
        tokens = np.arange(length, dtype=np.int32)
        experts = np.ones((length + 1, 2, 3), np.uint8) if has_experts else np.empty((0, 0, 0), np.uint8)
        return Completion(tokens, tokens.astype(np.float32) / 3, tokens + 7, "stop" if stopped else "length", experts)

    sent = Collected(tuple(Finished(key, sample, completion(*rest)) for key, sample, *rest in samples), 0.5)
    buffers: list[pickle.PickleBuffer] = []
    got = pickle.loads(pickle.dumps(sent, protocol=5, buffer_callback=buffers.append), buffers=buffers)
    assert got.silent_seconds == 0.5 and len(buffers) <= 3 + has_experts * len(samples)
    for one, other in zip(got.finished, sent.finished, strict=True):
        assert (one.key, one.sample, one.completion.finish_reason) == (other.key, other.sample, other.completion.finish_reason)
        for name in ("token_ids", "log_probs", "weight_versions", "routed_experts"):
            mine, theirs = getattr(one.completion, name), getattr(other.completion, name)
            assert mine.dtype == theirs.dtype and mine.flags.writeable
            np.testing.assert_array_equal(mine, theirs)
