"""Work that rank 0 does for all ranks, such as talking to Ray: its result, or its failure, reaches every rank."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import lru_cache
from typing import Any

import torch.distributed as dist

NO_LIMIT = timedelta(days=365)


class RankZeroError(RuntimeError):
    """Rank 0 failed at what it does for all; raised on every rank with its text."""


class TooFewReplicasError(RankZeroError):
    """Fewer than `rollout.min_replicas` replicas run, and no more came within `rollout.restart_timeout_seconds`."""


EXPECTED = (RuntimeError, ValueError, OSError)  # their text says enough; anything else keeps its traceback


def on_rank_zero(work: Callable[[], Any], for_others: Callable[[Any], Any] = lambda result: result) -> Any:
    """Do `work` on rank 0 alone; what it returns, on every rank; its failure too, so that nobody waits. Collective.

    `for_others`: what the other ranks get of that result, where it is not the whole.

    Raises:
        RankZeroError: on every rank, with the text of what `work` raised.
    """
    box: list[Any] = [None, None]
    result: Any = None
    failure: BaseException | None = None
    group = control_group()
    if dist.get_rank() == 0:
        try:
            result = work()
            box[0] = for_others(result)
        except Exception as error:  # noqa: BLE001 # handed on to every rank below
            failure = error
            box[1] = str(error) if isinstance(error, EXPECTED) else traceback.format_exc()
    dist.broadcast_object_list(box, src=0, group=group)
    if box[1] is not None:
        raise RankZeroError(box[1]) from failure
    return result if dist.get_rank() == 0 else box[0]


def control_group() -> dist.ProcessGroup:
    """A gloo group of all ranks, for objects and for whoever waits on rank 0. The first call is collective.

    A rank that waits here occupies no GPU, unlike in NCCL, whose kernel spins beside the replicas that generate. There is no
    time limit, since a rollout takes as long as it takes; the wait ends with an error when rank 0 does.
    """
    return _control_group(dist.group.WORLD)


@lru_cache(maxsize=1)
def _control_group(world: dist.ProcessGroup) -> dist.ProcessGroup:  # noqa: ARG001 # the key of the cache
    """Made once for each `world`."""
    group = dist.new_group(backend="gloo", timeout=NO_LIMIT)
    assert isinstance(group, dist.ProcessGroup)
    return group
