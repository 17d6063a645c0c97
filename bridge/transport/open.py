"""Opens the sides of a transport: a writer by the transport's name, readers by their endpoints' scheme.

The one place that knows which transports there are.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

import torch

from bridge.config import Transport
from bridge.layout.bucket import StagePlan
from bridge.layout.lanes import LanePlan
from bridge.transport import delta, ipc, shm, store
from bridge.transport.delta import DeltaReader, DeltaWriter
from bridge.transport.ipc import IpcReader, IpcWriter
from bridge.transport.lanes import LaneReader
from bridge.transport.nccl import GroupReader, GroupWriter
from bridge.transport.protocol import Reader, Writer
from bridge.transport.segment import abort_segment
from bridge.transport.shm import ShmReader, ShmWriter


def resolve_transport(name: Transport, *, shares_devices: bool = False, num_hosts: int = 1) -> Transport:
    """sync.transport with what `auto` means here: shm on one host without CUDA; with CUDA ipc on shared GPUs; else nccl."""
    if name != "auto":
        return name
    if not torch.cuda.is_available() and num_hosts == 1:
        return "shm"
    return "ipc" if shares_devices else "nccl"


def own_device() -> torch.device:
    """The device of this process."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def open_writer(
    transport: str, stage: StagePlan, readers: list[str], own: Sequence[int], log: Path | None = None
) -> Writer:
    """The sending side of a stage.

    Args:
        transport: as resolve_transport gives it.
        stage: the buffer that is sent.
        readers: the names of all vLLM workers.
        own: the indices of the readers that this writer sends to.
        log: the run's log of versions, out of which delta brings up a reader that came late.

    Raises:
        ValueError: there is not enough shared memory, or there are too many readers.
    """
    if transport == "shm":
        return ShmWriter(stage, readers, own)
    device = own_device()
    if transport == "ipc":
        return IpcWriter(stage, readers, own, device)
    if transport == "delta":
        return DeltaWriter(stage, len(readers), device, log)
    return GroupWriter(stage, len(readers), device)


def open_reader(
    endpoints: tuple[str, ...], reader: int, num_readers: int, device: torch.device, lanes: LanePlan | None = None
) -> Reader:
    """The side of worker `reader` of the `num_readers` workers of all replicas, which computes on `device`."""
    if lanes is not None:
        return LaneReader(endpoints, reader, lanes, device)
    if endpoints[0].startswith(store.SCHEME):
        return GroupReader(endpoints, reader, num_readers, device)
    if endpoints[0].startswith(delta.SCHEME):
        return DeltaReader(endpoints, reader, num_readers, device)
    kind = IpcReader if endpoints[0].startswith(ipc.SCHEME) else ShmReader
    return kind(endpoints, reader, device)


def abort_endpoints(endpoints: Collection[str], reason: str) -> None:
    """Wake up everyone who waits at other processes' writers, all at once; nothing where one is gone."""
    groups = {endpoint for endpoint in endpoints if endpoint.startswith((store.SCHEME, delta.SCHEME))}
    for endpoint in set(endpoints) - groups:
        abort_segment(shm.segment_path(endpoint), reason)
    store.abort_all([endpoint.removeprefix(delta.SCHEME) for endpoint in groups], reason)
