"""The connection that trainer ranks and replicas agree on before the first sync: plan, endpoints, who sends to whom.

It is kept until a sync fails. `Ranks` wraps the collectives of a sync: flags and a few numbers in each sync, objects at a connect
or a failure. Leaves out the syncs themselves (publish.py).
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

MIN_LANE_BUCKET_BYTES = {False: 2**20, True: 16 * 2**20}  # without and with CUDA: below, the fixed cost of a bucket dominates


class Connection:
    """The plan, the endpoints of each reader (one per stage, or one per lane), and this rank's sender."""

    def __init__(self, plan: SyncPlan, endpoints: list[tuple[str, ...]], sender: StageSender, lanes: LanePlan | None) -> None:
        self.plan, self.endpoints, self.sender, self.lanes = plan, tuple(endpoints), sender, lanes
        self.manifest_json = plan.manifest.to_json()
        self.lanes_json = lanes.to_json() if lanes is not None else None
        self.num_syncs = 0
        self.loader_fallback: dict[str, str] = {}  # see SyncReport

    @property
    def sent_bytes(self) -> int:
        """By this rank in the last sync, with transport delta; else 0."""
        return self.sender.writer.sent_bytes if isinstance(self.sender.writer, DeltaWriter) else 0

    def abort(self, reason: str) -> None:
        """Wake up everyone who waits at any endpoint."""
        writer = self.sender.writer
        if writer is not None:
            writer.abort(reason)
        own = {writer.endpoint} if writer is not None else set()
        abort_endpoints({endpoint for of_reader in self.endpoints for endpoint in of_reader} - own, reason)

    def close(self) -> None:
        if self.sender.writer is not None:
            self.sender.writer.close()


class RankRole(NamedTuple):
    """See WeightSource."""

    stage: int
    is_sender: bool
    has_tensors: bool
    host: str = ""


class Readers(NamedTuple):
    """The vLLM workers of all replicas that take part."""

    names: list[str]
    numbers: list[int]  # among the workers of all configured replicas
    hosts: list[str]


class Offer(NamedTuple):
    """A rank's contribution to a connection."""

    role: RankRole
    manifest: str | None  # of its stage, on the stage's sender
    problem: str | None
    readers: Readers | None  # on rank 0


class Route(NamedTuple):
    """How buckets travel; with lanes every rank that holds a stage may send a share of it."""

    transport: Transport
    has_lanes: bool


def connect(
    version: int, source: WeightSource, config: SyncConfig, ranks: Ranks, readers: Readers | None, log: Path | None = None
) -> Connection:
    """Agree with all ranks, by object collectives. `readers`: on rank 0; `log`: of versions, see open_writer.

    Raises:
        SyncError: on every rank alike.
    """
    offers = ranks.gather(_offer(source, ranks.rank, readers))
    roles, readers = [offer.role for offer in offers], offers[0].readers
    assert readers is not None
    problems = [offer.problem for offer in offers if offer.problem] + _check_stages(roles, source.num_stages)
    if problems:
        raise SyncError(version, problems)
    route = choose_route(config, {*readers.hosts, *(role.host for role in roles)})
    lanes = assign_lanes(roles, readers) if route.has_lanes else None
    shared = assign_readers(roles, readers.numbers, spread=route.transport == "ipc") if lanes is None else {}
    by_stage = sorted((offer.role.stage, offer.manifest) for offer in offers if offer.manifest)
    manifests = [Manifest.from_json(text) for _, text in by_stage]
    writer: Writer | None = None
    problem = None
    try:
        plan = plan_buckets(manifests, config.bucket_bytes, lanes)
        stage = plan.stages[source.stage]
        if lanes is not None and (lane := lanes.sent_by(ranks.rank)) is not None:
            stage = stage.lane(lane.buckets(stage.num_buckets))
            writer = LaneWriter(stage, lane, lanes, own_device())
        elif ranks.rank in shared:
            writer = open_writer(route.transport, stage, readers.names, shared[ranks.rank], log)
    except (ValueError, OSError, RuntimeError) as error:
        problem = f"rank {ranks.rank}: {error}"
    opened = ranks.gather((writer.endpoint if writer is not None else "", problem))
    if problems := [problem for _, problem in opened if problem]:
        if writer is not None:
            writer.close()
        raise SyncError(version, problems)
    endpoints = reader_endpoints([endpoint for endpoint, _ in opened], roles, len(readers.names), shared, lanes)
    return Connection(plan, endpoints, StageSender(source, stage, writer), lanes)


