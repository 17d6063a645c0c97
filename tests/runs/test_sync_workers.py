"""Syncs into a replica of two workers, started as on GPUs: untied embeddings, biases, a vocabulary that vLLM pads.

Tests run in the order of the file: the last one leaves the replica broken.

    python -m pytest tests/runs/test_sync_workers.py
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import signal
import time
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from bridge.config import SyncConfig
from bridge.generation import GenerationRequest
from bridge.messages import SyncError
from bridge.processes import shared_memory_below, socket_folder
from bridge.send.publish import Publisher
from tests.runs.sync_pools import (
    STORE_TIMEOUT,
    differing,
    load,
    own_ray,
    reference_scores,
    start,
    write_seeds,
)
from tests.support.replicas import SpawnedPool
from tests.support.sources import DictSource

pytestmark = pytest.mark.vllm_on_cpu


@pytest.fixture(scope="module", autouse=True)
def cluster():
    with own_ray():
        yield


@pytest.fixture(scope="module")
def split_folders(tmp_path_factory):
    return write_seeds(tmp_path_factory.mktemp("split"), "qwen2", tied=False, vocab_size=130)


ELSEWHERE = ["another host"] * 2  # for what is done between hosts, on one of them


@pytest.fixture(scope="module")
def split_pool(split_folders, cluster):
    given = {"tensor_parallel": 2, "max_num_seqs": 64, "engine_arguments": {"enable_prefix_caching": False}}
    pool = start(split_folders[0], kind=SpawnedPool, **given)
    yield pool
    pool.close()


def test_two_workers_without_a_prefix_cache_hold_what_was_sent(split_pool, split_folders, monkeypatch) -> None:
    """With lanes one worker gets the buckets and passes them on to the other."""
    assert "replica 0: spawned" in split_pool.drain_notes(), "what its processes note reaches whoever started it"
    assert not split_pool.settings()["enable_prefix_caching"]
    source = DictSource(load(split_folders[0]))
    for transport in ("shm", "nccl", "lanes"):
        if transport == "lanes":
            monkeypatch.setattr(split_pool, "reader_hosts", lambda: ELSEWHERE)
            transport = "auto"  # between hosts nccl
        publisher = Publisher(source, split_pool, SyncConfig(transport=transport, bucket_bytes=100_000, verify="readback"))
        for version, folder in enumerate([split_folders[2], split_folders[1]]):
            source.tensors = load(folder)
            publisher.publish(version)
            assert differing(split_pool.read_back(), source.tensors) == []
        publisher.close()
    ids = (5, 6, 7, 8, 9, 100, 3)
    (scores,) = split_pool.score_all([ids])
    torch.testing.assert_close(torch.tensor(scores), reference_scores(split_folders[1], ids), atol=1e-4, rtol=0)
    assert split_pool.read_back(["model.norm.weight"]).keys() == {"model.norm.weight"}


@pytest.mark.parametrize("is_first", [True, False])
def test_a_worker_that_does_not_reach_the_sender_fails_the_sync(split_pool, split_folders, monkeypatch, is_first: bool) -> None:
    """At once, also where begin and load are one call; the other worker's answer is not taken for that of a later call."""
    source = DictSource(load(split_folders[1]))
    publisher = Publisher(source, split_pool, SyncConfig(bucket_bytes=100_000, timeout_seconds=60, verify="readback"))
    whole = Publisher._message
    if not is_first:
        publisher.publish(6)

    def misdirected(*arguments):
        message = whole(*arguments)
        (first,), (second,) = message.endpoints
        return dataclasses.replace(message, endpoints=((first,), (second.replace("#", ".not-there#"),)))

    with monkeypatch.context() as patch:
        patch.setattr(Publisher, "_message", misdirected)
        begin = time.monotonic()
        with pytest.raises(SyncError) as caught:
            publisher.publish(7)
    assert time.monotonic() - begin < 30, "half of the deadline"
    assert not caught.value.refused and "not-there" in str(caught.value)
    publisher.publish(8)
    assert split_pool.versions == [8]
    assert differing(split_pool.read_back(), source.tensors) == []
    publisher.close()


