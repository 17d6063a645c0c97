"""Collective calls of the trainer's ranks about a sync: flags and a few numbers each time, objects at a connect or a failure."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


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
