"""What trainer ranks and replicas agree on before the first sync, and keep until one fails: plan, endpoints, who sends to whom.

Ranks are the collective calls about a sync: flags and a few numbers each time, objects at a connect or a failure. Leaves out the
syncs themselves (publish.py).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from bridge import processes
from bridge.config import SyncConfig, Transport
from bridge.export.source import WeightSource
from bridge.layout.bucket import SyncPlan
from bridge.layout.lanes import Holder, LanePlan, lane_bucket_bytes, plan_lanes
from bridge.layout.manifest import Manifest
from bridge.messages import SyncError
from bridge.send.sender import StageSender
from bridge.transport.delta import DeltaWriter
from bridge.transport.lanes import LaneWriter
from bridge.transport.open import abort_endpoints, open_writer, own_device, resolve_transport
from bridge.transport.protocol import Writer

MIN_LANE_BUCKET_BYTES = {False: 2**20, True: 16 * 2**20}  # by whether there is CUDA: what a bucket takes besides its bytes


class Connection:
    """The plan, where each reader reads (an endpoint a stage, or a lane where there are lanes), and this rank's sender."""

    def __init__(self, plan: SyncPlan, routes: list[tuple[str, ...]], sender: StageSender, lanes: LanePlan | None = None) -> None:
        self.plan, self.routes, self.sender, self.lanes = plan, tuple(routes), sender, lanes
        self.manifest_json = plan.manifest.to_json()
        self.lanes_json = lanes.to_json() if lanes is not None else None
        self.num_syncs = 0
        self.loader_fallback: dict[str, str] = {}  # see SyncReport

    @property
    def sent_bytes(self) -> int:
        """By this rank in the last sync, where the transport sends what changed."""
        return self.sender.writer.sent_bytes if isinstance(self.sender.writer, DeltaWriter) else 0

    def abort(self, reason: str) -> None:
        """Wake up everyone who waits at any endpoint."""
        writer = self.sender.writer
        if writer is not None:
            writer.abort(reason)
        own = {writer.endpoint} if writer is not None else set()
        abort_endpoints({endpoint for route in self.routes for endpoint in route} - own, reason)

    def close(self) -> None:
        if self.sender.writer is not None:
            self.sender.writer.close()


class RankRole(NamedTuple):
    """See WeightSource."""

    stage: int
    is_sender: bool
    has_tensors: bool
    host: str = ""


class Way(NamedTuple):
    """How buckets travel; with lanes all ranks that hold a stage may send, each a share."""

    transport: Transport
    has_lanes: bool


class Readers(NamedTuple):
    """The vLLM workers of all replicas that take part."""

    names: list[str]
    numbers: list[int]  # among the workers of all that there are to be
    hosts: list[str]


def connect(
    version: int, source: WeightSource, config: SyncConfig, ranks: Ranks, readers: Readers | None, log: Path | None = None
) -> Connection:
    """Agree with all ranks, by object collectives. `readers`: on rank 0; `log`: of versions, see open_writer.

    Raises:
        SyncError: on every rank alike.
    """
    manifest, problem = None, None
    try:
        manifest = source.manifest().to_json()
    except (ValueError, OSError, RuntimeError) as error:
        problem = f"rank {ranks.rank}: {error}"
    role = RankRole(source.stage, source.is_sender, source.has_tensors, processes.host_identity())
    told = ranks.gather((readers, role, manifest if source.is_sender else None, problem))
    (names, numbers, reader_hosts), roles = told[0][0], [role for _, role, _, _ in told]
    problems = [problem for *_, problem in told if problem] + _check_stages(roles, source.num_stages)
    if problems:
        raise SyncError(version, problems)
    way = choose_way(config, {*reader_hosts, *(role.host for role in roles)})
    shared = assign_readers(roles, numbers, spread=way.transport == "ipc")
    lanes = assign_lanes(roles, names, reader_hosts) if way.has_lanes else None
    manifests = [Manifest.from_json(text) for _, text in sorted((role.stage, text) for _, role, text, _ in told if text)]
    writer: Writer | None = None
    try:
        plan = _plan_buckets(manifests, config.bucket_bytes, lanes)
        stage = plan.stages[source.stage]
        if lanes is not None and (own := lanes.sent_by(ranks.rank)) is not None:
            stage = stage.lane(own.buckets(stage.num_buckets))
            writer = LaneWriter(stage, own, lanes, own_device())
        elif lanes is None and ranks.rank in shared:
            writer = open_writer(way.transport, stage, names, shared[ranks.rank], log)
    except (ValueError, OSError, RuntimeError) as error:
        problem = f"rank {ranks.rank}: {error}"
    entries = ranks.gather((writer.endpoint if writer is not None else "", problem))
    problems = [problem for _, problem in entries if problem]
    if problems:
        if writer is not None:
            writer.close()
        raise SyncError(version, problems)
    endpoints = [endpoint for endpoint, _ in entries]
    if lanes is not None:
        routes = [tuple(endpoints[lane.sender] for lane in lanes.lanes)] * len(names)
    else:
        routes = [
            tuple(endpoints[rank] for _, rank in sorted((roles[rank].stage, rank) for rank in shared if reader in shared[rank]))
            for reader in range(len(names))
        ]
    return Connection(plan, routes, StageSender(source, stage, writer), lanes)


