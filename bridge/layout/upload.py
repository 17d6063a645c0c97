"""Small tables put on a GPU. Leaves out what they say."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch


def upload(table: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`table` on `device`, for the current stream there.

    The host waits for this copy alone. `Tensor.to` would wait for all that is queued on the current stream, which may be behind a
    broadcast that never ends, because a process at its other end was killed.
    """
    if device.type != "cuda":
        return table.to(device)
    with torch.cuda.stream(_stream(device)):
        there = table.to(device)
    there.record_stream(torch.cuda.current_stream(device))
    return there


@lru_cache(maxsize=16)
def _stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
