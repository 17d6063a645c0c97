"""What trainer ranks and replicas agree on before the first sync, and keep until one fails: manifest, buckets, endpoints.

Leaves out the syncs themselves (publish.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from uuid import uuid4

import torch

from bridge.bucket import buffer_bytes, plan_buckets
from bridge.manifest import Manifest
from bridge.messages import SyncError
from bridge.sender import StageStream, WeightSource, Writer
from bridge.transport.channel import abort_at
from bridge.transport.ipc import IpcWriter, segment_path
from bridge.transport.nccl import GroupWriter, is_group_endpoint
from bridge.transport.shm import Segment, ShmWriter

if TYPE_CHECKING:
    from bridge.config import SyncConfig
    from bridge.ranks import Ranks


class Connection:
    """The full manifest, the stages' endpoints, and this rank's stream."""

    def __init__(self, manifests: list[Manifest], endpoints: list[str], stream: StageStream, bucket_bytes: int) -> None:
        self.manifest = Manifest.concatenate(manifests)
        self.manifest_json = self.manifest.to_json()
        self.stage_sizes = tuple(len(manifest.tensors) for manifest in manifests)
        self.num_buckets = sum(len(plan_buckets(manifest, bucket_bytes)) for manifest in manifests)
        self.endpoints = tuple(endpoints)
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
        for endpoint in self.endpoints:
            if writer is not None and endpoint == writer.endpoint:
                continue
            if is_group_endpoint(endpoint):
                abort_at(endpoint, reason)
            elif segment_path(endpoint).exists():
                segment = Segment(segment_path(endpoint), owner=False)
                segment.abort(reason)
                segment.close()

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
    names = ranks.gather(readers)[0]
    manifest, writer, problem = Manifest(()), None, None
    try:
        manifest = source.manifest()
        if source.is_sender:
            writer = _open_writer(source.stage, manifest, config, names)
    except (ValueError, OSError, RuntimeError) as error:
        problem = f"rank {ranks.rank}: {error}"
    endpoint = writer.endpoint if writer is not None else None
    entries = ranks.gather((source.stage, manifest.to_json(), endpoint, problem))
    problems = [entry[3] for entry in entries if entry[3]] or _check_stages(entries, source.num_stages)
    if problems:
        if writer is not None:
            writer.close()
        raise SyncError(version, problems)
    senders = sorted((entry for entry in entries if entry[2]), key=lambda entry: entry[0])
    manifests = [Manifest.from_json(entry[1]) for entry in senders]
    stream = StageStream(source, manifest, config.bucket_bytes, writer, verify=config.verify)
    return Connection(manifests, [entry[2] for entry in senders], stream, config.bucket_bytes)


def _open_writer(stage: int, manifest: Manifest, config: SyncConfig, readers: list[str]) -> Writer:
    size, name = buffer_bytes(manifest, config.bucket_bytes), f"{stage}-{uuid4().hex[:8]}"
    transport = choose_transport(config.transport)
    if transport == "shm":
        return ShmWriter(Segment.create(name, size, len(readers)), stage, readers)
    has_cuda, num_buckets = torch.cuda.is_available(), len(plan_buckets(manifest, config.bucket_bytes))
    device = torch.device("cuda", torch.cuda.current_device()) if has_cuda else torch.device("cpu")
    if transport == "ipc":
        return IpcWriter(name, size, stage, readers, device, num_buckets)
    return GroupWriter(stage, num_buckets, size, len(readers), device)


def _check_stages(entries: list[Any], num_stages: int) -> list[str]:
    """Each stage has one sender."""
    senders = sorted(stage for stage, _, endpoint, _ in entries if endpoint)
    if senders == list(range(num_stages)):
        return []
    return [f"stages with a sender are {senders}, needed is one each for 0 to {num_stages - 1}"]
