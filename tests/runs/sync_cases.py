"""What tests/runs/test_sync_trainer.py runs on two trainer ranks: engines of several wraps and layouts against one vLLM."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from bridge.config import ReplicaConfig, SyncConfig
from bridge.export.source import Part, whole_tensors
from bridge.generation import GenerationRequest
from bridge.messages import SyncError
from bridge.send.publish import Publisher
from bridge.transport.nccl import GroupWriter
from engine.engine import Engine
from engine.sample import Sample
from megasync.run.canary import Canary, CanaryError, probe_sequences
from megasync.config.schema import Config
from megasync.launch.ray_cluster import start_ray
from megasync.report.log import RunLog
from megasync.run.placement import DeviceSharing, make_room_for_replicas
from megasync.run.rank_zero import RankZero
from megasync.run.sync import WeightSync
from megasync.run.weights import Weights, build_publisher
from tests.engine.engine_cases import engine, exporter, log_probs, random_samples
from tests.support.replicas import OpenPool

STARTS_PROCESSES = True  # see ranks.py
BUCKET_BYTES = 150_000  # smaller than the largest tensors: some are split
_replicas: dict[str, OpenPool] = {}  # rank 0's, by their config
_stop_ray: list[Callable[[], None]] = []


def is_rank_zero() -> bool:
    return int(os.environ["RANK"]) == 0


def replica(path: str, **fields: Any) -> OpenPool:
    """A pool of one replica, for rank 0. It stays for the calls that follow on the same model, or until `close_replicas`."""
    for key in [key for key, pool in _replicas.items() if pool.config.model_path != path]:
        _replicas.pop(key).close()
    if (stop_ray := start_ray("local")) is not None:
        _stop_ray.append(stop_ray)
        atexit.register(close_replicas)
    config = ReplicaConfig(path, **{"dtype": "float32", "max_model_len": 64, "kv_cache_bytes": 2**26, **fields})
    if str(config) not in _replicas:
        _replicas[str(config)] = OpenPool.start(config, 1)
    return _replicas[str(config)]


def close_replicas() -> None:
    """On any rank: end what rank 0 has started."""
    for pool in _replicas.values():
        pool.close()
    _replicas.clear()
    while _stop_ray:
        _stop_ray.pop()()


def publish_and_compare(
    path: str,
    cases: list[dict[str, Any]],
    num_steps: int,
    transport: str = "auto",
    verify: str = "digest",
    tensor_parallel: int = 1,
    generates: bool = False,
    dtype: str = "float32",
) -> list[dict[str, Any]]:
    """Train, publish and read back `num_steps` times for each case, all against one replica; `generates`: see `follow`."""
    pool = replica(path, tensor_parallel=tensor_parallel, dtype=dtype) if is_rank_zero() else None
    results = []
    for number, case in enumerate(cases):
        config = SyncConfig(transport=transport, bucket_bytes=BUCKET_BYTES, verify=verify)
        with engine(path, name="sft", dtype=dtype, **case) as built:
            results.append(follow(built, pool, num_steps, number * 100, config, generates=generates))
    return results


def follow(
    built: Engine, pool: OpenPool | None, num_steps: int, first_version: int, config: SyncConfig, *, generates: bool = False
) -> dict[str, Any]:
    """Which tensors differed after any sync, and the largest and mean log-prob gap over all tokens of all steps.

    `generates`: also of tokens that vLLM generates, one after another, which it may compute by other weights than a prompt's.
    """
    source, sent = exporter(built), exporter(built, on_all_ranks=config.transport == "ipc")
    publisher = Publisher(sent, pool, config)
    differing: set[str] = set()
    versions, moved, gaps = [], 0, list[torch.Tensor]()
    fallback, num_pickled = {}, CallCounter(dist, ("all_gather_object", "broadcast_object_list"))
    before: dict[str, torch.Tensor] = {}
    for step in range(num_steps):
        built.update(built.prepare(random_samples(16, seed=step)))
        with num_pickled:
            report = publisher.publish(first_version + step)
        if step == 0:
            num_pickled.count = 0  # only the first sync may agree on objects
        if generates:
            gaps += generated_gaps(built, pool, step)
        samples = random_samples(6, seed=1000 + step)
        mine = log_probs(built, samples)
        exported = {name: tensor.clone() for name, tensor in whole_tensors(source)}
        if pool is None:
            continue
        fallback = report.loader_fallback
        if "lm_head.weight" not in exported:  # tied: vLLM computes with a head of its own, which must be the embeddings
            exported["lm_head.weight"] = exported["model.embed_tokens.weight"]
        held = pool.read_back()
        differing |= set(held) ^ set(exported)
        pairs = {name: (tensor, held[name]) for name, tensor in exported.items() if name in held}
        differing |= {name for name, (own, theirs) in pairs.items() if not torch.equal(own.to(theirs.dtype), theirs)}
        scores = pool.score_all([[*s.prompt_ids, *s.response_ids] for s in samples])
        for sample, ours, theirs in zip(samples, mine, scores, strict=True):
            answer = torch.tensor(theirs[len(sample.prompt_ids) - 1 :])
            gaps.append((ours - answer).abs())
        versions.append((report.version, pool.versions, report.verified))
        moved += sum(not torch.equal(before[name], exported[name]) for name in before) > 0
        before = exported
    writer = publisher._connection.sender.writer if publisher._connection is not None else None
    return {
        "differing": sorted(differing),
        "gap": float(torch.cat(gaps).max()) if gaps else 0.0,
        "mean_gap": float(torch.cat(gaps).mean()) if gaps else 0.0,
        "versions": versions,
        "moved": moved,
        "fallback": fallback,
        "num_pickled": num_pickled.count,
        "readers": getattr(writer, "own", None),
    }


def generated_gaps(built: Engine, pool: OpenPool | None, seed: int) -> list[torch.Tensor]:
    """Collective; of rank 0's answer."""
    requests = [
        GenerationRequest(tuple(s.prompt_ids.tolist()), num_samples=2, max_new_tokens=12, seed=seed)
        for s in random_samples(4, seed=seed)
    ]
    reported: list[Any] = [pool.generate(requests).result() if pool is not None else None]
    dist.broadcast_object_list(reported, src=0)
    pairs = [(r.prompt_ids, completion) for r, group in zip(requests, reported[0], strict=True) for completion in group]
    mine = log_probs(built, [Sample(prompt, completion.token_ids) for prompt, completion in pairs])
    return [(ours - torch.from_numpy(each.log_probs.copy())).abs() for ours, (_, each) in zip(mine, pairs, strict=True)]