def halves(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    tensors = list(load(folder).items())
    return dict(tensors[:20]), dict(tensors[20:])


def publish_second_stage(store: str, folders: list[Path], results: multiprocessing.Queue) -> None:
    """Rank 1 of the trainer, in a process of its own: sends stage 1, twice; its last sync fails in the source each time."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=1, world_size=2, timeout=STORE_TIMEOUT)
    for _ in range(2):
        source = DictSource(halves(folders[0])[1], stage=1, num_stages=2)
        publisher = Publisher(source, None, SyncConfig(transport="nccl", bucket_bytes=50_000, verify="readback"))
        for version, folder in enumerate([folders[0], folders[2], folders[1]]):
            source.tensors = halves(folder)[1]
            source.fail_at = "model.layers.2.mlp.up_proj.weight" if version == 2 else ""
            try:
                report = publisher.publish(version)
                results.put((report.num_bytes, report.num_buckets, {span.name for span in report.stages}))
            except SyncError as error:
                results.put(str(error))
    dist.destroy_process_group()


def test_two_ranks_send_a_stage_each_and_fail_together(split_pool, split_folders, tmp_path, monkeypatch) -> None:
    """On one host and on two, where each worker is the first to get one stage's buckets, and takes both stages in turns."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    store = str(tmp_path / "store")
    other = context.Process(target=publish_second_stage, args=(store, split_folders, results))
    other.start()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=2, timeout=STORE_TIMEOUT)
    try:
        for is_elsewhere in (False, True):
            if is_elsewhere:
                monkeypatch.setattr(split_pool, "reader_hosts", lambda: ELSEWHERE)
            source = DictSource(halves(split_folders[0])[0], stage=0, num_stages=2)
            publisher = Publisher(source, split_pool, SyncConfig(transport="nccl", bucket_bytes=50_000, verify="readback"))
            for version, folder in enumerate([split_folders[0], split_folders[2]]):
                source.tensors = halves(folder)[0]
                report = publisher.publish(version)
                assert differing(split_pool.read_back(), load(folder)) == []
                num_bytes, num_buckets, spans = results.get(timeout=60)
                assert (num_bytes, num_buckets) == (report.num_bytes, report.num_buckets)
                assert {"gather", "pack", "wait"} <= spans
            with pytest.raises(SyncError, match="stage 1: the weight source failed: RuntimeError: out of trainer") as caught:
                publisher.publish(2)
            assert results.get(timeout=60) == str(caught.value)
            assert (caught.value.failed_replicas, caught.value.stale_replicas) == ((), (0,))
    finally:
        dist.destroy_process_group()
        other.join(30)
        other.kill()


def test_seeded_prompts_of_more_tokens_than_a_step_takes(split_pool, split_folders) -> None:
    """64 prompts of 60 tokens, where a step takes 2048: a prompt that is cut in two with a seed of its own ends vLLM on CPUs."""
    publisher = Publisher(DictSource(load(split_folders[0])), split_pool, SyncConfig())
    publisher.publish(3)
    publisher.close()
    requests = [GenerationRequest(tuple(range(3 + i, 63 + i)), max_new_tokens=2, seed=i) for i in range(64)]
    assert [len(c.token_ids) for completions in split_pool.generate(requests).result() for c in completions] == [2] * 64


def test_a_killed_actor_leaves_neither_process_nor_shared_memory(split_pool) -> None:
    """Its two workers talk through vLLM's own shared memory, which nobody else would remove.

    Which kinds there are depends on the CPU: with AVX-512 they sum there, too. Whatever they map by name is found.
    """
    family = psutil.Process(split_pool._actors[0].pid).children(recursive=True)
    memory = shared_memory_below(split_pool._actors[0].pid)
    assert all([path for path in memory if kind in path] for kind in ("psm_", "sem.mp-")), memory
    mapped = {mapping.path for process in family for mapping in process.memory_maps()}
    assert {path for path in mapped if path.startswith("/dev/shm/") and Path(path).exists()} <= memory
    sockets = [path for path in Path(socket_folder()).glob(f"megasync-vllm-{split_pool._actors[0].pid}-*/*") if path.is_socket()]
    assert sockets
    os.kill(split_pool._actors[0].pid, signal.SIGKILL)
    assert psutil.wait_procs(family, timeout=60)[1] == []
    split_pool.close()
    assert not [path for path in [*memory, *sockets] if Path(path).exists()]


@pytest.mark.long
def test_a_worker_whose_rows_of_the_head_are_all_padding(cluster, tmp_path) -> None:
    """vLLM pads 30 tokens to 64, so that the second of two workers has none; its head is packed again, or scoring hangs."""
    folders = write_seeds(tmp_path, "qwen2", tied=False, vocab_size=30)
    pool = start(folders[0], kind=SpawnedPool, tensor_parallel=2)
    source = DictSource(load(folders[1]))
    publisher = Publisher(source, pool, SyncConfig(verify="readback"))
    publisher.publish(1)
    assert differing(pool.read_back(), source.tensors) == []
    ids = (5, 6, 7, 8, 9, 29, 3)
    (scores,) = pool.score_all([ids])
    torch.testing.assert_close(torch.tensor(scores), reference_scores(folders[1], ids), atol=1e-4, rtol=0)
    publisher.close()
    pool.close()
