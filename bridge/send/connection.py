"""What trainer ranks and replicas agree on before the first sync, and keep until one fails: manifest, buckets, endpoints.

Leaves out the syncs themselves (publish.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple
from uuid import uuid4

import torch

from bridge.layout.bucket import buffer_bytes, plan_buckets
from bridge.layout.manifest import Manifest
from bridge.messages import SyncError
from bridge.send.sender import StageStream, Writer
from bridge.transport.channel import abort_at
from bridge.transport.ipc import IpcWriter, segment_path
from bridge.transport.nccl import GroupWriter, is_group_endpoint
from bridge.transport.segment import Segment, abort_segment
from bridge.transport.shm import ShmWriter

if TYPE_CHECKING:
    from bridge.config import SyncConfig
    from bridge.export.source import WeightSource
    from bridge.send.collectives import Ranks


class Connection:
    """The full manifest, from where each reader reads (an endpoint a stage), and this rank's stream."""

    def __init__(
        self, manifests: list[Manifest], routes: list[tuple[str, ...]], stream: StageStream, bucket_bytes: int
    ) -> None:
        self.manifest = Manifest.concatenate(manifests)
        self.manifest_json = self.manifest.to_json()
        self.stage_sizes = tuple(len(manifest.tensors) for manifest in manifests)
        self.num_buckets = sum(len(plan_buckets(manifest, bucket_bytes)) for manifest in manifests)
        self.routes = tuple(routes)
        self.stream = stream
        self.num_syncs = 0
        self.ordinary: dict[str, str] = {}  # see SyncReport

    def first_tensor(self, stage: int) -> int:
        return sum(self.stage_sizes[:stage])

    def abort(self, reason: str) -> None:
        """Wake up everyone who waits at any endpoint."""
        writer = self.stream.writer
        if writer is not None:
            writer.abort(reason)
        for endpoint in {endpoint for route in self.routes for endpoint in route}:
            if writer is not None and endpoint == writer.endpoint:
                continue
            if is_group_endpoint(endpoint):
                abort_at(endpoint, reason)
            else:
                abort_segment(segment_path(endpoint), reason)

    def close(self) -> None:
        if self.stream.writer is not None:
            self.stream.writer.close()


def choose_transport(name: str) -> str:
    """What `auto` stands for here: process groups with CUDA, shared memory without."""
    if name != "auto":
        return name
    return "nccl" if torch.cuda.is_available() else "shm"


def connect(version: int, source: WeightSource, config: SyncConfig, ranks: Ranks, readers: list[str] | None) -> Connection:
    """Agree with all ranks, by object collectives. `readers`: the vLLM workers' names, on rank 0.

    Raises:
        SyncError: on every rank alike.
    """
    told = ranks.gather((readers, Giver(source.stage, source.is_sender, source.gives)))
    names, givers = told[0][0], [giver for _, giver in told]
    problems = _check_stages(givers, source.num_stages)
    shared = assign_readers(givers, len(names), spread=choose_transport(config.transport) == "ipc") if not problems else {}
    manifest, writer, problem = Manifest(()), None, None
    try:
        manifest = source.manifest()
        if ranks.rank in shared:
            writer = _open_writer(source.stage, manifest, config, names, shared[ranks.rank])
    except (ValueError, OSError, RuntimeError) as error:
        problem = f"rank {ranks.rank}: {error}"
    endpoint = writer.endpoint if writer is not None else ""
    entries = ranks.gather((manifest.to_json(), endpoint, problem))
    problems += [problem for _, _, problem in entries if problem]
    if problems:
        if writer is not None:
            writer.close()
        raise SyncError(version, problems)
    senders = sorted((giver.stage, rank) for rank, giver in enumerate(givers) if giver.is_sender)
    manifests = [Manifest.from_json(entries[rank][0]) for _, rank in senders]
    stream = StageStream(source, manifest, config.bucket_bytes, writer, verify=config.verify)
    routes = [
        tuple(entries[rank][1] for _, rank in sorted((givers[rank].stage, rank) for rank in shared if reader in shared[rank]))
        for reader in range(len(names))
    ]
    return Connection(manifests, routes, stream, config.bucket_bytes)


class Giver(NamedTuple):
    """What a rank has: see WeightSource."""

    stage: int
    is_sender: bool
    gives: bool


def assign_readers(givers: list[Giver], num_readers: int, *, spread: bool) -> dict[int, list[int]]:
    """Which readers each rank sends to, without the ranks that send to none; each reader has one rank for each stage.

    That is the stage's sender, or with `spread` the rank of the reader's own number where that gives: on shared devices they
    are on the same one (megasync.placement.shared_devices). Readers without such a rank are dealt out among those that give.
    """
    shared: dict[int, list[int]] = {}
    for stage in sorted({giver.stage for giver in givers}):
        able = [rank for rank, each in enumerate(givers) if each.stage == stage and (each.gives if spread else each.is_sender)]
        for reader in range(num_readers):
            rank = reader if spread and reader in able else able[reader % len(able)]
            shared.setdefault(rank, []).append(reader)
    return shared


def _open_writer(stage: int, manifest: Manifest, config: SyncConfig, readers: list[str], own: list[int]) -> Writer:
    size, name = buffer_bytes(manifest, config.bucket_bytes), f"{stage}-{uuid4().hex[:8]}"
    transport = choose_transport(config.transport)
    if transport == "shm":
        return ShmWriter(Segment.create(name, size, len(readers)), stage, readers)
    has_cuda, num_buckets = torch.cuda.is_available(), len(plan_buckets(manifest, config.bucket_bytes))
    device = torch.device("cuda", torch.cuda.current_device()) if has_cuda else torch.device("cpu")
    if transport == "ipc":
        return IpcWriter(name, size, stage, readers, device, num_buckets, own)
    return GroupWriter(stage, num_buckets, size, len(readers), device)


def _check_stages(givers: list[Giver], num_stages: int) -> list[str]:
    """Each stage has one sender."""
    senders = sorted(giver.stage for giver in givers if giver.is_sender)
    if senders == list(range(num_stages)):
        return []
    return [f"stages with a sender are {senders}, needed is one each for 0 to {num_stages - 1}"]