def publish_with_canary(path: str, folder: str, cases: list[dict[str, Any]], damaged: str) -> tuple[list[dict[str, float]], str]:
    """Each case publishes twice as a run does; after the last one's, `damaged` changes in the replica. Metrics, and the error."""
    found: list[dict[str, float]] = []
    for number, case in enumerate(cases):
        with engine(path, **case) as built:
            sections = {"run": {"dir": folder}, "model": {"path": path}, "sync": {"bucket_bytes": BUCKET_BYTES}}
            config = Config.model_validate(sections).model_copy(update={"engine": built.config})
            sync = weight_sync(config, built, RankZero(lambda: replica(path)))
            for version in range(2):
                built.update(built.prepare(random_samples(16, seed=version)))
                found.append(sync.publish(version))
            if number == len(cases) - 1:
                return found, publish_and_damage(sync, damaged)
            sync.publisher.close()
    raise AssertionError


def weight_sync(config: Config, built: Engine, pool: RankZero[Any]) -> WeightSync:
    """With a canary and replicas of their own devices."""
    log, exporter = RunLog(config, first_step=0, write=False), Weights(config, built).exporter
    publisher = build_publisher(exporter, pool.here, config)
    canary = Canary(probe_sequences([range(5, 40)], 3, 12), [(5, 6, 7), (20, 21)], 1e-3, 60.0, print)
    devices = DeviceSharing(config, make_room_for_replicas(config, built, log.timeline), pool, log.timeline)
    return WeightSync(config, built, log, exporter, publisher, pool, devices, canary, None, None)


