"""Work that rank 0 does for all ranks, such as talking to Ray: its result, or its failure, reaches every rank."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any


class RankZeroError(RuntimeError):
    """Rank 0 failed at what it does for all; raised on every rank with its text."""


EXPECTED = (RuntimeError, ValueError, OSError)  # their text says enough; anything else keeps its traceback


def on_rank_zero(work: Callable[[], Any]) -> Any:
    """Do `work` on rank 0 alone; what it returns, on every rank; its failure too, so that nobody waits. Collective.

    Raises:
        RankZeroError: on every rank, with the text of what `work` raised.
    """
    import torch.distributed as dist

    box: list[Any] = [None, None]
    failure: BaseException | None = None
    if dist.get_rank() == 0:
        try:
            box[0] = work()
        except Exception as error:  # noqa: BLE001 # handed on to every rank below
            failure = error
            box[1] = str(error) if isinstance(error, EXPECTED) else traceback.format_exc()
    dist.broadcast_object_list(box, src=0)
    if box[1] is not None:
        raise RankZeroError(box[1]) from failure
    return box[0]
