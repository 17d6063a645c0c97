"""Full tensors rebuilt from what workers hold, in Hugging Face names and coordinates.

Leaves out how a worker finds its parameters (vllm_readback.py), who compares (publish.py) and digests (digest.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

Part = tuple[tuple[int, ...], torch.Tensor]  # where a part of a tensor begins in it, one offset a dim, and the part


@dataclass(frozen=True, slots=True)
class Shard:
    """Part of a full tensor: it begins at `offsets`, one a dim; `data` is the bytes of a tensor of `shape`."""

    name: str
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str
    data: bytes

    def to_tensor(self) -> torch.Tensor:
        dtype = getattr(torch, self.dtype)
        flat = torch.frombuffer(bytearray(self.data), dtype=dtype) if self.data else torch.empty(0, dtype=dtype)
        return flat.view(self.shape)


def assemble(shards: Iterable[Shard]) -> dict[str, torch.Tensor]:
    """Full tensors by name from the shards of all workers; replicated shards have to agree bit for bit.

    Raises:
        ValueError: two workers disagree on the same elements, or elements are held by none.
    """
    by_name: dict[str, list[Part]] = {}
    for shard in shards:
        by_name.setdefault(shard.name, []).append((shard.offsets, shard.to_tensor()))
    return {name: assemble_one(name, parts) for name, parts in by_name.items()}


def assemble_one(name: str, parts: list[Part]) -> torch.Tensor:
    """As assemble, from one tensor's parts and where they begin; on their device, and no copy where one is all of it."""
    if len(parts) == 1 and not any(parts[0][0]):
        return parts[0][1]
    first = parts[0][1]
    shape = [max(offsets[dim] + part.shape[dim] for offsets, part in parts) for dim in range(first.ndim)]
    full = torch.empty(shape, dtype=first.dtype, device=first.device)
    filled = torch.zeros(shape, dtype=torch.bool, device=first.device)
    for offsets, part in parts:
        where = tuple(slice(o, o + s) for o, s in zip(offsets, part.shape, strict=True))
        seen = filled[where]
        if not torch.equal(full[where][seen], part[seen]):
            raise ValueError(f"workers of one replica hold different values of {name}")
        full[where] = part
        filled[where] = True
    if not filled.all():
        raise ValueError(f"no worker holds {int((~filled).sum())} of the {filled.numel()} elements of {name}")
    return full