def _offer(source: WeightSource, rank: int, readers: Readers | None) -> Offer:
    manifest, problem = None, None
    try:
        manifest = source.manifest().to_json()
    except (ValueError, OSError, RuntimeError) as error:
        problem = f"rank {rank}: {error}"
    role = RankRole(source.stage, source.is_sender, source.has_tensors, processes.host_identity())
    return Offer(role, manifest if source.is_sender else None, problem, readers)


def plan_buckets(manifests: list[Manifest], bucket_bytes: int, lanes: LanePlan | None) -> SyncPlan:
    """`manifests`: of each stage."""
    manifest = Manifest.concatenate(manifests)
    if lanes is not None:
        minimum = MIN_LANE_BUCKET_BYTES[torch.cuda.is_available()]
        bucket_bytes = lane_bucket_bytes(lanes, manifest.total_bytes, bucket_bytes, minimum)
    return SyncPlan(manifest, tuple(len(each.tensors) for each in manifests), bucket_bytes)


def reader_endpoints(
    of_ranks: list[str], roles: list[RankRole], num_readers: int, shared: dict[int, list[int]], lanes: LanePlan | None
) -> list[tuple[str, ...]]:
    """For each reader the endpoints that it reads from, one per lane, or without lanes one per stage.

    `of_ranks`: the endpoint of each trainer rank's writer; `shared`: of assign_readers.
    """
    if lanes is not None:
        return [tuple(of_ranks[lane.sender] for lane in lanes.lanes)] * num_readers
    senders = [sorted((roles[rank].stage, rank) for rank in shared if reader in shared[rank]) for reader in range(num_readers)]
    return [tuple(of_ranks[rank] for _, rank in stages) for stages in senders]


def choose_route(config: SyncConfig, hosts: Collection[str], *, shares_devices: bool = False) -> Route:
    """Depends on whether the run spans several hosts, which is decided here alone. `hosts`: of all trainer ranks and readers.

    On one host there are no lanes: more senders than one per stage would gain nothing.
    """
    num_hosts = len(set(hosts))
    transport = resolve_transport(config.transport, shares_devices=shares_devices, num_hosts=num_hosts)
    return Route(transport, has_lanes=transport == "nccl" and config.lanes and num_hosts > 1)


def assign_lanes(roles: list[RankRole], readers: Readers) -> LanePlan:
    """Assumes that each GPU has a network link of its own, and that all processes of a host without GPUs share one."""
    holders = [Holder(rank, role.stage, role.host) for rank, role in enumerate(roles) if role.has_tensors]
    return plan_lanes(holders, readers.hosts, readers.names, links=None if torch.cuda.is_available() else 1)


def assign_readers(roles: list[RankRole], numbers: Sequence[int], *, spread: bool) -> dict[int, list[int]]:
    """The readers that each rank sends to, without the ranks that send to none; each reader has one rank for each stage.

    That rank is the stage's sender. With `spread` it is the rank whose number is the reader's number in `numbers`, if that rank
    has the tensors: on shared devices both are on the same one (megasync.launch.devices.replica_devices), even after a replica
    was lost. The other readers are distributed over the ranks that have the tensors.
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
    """Why the senders are not one per stage; empty if they are."""
    senders = sorted(role.stage for role in roles if role.is_sender)
    if senders == list(range(num_stages)):
        return []
    return [f"stages with a sender are {senders}, expected one each for 0 to {num_stages - 1}"]


class Ranks:
    """Collective calls over `group`; a single process without torch.distributed is a group of one.

    `group` has to take CPU tensors. None is the default group, or on a machine with CUDA a new gloo group of the same ranks
    (collective), since NCCL takes no CPU tensors.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._is_distributed = dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1
        if self._is_distributed and group is None and torch.cuda.is_available():
            group = dist.new_group(backend="gloo")
        self._group = group
        self.rank = dist.get_rank(group) if self._is_distributed else 0

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank."""
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