def publish_and_damage(sync: WeightSync, damaged: str) -> str:
    """What the error says."""
    pool = sync.pool.here
    if isinstance(pool, OpenPool):
        pool.damaged = damaged
    try:
        sync.publish(2)
    except CanaryError as error:
        return str(error)
    finally:
        if isinstance(pool, OpenPool):
            pool.damaged = ""
    return ""


class CallCounter:
    """Counts calls of functions of a module while entered."""

    def __init__(self, module: Any, names: tuple[str, ...]) -> None:
        self.module, self.real, self.count = module, {name: getattr(module, name) for name in names}, 0

    def __enter__(self) -> None:
        for name, function in self.real.items():
            setattr(self.module, name, self._counted(function))

    def __exit__(self, *_: object) -> None:
        for name, function in self.real.items():
            setattr(self.module, name, function)

    def _counted(self, function: Any) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            return function(*args, **kwargs)

        return counted


class Renamed:
    """A weight source whose tensors are changed on the way: for sources that lose or rename one."""

    def __init__(self, source: Any, change: str, name: str) -> None:
        self.source, self.change, self.name = source, change, name

    def __getattr__(self, name: str) -> Any:
        return getattr(self.source, name)

    def manifest(self) -> Any:
        from dataclasses import replace

        from bridge.layout.manifest import Manifest

        specs = self.source.manifest().tensors
        if self.change == "missing":
            return Manifest(tuple(spec for spec in specs if spec.name != self.name))
        return Manifest(tuple(replace(s, name=s.name + "_x") if s.name == self.name else s for s in specs))

    def parts(self) -> Any:
        names = iter([spec.name for spec in self.source.manifest().tensors])
        for part in self.source.parts():
            kept = [copies for copies in part.copies if next(names) != self.name or self.change == "renamed"]
            yield Part(kept, part.memory)


def damaging(finish: Any) -> Any:
    """What a sender's digests say of bucket 3 is not what it sent."""

    def damaged(writer: GroupWriter, *args: Any) -> None:
        writer.digests._sums[3] ^= 1
        finish(writer, *args)

    return damaged


def refused_syncs(path: str) -> dict[str, Any]:
    """A missing and a renamed tensor from two trainer ranks; every rank must hear of it and nothing may change."""
    pool = replica(path) if is_rank_zero() else None
    name = "model.layers.1.mlp.up_proj.weight"
    reported: dict[str, Any] = {}
    with engine(path, wrap="megatron_fsdp", name="sft") as built:
        source = exporter(built)
        Publisher(source, pool, SyncConfig(bucket_bytes=BUCKET_BYTES)).publish(1)
        for change in ("missing", "renamed"):
            try:
                config = SyncConfig(transport="shm" if change == "missing" else "nccl", bucket_bytes=BUCKET_BYTES)
                Publisher(Renamed(source, change, name), pool, config).publish(2)
            except SyncError as error:
                reported[change] = str(error)
            if pool is not None:
                reported[f"{change} serves"] = pool.versions
        dist.barrier()
        Publisher(source, pool, SyncConfig(bucket_bytes=BUCKET_BYTES)).publish(3)
        reported["serves"] = pool.versions if pool is not None else None
        publisher = Publisher(source, pool, SyncConfig(transport="nccl", bucket_bytes=BUCKET_BYTES))
        publisher.publish(4)
        with mock.patch.object(GroupWriter, "finish", damaging(GroupWriter.finish)):
            try:
                publisher.publish(5)
            except SyncError as error:
                reported["damaged"] = str(error)
        reported["failed"] = pool.versions if pool is not None else None
    return reported
