"""Syncs into real vLLM replicas in real Ray actors; tensors from a dict stand for the trainer.

Tests of one pool run in the order of the file: the later ones leave it broken.

    python -m pytest tests/runs/test_sync_vllm.py
"""

from __future__ import annotations

import os
import signal
import time

import psutil
import pytest
import ray
import torch

from bridge.send import sender
from bridge.config import SyncConfig
from bridge.generation import GenerationRequest
from bridge.messages import SyncError
from bridge.processes import descendants
from bridge.replicas.pool import Generation
from bridge.send.publish import Publisher
from bridge.transport import segment
from bridge.versions.writer import VersionWriter
from bridge.vllm.serving.api import NICENESS_ON_CPU
from bridge.layout.digest import digest_value
from tests.runs.sync_pools import (
    GREEDY,
    SAMPLED,
    differing,
    load,
    own_ray,
    reference_scores,
    start,
    tokens,
    write_seeds,
)
from tests.support.processes import command_of
from tests.support.replicas import numbers
from tests.support.sources import DictSource

pytestmark = pytest.mark.vllm_on_cpu


def is_done(generation: Generation) -> bool:
    return not ray.wait(generation._refs, num_returns=len(generation._refs), timeout=0)[1]


@pytest.fixture(scope="module", autouse=True)
def cluster():
    with own_ray():
        yield


# Two replicas of one worker, tied embeddings.


@pytest.fixture(scope="module")
def tied_folders(tmp_path_factory):
    return write_seeds(tmp_path_factory.mktemp("tied"), "qwen3", tied=True)


@pytest.fixture(scope="module")
def tied_pool(tied_folders, cluster):
    pool = start(tied_folders[0], replicas=2)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def tied_source(tied_folders):
    return DictSource(load(tied_folders[1]))


@pytest.fixture(scope="module")
def tied_publisher(tied_pool, tied_source):
    publisher = Publisher(tied_source, tied_pool, SyncConfig(bucket_bytes=10_000, verify="readback"))
    yield publisher
    publisher.close()


@pytest.fixture(scope="module")
def loaded(tied_pool):
    """Tokens of replicas that have loaded their folder themselves, before any sync: greedy ones, and samples."""
    assert tied_pool.versions == [-1, -1]
    return tokens(tied_pool), tied_pool.generate(SAMPLED[:1]).result()


def test_a_replica_starts_with_its_folder(tied_pool, tied_folders, loaded) -> None:
    assert differing(tied_pool.read_back(replica=1), load(tied_folders[0])) == []
    assert {v for c in loaded[1][0] for v in c.weight_versions.tolist()} == {-1}


def test_on_cpus_a_replica_yields_to_the_trainer_once_it_has_started(tied_pool) -> None:
    for actor in tied_pool._actors.values():
        core = [process for process in descendants(actor.pid) if "EngineCore" in command_of(process)]
        assert len(core) == 1 and {process.nice() for process in (psutil.Process(actor.pid), *core)} == {NICENESS_ON_CPU}


def test_each_sync_arrives_bit_for_bit(tied_pool, tied_folders, tied_source, tied_publisher) -> None:
    before = tokens(tied_pool)
    for version, folder in enumerate([*tied_folders[1:], *tied_folders]):
        tied_source.tensors = load(folder)
        report = tied_publisher.publish(version)
        assert report.verified
        assert tied_pool.versions == [version, version]
        for replica in range(2):
            held = tied_pool.read_back(replica=replica)
            assert differing(held, tied_source.tensors) == []
            assert torch.equal(held["lm_head.weight"], tied_source.tensors["model.embed_tokens.weight"])
    assert before != tokens(tied_pool)
    assert report.num_bytes == sum(t.nbytes for t in tied_source.tensors.values())
    assert report.num_buckets > report.num_bytes / 10_000
    stages = {"pause", "gather", "pack", "wait", "load", "commit", "readback", "resume"}
    assert stages == {span.name for span in report.stages}, "begin goes with load, after the first sync"
    assert all(a.end >= a.start for a in report.stages)
    assert 0 < report.seconds < report.pause_seconds


def test_tokens_equal_those_of_a_load(tied_pool, tied_folders, tied_source, tied_publisher, loaded) -> None:
    tied_source.tensors = load(tied_folders[0])
    tied_publisher.publish(9)
    assert tokens(tied_pool) == loaded[0]
    sampled = tied_pool.generate(SAMPLED[:1]).result()
    assert [numbers(c)[:2] for c in sampled[0]] == [numbers(c)[:2] for c in loaded[1][0]]


