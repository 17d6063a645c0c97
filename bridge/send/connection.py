"""What trainer ranks and replicas agree on before the first sync, and keep until one fails: plan, endpoints, who sends to whom.

Leaves out the syncs themselves (publish.py).
"""

from __future__ import annotations

from typing import NamedTuple

from bridge.config import SyncConfig
from bridge.export.source import WeightSource
from bridge.layout.bucket import SyncPlan
from bridge.layout.manifest import Manifest
from bridge.messages import SyncError
from bridge.send.collectives import Ranks
from bridge.send.sender import StageSender
from bridge.transport.open import abort_endpoints, open_writer
from bridge.transport.protocol import Writer


class Connection:
    """The plan, where each reader reads (an endpoint a stage), and this rank's sender."""

    def __init__(self, plan: SyncPlan, routes: list[tuple[str, ...]], sender: StageSender) -> None:
        self.plan, self.routes, self.sender = plan, tuple(routes), sender
        self.manifest_json = plan.manifest.to_json()
        self.num_syncs = 0
        self.loader_fallback: dict[str, str] = {}  # see SyncReport

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


def connect(version: int, source: WeightSource, config: SyncConfig, ranks: Ranks, readers: list[str] | None) -> Connection:
    """Agree with all ranks, by object collectives. `readers`: the vLLM workers' names, on rank 0. `config.transport`: not auto.

    Raises:
        SyncError: on every rank alike.
    """
    manifest, problem = None, None
    try:
        manifest = source.manifest().to_json()
    except (ValueError, OSError, RuntimeError) as error:
        problem = f"rank {ranks.rank}: {error}"
    role = RankRole(source.stage, source.is_sender, source.has_tensors)
    told = ranks.gather((readers, role, manifest if source.is_sender else None, problem))
    names, roles = told[0][0], [role for _, role, _, _ in told]
    problems = [problem for *_, problem in told if problem] + _check_stages(roles, source.num_stages)
    if problems:
        raise SyncError(version, problems)
    shared = assign_readers(roles, len(names), spread=config.transport == "ipc")
    manifests = [Manifest.from_json(text) for _, text in sorted((role.stage, text) for _, role, text, _ in told if text)]
    writer: Writer | None = None
    try:
        plan = SyncPlan(Manifest.concatenate(manifests), tuple(len(each.tensors) for each in manifests), config.bucket_bytes)
        if ranks.rank in shared:
            writer = open_writer(config.transport, plan.stages[source.stage], names, shared[ranks.rank])
    except (ValueError, OSError, RuntimeError) as error:
        problem = f"rank {ranks.rank}: {error}"
    entries = ranks.gather((writer.endpoint if writer is not None else "", problem))
    problems = [problem for _, problem in entries if problem]
    if problems:
        if writer is not None:
            writer.close()
        raise SyncError(version, problems)
    routes = [
        tuple(entries[rank][0] for _, rank in sorted((roles[rank].stage, rank) for rank in shared if reader in shared[rank]))
        for reader in range(len(names))
    ]
    return Connection(plan, routes, StageSender(source, plan.stages[source.stage], writer))


def assign_readers(roles: list[RankRole], num_readers: int, *, spread: bool) -> dict[int, list[int]]:
    """Which readers each rank sends to, without the ranks that send to none; each reader has one rank for each stage.

    That is the stage's sender, or with `spread` the rank of the reader's own number where that has the tensors: on shared devices
    they are on the same one (megasync.launch.devices.replica_devices). The other readers are dealt out among the ranks that
    have them.
    """
    shared: dict[int, list[int]] = {}
    for stage in sorted({role.stage for role in roles}):
        able = [
            rank for rank, role in enumerate(roles) if role.stage == stage and (role.has_tensors if spread else role.is_sender)
        ]
        for reader in range(num_readers):
            rank = reader if spread and reader in able else able[reader % len(able)]
            shared.setdefault(rank, []).append(reader)
    return shared


def _check_stages(roles: list[RankRole], num_stages: int) -> list[str]:
    """Each stage has one sender."""
    senders = sorted(role.stage for role in roles if role.is_sender)
    if senders == list(range(num_stages)):
        return []
    return [f"stages with a sender are {senders}, needed is one each for 0 to {num_stages - 1}"]
