"""Full tensors rebuilt from what workers hold, in Hugging Face names and coordinates.

Leaves out how a worker finds its parameters (vllm/weights/readback.py), who compares (publish.py) and digests (digest.py).
"""

from __future__ import annotations

import torch

Part = tuple[tuple[int, ...], torch.Tensor]  # a part of a tensor: its offset in each dim, and its values


def assemble_one(name: str, parts: list[Part]) -> torch.Tensor:
    """A full tensor from its parts on all workers; replicated ones have to agree bit for bit. No copy where one is all of it.

    Raises:
        ValueError: two workers disagree on the same elements, or elements are held by none.
    """
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
