"""The stream of groups over two real replicas: what an update does to running samples, and what a lost replica does to a run."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from bridge.config import ReplicaConfig, SyncConfig
from bridge.generation import Completion, GenerationRequest, GroupRequest
from bridge.export.source import Part
from bridge.messages import ReplicaState, SyncError
from bridge.send.publish import Publisher
from megasync.tools.assets.command import build_tokenizer
from engine.config import ModelConfig
from megasync.config.schema import Config, RolloutConfig
from megasync.episodes.pool import EpisodePool
from megasync.episodes.task import EpisodeResult, Task
from megasync.launch.ray_cluster import start_ray
from megasync.rollouts.group import Group, StreamSettings, oldest_of
from megasync.rewards.pool import Scored
from megasync.rollouts.stream import RolloutStream
from megasync.rollouts.turns import EpisodeSettings
from tests.support.replicas import StampedPool
from tests.runs.sync_pools import load
from tests.support.processes import command_of
from tests.support.sources import DictSource
from tests.support.tiny_models import write_tiny_model

pytestmark = pytest.mark.vllm_on_cpu

NUM_STEPS, BATCH_SIZE, GROUP_SIZE = 4, 4, 3
STOPPED_SECONDS = 10.0  # a sync waits so long for a replica that gives no answer
LONG = GenerationRequest((5, 6, 7), num_samples=GROUP_SIZE, max_new_tokens=200, seed=3)


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> list[Path]:
    root = tmp_path_factory.mktemp("models")
    return [write_tiny_model(root / str(seed), "qwen3", True, seed) for seed in range(2)]


@pytest.fixture(scope="module")
def pool(folders) -> Iterator[StampedPool]:
    stop_ray = start_ray("local")
    assert stop_ray is not None
    sizes = {"max_model_len": 256, "max_num_seqs": 16, "kv_cache_bytes": 2**26}
    config = ReplicaConfig(str(folders[0]), "float32", **sizes, answer_timeout_seconds=STOPPED_SECONDS)
    pool = StampedPool.start(config, 2)
    try:
        yield pool
    finally:
        pool.close()
        stop_ray()


@pytest.fixture(scope="module")
def source(folders) -> DictSource:
    return DictSource(load(folders[1]))


@pytest.fixture(scope="module")
def publisher(pool, source) -> Iterator[Publisher]:
    publisher = Publisher(source, pool, SyncConfig(bucket_bytes=2**20, timeout_seconds=20))
    publisher.publish(0)
    yield publisher
    publisher.close()


def collected(pool: StampedPool, replica: int, number: int) -> list[tuple[int, Completion]]:
    """Samples by their place in the group, as they end."""
    import ray

    found: list[tuple[int, Completion]] = []
    deadline = time.monotonic() + 60
    while len(found) < number and time.monotonic() < deadline:
        finished = ray.get(pool.collect(replica, 1.0)).finished
        found += [(each.sample, each.completion) for each in finished]
    return found


@pytest.mark.parametrize(("mode", "recompute"), [("continue", False), ("continue", True), ("restart", False), ("drain", False)])
def test_every_token_has_the_version_that_made_it(pool, publisher, mode, recompute) -> None:
    """Two syncs while three samples of 200 tokens run; versions are compared with those that vLLM stamps by itself on the first.

    All three begin together, so that each of their tokens is of the same step.
    """
    import ray

    pool.set_on_update(mode, recompute)
    first = ray.get(pool._actors[0].handle.serves.remote())
    pool._call(lambda actor: actor.take_stamps.remote(), 60.0)
    ray.get(pool.hand_in(0, [GroupRequest(1, LONG, (0, 1, 2))]))
    for version in (first + 1, first + 2):
        time.sleep(0.05)
        publisher.publish(version)
    done = collected(pool, 0, GROUP_SIZE)
    assert [len(completion.token_ids) for _, completion in done] == [200] * GROUP_SIZE
    stamps = [own for own in pool._call(lambda actor: actor.take_stamps.remote(), 60.0, [0])[0] if len(own) == 200]
    (stamped,) = [own for (sample, _), own in zip(done, stamps, strict=True) if sample == 0]
    for _, completion in done:
        versions = completion.weight_versions
        assert versions.tolist() == stamped
        assert (np.diff(versions) >= 0).all() and np.isfinite(completion.log_probs).all()
    versions = {int(version) for _, completion in done for version in completion.weight_versions}
    assert versions <= {first, first + 1, first + 2}
    if mode != "continue":  # a sample is of one version
        assert all(len(set(completion.weight_versions.tolist())) == 1 for _, completion in done)
    if mode == "restart":
        assert first not in versions


@pytest.mark.parametrize("recompute", [False, True])
def test_samples_that_waited_through_an_update_are_of_the_new_weights_alone(pool, publisher, source, folders, recompute) -> None:
    """More samples of one prompt than run at once: what those that ran left in the prefix cache is of the former weights."""
    import ray

    pool.set_on_update("continue", recompute)
    first = max(pool.versions) + 1
    source.tensors = load(folders[0])
    publisher.publish(first)
    source.tensors = load(folders[1])
    prompt = tuple(range(3, 93)) * 2  # 180 tokens, more than a block of the cache
    request = GenerationRequest(prompt, num_samples=24, max_new_tokens=40, seed=3)
    ray.get(pool.hand_in(0, [GroupRequest(1, request, tuple(range(24)))]))
    publisher.publish(first + 1)
    done = [completion for _, completion in collected(pool, 0, 24)]
    after = [completion for completion in done if min(completion.weight_versions) == first + 1]
    assert len(done) == 24 and 8 <= len(after) < 24, "16 run at once"
    scores = pool.score(0, [[*request.prompt_ids, *completion.token_ids.tolist()] for completion in after], 60.0)
    gaps = [np.abs(all_of[-40:] - completion.log_probs).mean() for all_of, completion in zip(scores, after, strict=True)]
    assert max(gaps) < 1e-3


@pytest.fixture
def players(tmp_path) -> Iterator[tuple[EpisodePool, EpisodeSettings]]:
    """Episodes of two turns with a tool between them, in a process that ends with the event loop of its stream."""
    build_tokenizer().save_pretrained(tmp_path)
    rollout = RolloutConfig(episode="tests.support.episodes:two_turns", episode_processes=1)
    pool = EpisodePool(Config(model=ModelConfig(path=str(tmp_path)), rollout=rollout))
    yield pool, EpisodeSettings(max_turns=2, max_tokens=256)
    pool.close()


def make_stream(pool: StampedPool, notes: list[str], staleness: int, players=None) -> RolloutStream:
    def make_group(ordinal: int) -> Group:
        length, ids = (4, 8, 40, 120)[ordinal % 4], (5, 6, 7 + ordinal % 5)
        length = length // 2 if players else length
        request = GenerationRequest(ids, num_samples=GROUP_SIZE, max_new_tokens=length, seed=ordinal)
        return Group(ordinal, request, task=Task("", ids, "", seed=ordinal))

    async def score(group: Group, samples: list[int]) -> list[Scored]:
        return [Scored(float(sample), {}) for sample in samples]

    settings = StreamSettings(staleness, BATCH_SIZE, NUM_STEPS, 12, 40.0, answer_seconds=4.0)
    return RolloutStream(pool, settings, make_group, score, notes.append, episodes=players)


def test_a_pause_that_comes_after_the_end_of_its_sync_leaves_no_lock(pool, publisher) -> None:
    """Another replica was lost while this one was still taking requests in; then the next sync waited for it for ever."""
    import ray

    actor = pool._actors[0]
    pool._num_pauses += 1
    ray.get(actor.handle.take_lock.remote())
    paused = actor.handle.pause.remote(actor.num_sent, pool._num_pauses)
    assert ray.get(actor.handle.abort.remote(pool._num_pauses)) is ReplicaState.SERVING
    ray.get(actor.handle.release_lock.remote())
    with pytest.raises(ray.exceptions.RayTaskError, match="the sync was aborted"):
        ray.get(paused, timeout=120)
    version = max(pool.versions) + 1
    publisher.publish(version)
    assert pool.versions == [version] * 2


def test_a_sample_that_starts_again_waits_for_a_whole_sync(pool, publisher, source, monkeypatch) -> None:
    """A sync that breaks off comes before it has its turn, which a replica that takes requests in keeps it from."""
    import ray

    actor, parts = pool._actors[0], source.parts
    pool.set_on_update("restart")
    ray.get(pool.hand_in(0, [GroupRequest(1, GenerationRequest((5, 6, 7), num_samples=2, max_new_tokens=200), (0, 1))]))

    def parts_beside_requests() -> Iterator[Part]:
        actor.handle.hold_lock_until_sync.remote()  # has its turn as soon as the sync is over
        return parts()

    version = max(pool.versions) + 1
    monkeypatch.setattr(source, "parts", parts_beside_requests)
    publisher.publish(version)
    monkeypatch.setattr(source, "parts", parts)
    monkeypatch.setattr(source, "fail_at", list(source.tensors)[-1])
    with pytest.raises(SyncError, match="out of trainer memory"):
        publisher.publish(version + 1)
    monkeypatch.setattr(source, "fail_at", "")
    publisher.publish(version + 2)
    done = collected(pool, 0, 2)
    assert [sorted(set(one.weight_versions.tolist())) for _, one in done] == [[version + 2]] * 2


@pytest.mark.parametrize("is_late", [True, False])
def test_a_replica_that_is_asleep_stays_so_where_its_sync_ends_before_its_pause(pool, publisher, is_late) -> None:
    """The sync ends before the pause comes, or while it gets memory for weights; the next sync is as any other. A pause that has
    got its memory by then was in time: that replica serves what it kept.
    """
    import ray

    pool.sleep(keep_weights=True)
    actor = pool._actors[0]
    pool._num_pauses += 1
    ask = [lambda: actor.handle.abort.remote(pool._num_pauses), lambda: actor.handle.pause.remote(0, pool._num_pauses)]
    ended, paused = [call() for call in ask] if is_late else [call() for call in ask[::-1]][::-1]
    if (state := ray.get(ended)) is ReplicaState.ASLEEP:
        with pytest.raises(ray.exceptions.RayTaskError, match="the sync was aborted"):
            ray.get(paused, timeout=120)
    else:
        assert not is_late and state is ReplicaState.SERVING and ray.get(paused, timeout=120) is None
    version = max(pool.versions) + 1
    publisher.publish(version)
    assert pool.versions == [version] * 2


def test_a_call_that_was_overtaken_has_none_of_what_was_handed_in_after_it(pool, publisher) -> None:
    """Ray may let calls of an actor overtake each other; who made the older one has ended."""
    import ray

    actor = pool._actors[0]
    actor.num_collects += 2
    ray.get(pool.hand_in(0, [GroupRequest(1, LONG, (0, 1))]))
    assert ray.get(actor.handle.collect.remote(60.0, actor.num_collects - 1), timeout=60).finished == ()
    assert sorted(sample for sample, _ in collected(pool, 0, 2)) == [0, 1]


def test_a_stream_gets_its_samples_whatever_was_asked_before_it(pool, publisher) -> None:
    """The one before it has asked both replicas for news, which they still wait for."""
    pool.set_on_update("continue")
    publisher.publish(max(pool.versions) + 1)
    before = make_stream(pool, [], 0)
    before.run(before.serve(0))
    before.close()
    stream = make_stream(pool, [], 0)
    try:
        stream.run(stream.serve(0))
        stream.run(stream.admit(0))
        assert [group.key for group in stream.run(stream.take(0)) or []] == list(range(BATCH_SIZE))
    finally:
        stream.close()


LOSSES = [("SIGSTOP", True)]
LOSSES += [pytest.param(*each, marks=pytest.mark.long) for each in (("SIGKILL", False), ("SIGKILL", True), ("SIGSTOP", False))]


@pytest.mark.parametrize(("kind", "plays"), LOSSES)
def test_a_lost_replica_loses_no_prompt(pool, publisher, players, kind, plays) -> None:
    """While it generates, in the second step: its groups go to the other, which goes on; a new one takes part later.

    `plays`: samples are episodes, and it is lost in the midst of turns, each of which is in its episode once.
    """
    pool.set_on_update("continue")
    notes: list[str] = []
    first = max(pool.versions)
    stream = make_stream(pool, notes, 2, players if plays else None)
    trained: list[int] = []
    (engine,) = [p for p in psutil.Process(pool._actors[1].pid).children(recursive=True) if "EngineCore" in command_of(p)]
    other = pool._actors[0].pid
    try:
        for step in range(NUM_STEPS):
            pool.rejoin(1, 0.0) and publisher.close()
            version = first + 1 + step
            publish_until_it_works(pool, publisher, version)
            stream.run(stream.serve(step))
            stream.run(stream.admit(step))
            if step == 1:
                threading.Timer(0.02, lambda: os.kill(engine.pid, getattr(signal, kind))).start()
            groups = stream.run(stream.take(step))
            trained += [group.key for group in groups]
            for group in groups:
                assert all(num_sampled(c) == group.request.max_new_tokens * (1 + plays) for c in group.completions)
                oldest = [oldest_of(c) for c in group.completions]
                assert all(first + 1 <= version <= first + 1 + step for version in oldest)
    finally:
        stream.close()
    assert sorted(trained) == list(range(NUM_STEPS * BATCH_SIZE))
    assert pool._actors[0].pid == other, "the healthy one is not restarted"
    pool.rejoin(2, 120.0)
    publisher.close()
    publisher.publish(first + NUM_STEPS + 1)
    assert pool.versions == [first + NUM_STEPS + 1] * 2
    assert not psutil.pid_exists(engine.pid)


@pytest.mark.parametrize("is_known", [pytest.param(True, marks=pytest.mark.long), False])
def test_a_replica_that_is_lost_keeps_the_others_neither_awake_nor_asleep(pool, publisher, is_known) -> None:
    """On shared devices: it was lost while it generated, which whoever hands it groups has seen, or not yet."""
    (engine,) = [p for p in psutil.Process(pool._actors[1].pid).children(recursive=True) if "EngineCore" in command_of(p)]
    engine.kill()
    engine.wait(20)
    pool.drain_notes()
    if is_known:
        pool.replace(1)
    pool.sleep(keep_weights=True)
    assert [text.partition(" is lost")[0] for text in pool.drain_notes()] == ([] if is_known else ["replica 1"])
    pool.wake()
    assert len(pool.score(0, [(1, 2, 3)], 60.0)[0]) == 2
    assert pool.rejoin(2, 120.0)
    publisher.close()
    version = max(each for each in pool.versions if each is not None) + 1
    publisher.publish(version)
    assert pool.versions == [version] * 2


def num_sampled(done: Completion | EpisodeResult) -> int:
    """Of an episode the one branch has both turns, the second after what the tool gave."""
    if isinstance(done, Completion):
        return len(done.token_ids)
    (branch,) = done.branches
    assert done.num_turns == 2 and done.num_given == 2 and (branch.log_probs[branch.is_sampled] < 0).all()
    return done.num_sampled


def publish_until_it_works(pool: StampedPool, publisher: Publisher, version: int) -> None:
    """As Weights.publish does."""
    from bridge.messages import SyncError

    for _ in range(3):
        try:
            publisher.publish(version)
        except SyncError as error:
            pool.replace(*error.failed_replicas)
            pool.rejoin(1, 0.0)
            publisher.close()
        else:
            return
    raise AssertionError("no sync worked")
