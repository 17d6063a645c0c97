"""Small tables put on a GPU, and addresses of memory. Leaves out what they say."""

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


class Addresses:
    """Addresses of memory, also on the device: they are uploaded when they have changed."""

    def __init__(self) -> None:
        self.last: list[int] = []
        self._table = torch.empty(0, dtype=torch.int64)

    def on(self, device: torch.device, addresses: list[int]) -> torch.Tensor:
        """int64 [addresses] on `device`, the same in all calls."""
        if addresses != self.last:
            self.last, self._table = addresses, upload(torch.tensor(addresses, dtype=torch.int64), device)
        return self._table


@lru_cache(maxsize=16)
def _stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
