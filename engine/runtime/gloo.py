"""gloo on CPUs: one device for all process groups of a process, and sums that do not depend on where a value lies.

torch 2.13 makes one for each group (ProcessGroupGloo.create_default_device), with a thread of its own that wakes up every 10 ms
(gloo/transport/tcp/loop.cc, `epoll_wait`): with megatron-core's 50 groups they take as much time as the training of a tiny model.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.distributed import ProcessGroupGloo


def share_device() -> None:
    """From now on torch makes its groups by gloo with it. Safe to repeat."""
    c10d.ProcessGroupGloo = SharingGroup  # type: ignore[misc]


class SharingGroup(ProcessGroupGloo):
    """The backend that torch.distributed finds as ProcessGroupGloo (distributed_c10d.py:2169)."""

    def __init__(self, store: c10d.Store, rank: int, size: int, timeout: timedelta) -> None:
        options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices, options._timeout = [_device()], timeout
        super().__init__(store, rank, size, options)


def reduce_scatter_tensor(
    output: torch.Tensor, input: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None  # noqa: A002
) -> None:
    """torch.distributed's, but adding in the order of the ranks.

    gloo's order depends on where in the buffer a value lies, so that gradients which a wrap lays out otherwise would differ in
    their last bits; in bfloat16 one such bit makes another training of it in a few steps.
    """
    assert op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG)
    if dist.get_world_size(group) == 1:
        output.copy_(input.view_as(output))
        return
    received = torch.empty_like(input)
    dist.all_to_all_single(received, input, group=group)
    total, *others = torch.split(received.view(-1), output.numel())
    for part in others:
        total += part
    if op == dist.ReduceOp.AVG:
        total /= len(others) + 1
    output.copy_(total.view_as(output))


_devices: dict[int, Any] = {}  # by process: one that was forked has none of its parent's threads


def _device() -> Any:
    if (process := os.getpid()) not in _devices:
        interface = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]  # which create_default_device does not look at
        make = ProcessGroupGloo.create_device
        _devices[process] = make(interface=interface) if interface else ProcessGroupGloo.create_default_device()
    return _devices[process]