def test_log_probs_are_those_of_the_weights(tied_pool, tied_folders, tied_source, tied_publisher) -> None:
    tied_source.tensors = load(tied_folders[1])
    tied_publisher.publish(10)
    lists = [(5, 6, 7, 8, 9, 100, 3), (9, 8), (1, 2, 3)]
    for ids, scores in zip(lists, tied_pool.score_all(lists), strict=True):
        torch.testing.assert_close(torch.tensor(scores), reference_scores(tied_folders[1], ids), atol=1e-4, rtol=0)
    (completion,) = tied_pool.generate([GenerationRequest((5, 6), max_new_tokens=6, seed=3)]).result()[0]
    expected = reference_scores(tied_folders[1], (5, 6, *completion.token_ids.tolist()))[1:]
    torch.testing.assert_close(torch.tensor(completion.log_probs), expected, atol=1e-4, rtol=0)


def test_generation_repeats_bit_for_bit(tied_pool) -> None:
    first = tied_pool.generate(SAMPLED).result()
    again = tied_pool.generate(SAMPLED).result()
    assert [[numbers(c) for c in samples] for samples in again] == [[numbers(c) for c in samples] for samples in first]
    assert [len(samples) for samples in first] == [3] * 5
    assert len({numbers(c)[0] for samples in first for c in samples}) == 15
    stop = int(first[0][0].token_ids[2])
    stopped = tied_pool.generate(
        [GenerationRequest((5, 6, 7), num_samples=3, max_new_tokens=9, seed=0, stop_token_ids=(stop,))]
    ).result()[0][0]
    assert stopped.token_ids[-1] == stop
    assert stopped.finish_reason == "stop"
    assert first[0][0].finish_reason == "length"


def test_a_sync_waits_for_running_requests(tied_pool, tied_publisher) -> None:
    long = [GenerationRequest((7, i), num_samples=4, max_new_tokens=50, seed=i) for i in range(8)]
    running = tied_pool.generate(long)
    assert not is_done(running)
    tied_publisher.publish(11)
    deadline = time.monotonic() + 60  # for the answers' way, once the engine has them all
    while not is_done(running) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert is_done(running)
    assert {v for s in running.result() for c in s for v in c.weight_versions.tolist()} == {10}
    after = tied_pool.generate(SAMPLED).result()
    assert {v for s in after for c in s for v in c.weight_versions.tolist()} == {11}


