"""Full tensors rebuilt from what workers hold, in Hugging Face names and coordinates."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from bridge.layout.digest import as_bytes
from bridge.layout.shards import Part, assemble_one

Packed = tuple[str, list[int], list[int], str, bytes]  # name, offsets in the full tensor, shape, dtype: what vLLM's RPC can carry


def pack(name: str, offsets: tuple[int, ...], tensor: torch.Tensor) -> Packed:
    data = as_bytes(tensor.cpu().contiguous()).numpy().tobytes()
    return name, list(offsets), list(tensor.shape), str(tensor.dtype).removeprefix("torch."), data


def assemble(shards: Iterable[Any]) -> dict[str, torch.Tensor]:
    """Full tensors by name from all workers' packed shards; replicated ones have to agree bit for bit."""
    by_name: dict[str, list[Part]] = {}
    for name, offsets, shape, dtype, data in shards:
        flat = torch.frombuffer(bytearray(data), dtype=getattr(torch, dtype)) if data else torch.empty(0)
        by_name.setdefault(name, []).append((tuple(offsets), flat.to(getattr(torch, dtype)).view(list(shape))))
    return {name: assemble_one(name, parts) for name, parts in by_name.items()}