def _plan_buckets(manifests: list[Manifest], bucket_bytes: int, lanes: LanePlan | None) -> SyncPlan:
    """`manifests`: of each stage."""
    manifest = Manifest.concatenate(manifests)
    if lanes is not None:
        least = MIN_LANE_BUCKET_BYTES[torch.cuda.is_available()]
        bucket_bytes = lane_bucket_bytes(lanes, manifest.total_bytes, bucket_bytes, least)
    return SyncPlan(manifest, tuple(len(each.tensors) for each in manifests), bucket_bytes)


def choose_way(config: SyncConfig, hosts: Collection[str], *, shares_devices: bool = False) -> Way:
    """By whether the run spans several hosts, which is decided here alone. `hosts`: of all trainer ranks and readers.

    On one host there are no lanes: one group a stage has nothing to gain from more senders.
    """
    num_hosts = len(set(hosts))
    transport = resolve_transport(config.transport, shares_devices=shares_devices, num_hosts=num_hosts)
    return Way(transport, has_lanes=transport == "nccl" and config.lanes and num_hosts > 1)


def assign_lanes(roles: list[RankRole], names: list[str], reader_hosts: list[str]) -> LanePlan:
    """A GPU is taken to have a link to the network of its own, all processes of a host without GPUs to share one."""
    holders = [Holder(rank, role.stage, role.host) for rank, role in enumerate(roles) if role.has_tensors]
    return plan_lanes(holders, reader_hosts, names, links=None if torch.cuda.is_available() else 1)


def assign_readers(roles: list[RankRole], numbers: Sequence[int], *, spread: bool) -> dict[int, list[int]]:
    """Which readers each rank sends to, without the ranks that send to none; each reader has one rank for each stage.

    That is the stage's sender, or with `spread` the rank of the reader's own number, of `numbers`, where that has the tensors: on
    shared devices they are on the same one (megasync.launch.devices.replica_devices), also where a replica is lost. The other
    readers are dealt out among the ranks that have them.
    """
    shared: dict[int, list[int]] = {}
    for stage in sorted({role.stage for role in roles}):
        able = [
            rank for rank, role in enumerate(roles) if role.stage == stage and (role.has_tensors if spread else role.is_sender)
        ]
        for reader, number in enumerate(numbers):
            rank = number if spread and number in able else able[number % len(able)]
            shared.setdefault(rank, []).append(reader)
    return shared


def _check_stages(roles: list[RankRole], num_stages: int) -> list[str]:
    """Each stage has one sender."""
    senders = sorted(role.stage for role in roles if role.is_sender)
    if senders == list(range(num_stages)):
        return []
    return [f"stages with a sender are {senders}, needed is one each for 0 to {num_stages - 1}"]


class Ranks:
    """Collective calls over `group`; a single process without torch.distributed is a group of one.

    `group` has to take CPU tensors. None is the default group, or on a machine with CUDA, where that one takes none, a gloo
    group of the same ranks, made here (collective).
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._is_distributed = dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1
        if self._is_distributed and group is None and torch.cuda.is_available():
            group = dist.new_group(backend="gloo")
        self._group = group
        self.rank = dist.get_rank(group) if self._is_distributed else 0

    def any(self, flag: bool) -> bool:
        """Whether it holds on any rank."""
        if not self._is_distributed:
            return flag
        status = torch.tensor([int(flag)])
        dist.all_reduce(status, op=dist.ReduceOp.MAX, group=self._group)
        return bool(status.item())

    def gather(self, value: Any) -> list[Any]:
        """Every rank's object, pickled: slow."""
        if not self._is_distributed:
            return [value]
        values: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(values, value, group=self._group)
        return values

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """`values`, a CPU tensor, summed over ranks in place."""
        if self._is_distributed:
            dist.all_reduce(values, group=self._group)
        return values