REFUSALS = {
    "missing": (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), "missing model.layers.1.mlp.up_proj.weight"),
    "renamed": (
        lambda t: t.update({"model.layers.1.mlp.upp_proj.weight": t.pop("model.layers.1.mlp.up_proj.weight")}),
        r"unknown model.layers.1.mlp.upp_proj.weight \(renamed from model.layers.1.mlp.up_proj.weight\?\)",
    ),
    "shape": (
        lambda t: t.update({"model.norm.weight": torch.ones(127)}),
        r"shape of model.norm.weight is \[127\], expected \[128\]",
    ),
    "dtype": (
        lambda t: t.update({"model.norm.weight": torch.ones(128, dtype=torch.bfloat16)}),
        "dtype of model.norm.weight is bfloat16, expected float32",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_a_refused_manifest_leaves_the_former_version(tied_pool, tied_folders, case) -> None:
    change, message = REFUSALS[case]
    tensors = load(tied_folders[2])
    change(tensors)
    before = tokens(tied_pool)
    publisher = Publisher(DictSource(tensors), tied_pool, SyncConfig(bucket_bytes=10_000))
    with pytest.raises(SyncError, match=message) as caught:
        publisher.publish(12)
    assert caught.value.refused
    assert caught.value.failed_replicas == ()
    assert tied_pool.versions == [11, 11]
    assert tokens(tied_pool) == before


def test_too_small_a_shared_memory_stops_before_any_change(tied_pool, tied_source, monkeypatch) -> None:
    def no_room(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", no_room)
    with pytest.raises(SyncError, match=r"no room .* lower sync.bucket_bytes"):
        Publisher(tied_source, tied_pool, SyncConfig()).publish(12)
    assert tied_pool.versions == [11, 11]


def corrupt(monkeypatch, bucket: int) -> None:
    """Flip one bit of a bucket after its digest was taken, before the readers hear of it."""
    announce = segment.Segment.announce

    def announce_damaged(self: segment.Segment, sequence: int, num_bytes: int, digest: int) -> None:
        if sequence == bucket:
            self.buffers[sequence % segment.NUM_BUFFERS][num_bytes // 2] ^= 1
        announce(self, sequence, num_bytes, digest)

    monkeypatch.setattr(segment.Segment, "announce", announce_damaged)


def test_a_damaged_bucket_takes_the_replicas_out_of_service_until_the_next_sync(tied_pool, tied_source, monkeypatch) -> None:
    publisher = Publisher(tied_source, tied_pool, SyncConfig(bucket_bytes=10_000, timeout_seconds=30, verify="readback"))
    pids = [actor.pid for actor in tied_pool._actors.values()]
    with monkeypatch.context() as patch:
        corrupt(patch, bucket=30)
        with pytest.raises(SyncError, match=r"bucket 30 of \d+ of stage 0 \(model\.layers\..*\) arrived damaged") as caught:
            publisher.publish(13)
    assert (caught.value.failed_replicas, caught.value.stale_replicas) == ((), (0, 1))
    assert tied_pool.versions == [None, None]
    with pytest.raises(RuntimeError, match=r"replica 0 has no weights and waits for a publish"):
        tied_pool.generate(GREEDY).result()
    publisher.publish(14)
    assert tied_pool.versions == [14, 14] and [actor.pid for actor in tied_pool._actors.values()] == pids
    assert all(differing(tied_pool.read_back(replica=r), tied_source.tensors) == [] for r in range(2))
    assert tokens(tied_pool)


def test_a_restarted_replica_serves_after_the_next_publish(tied_pool, tied_source, tmp_path) -> None:
    """By transport delta: it makes out of the log of versions what the other one holds already, and both get what changed."""
    publisher = Publisher(tied_source, tied_pool, SyncConfig(transport="delta"), log=tmp_path)
    first = publisher.publish(14)
    assert first.sent_bytes is not None and first.sent_bytes >= first.num_bytes
    log = VersionWriter(tmp_path, stage=0, num_stages=1, keeps_weights=True, full_every=20)
    log.write(14, iter(tied_source.tensors.items()))
    publisher.close()  # as a run does where the members change
    tied_pool.replace(1)
    assert tied_pool.rejoin(at_least=2, seconds=300)
    assert tied_pool.versions == [14, None]
    with pytest.raises(RuntimeError, match="waits for a publish"):
        tied_pool.generate(GREEDY).result()
    tied_source.tensors = {name: tensor + (tensor == tensor.max()) for name, tensor in tied_source.tensors.items()}
    report = Publisher(tied_source, tied_pool, SyncConfig(transport="delta", verify="readback"), log=tmp_path).publish(15)
    assert report.sent_bytes is not None and report.sent_bytes < first.num_bytes / 20
    assert set(report.loader_fallback.values()) == {"oneDNN packs its weight after loading"}
    assert not [name for name in report.loader_fallback if "norm" in name or "embed" in name or name == "lm_head"]
    assert tied_pool.versions == [15, 15]
    assert all(differing(tied_pool.read_back(replica=r), tied_source.tensors) == [] for r in range(2))
    assert tokens(tied_pool)


def test_what_a_replica_holds_is_verified_with_what_was_sent(tied_pool, tied_source, monkeypatch) -> None:
    monkeypatch.setattr(sender, "digest_value", lambda t: 5 if t.shape == (256, 128) else digest_value(t))
    publisher = Publisher(tied_source, tied_pool, SyncConfig(verify="readback"))
    with pytest.raises(SyncError, match=r"replica 1 holds other values than were sent in model\.layers\.0\.mlp\.gate_proj"):
        publisher.publish(16)
    with pytest.raises(RuntimeError, match="waits for a publish"):
        tied_pool.generate(GREEDY).result()


# One replica of two workers, untied embeddings, biases, a vocabulary that vLLM pads.


# Starts and ends.


def test_a_failing_start_says_what_vllm_said(tied_folders) -> None:
    with pytest.raises(
        RuntimeError, match=r"vLLM did not start for replica 0[\s\S]*ValueError: (No available|To serve at least).* cache"
    ):
        start(tied_folders[0], kv_cache_bytes=1024)


@pytest.mark.long
def test_a_start_with_arguments_that_vllm_refuses_says_so(tied_folders) -> None:
    with pytest.raises(RuntimeError, match=r"max_model_len \(100000\) is greater"):
        start(tied_folders[0], max_model_len=100_000)


def test_a_killed_engine_is_noticed_and_leaves_no_process(tied_pool, tied_folders) -> None:
    """Nor does a killed actor, from which its engine was forked."""
    family = [process for actor in tied_pool._actors.values() for process in psutil.Process(actor.pid).children(recursive=True)]
    own = psutil.Process(tied_pool._actors[0].pid).children(recursive=True)
    (engine,) = [process for process in own if "VLLM::EngineCore" in command_of(process)]
    publisher = Publisher(DictSource(load(tied_folders[1])), tied_pool, SyncConfig(timeout_seconds=20))
    publisher.publish(17)
    engine.send_signal(signal.SIGKILL)
    with pytest.raises(SyncError) as caught:
        publisher.publish(18)
    assert caught.value.failed_replicas == (0,)
    with pytest.raises(RuntimeError, match="replica 0"):
        tied_pool.generate(GREEDY).result()
    forked = psutil.Process(tied_pool._actors[1].pid).children(recursive=True)
    os.kill(tied_pool._actors[1].pid, signal.SIGKILL)
    assert forked and psutil.wait_procs(forked, timeout=60)[1] == []
    tied_pool.close()
    assert psutil.wait_procs(family, timeout=60)[1] == []
