"""Passes that several adapters share: their micro-batches side by side, each an adapter's own rows.

The base model's products take all rows at once; adapters (lora.py), attention (PackedSequences.parts) and losses take each
adapter's rows apart. On CPUs the bits of a row in a product depend on the number of rows, but not among multiples of 8: of 240
products in random splits none differed, of 240 in any splits 13. So micro-batches are padded to ROWS, alone, too.
Leaves out whose passes they are (driven.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from engine.batch.batch import MicroBatch
from engine.batch.packed import PackedSequences
from engine.engine import Engine

ROWS = 16


def can_share(engine: Engine) -> bool:
    """One rank on a CPU, no exact model: those compute with merged weights, which differ by adapter."""
    return engine.layout.world_size == 1 and engine.device.type == "cpu" and not engine.mbridge.is_exact


def groups(sizes: Sequence[Sequence[int]], most: int) -> list[list[tuple[int, int]]]:
    """Which micro-batches go side by side: pairs of owner and index, given their tokens by owner.

    Each is in one group, which has at most one of an owner, in their order; no group of several has more than `most` tokens.
    """
    found: list[list[tuple[int, int]]] = []
    for index in range(max(map(len, sizes))):
        room = 0
        for owner, own in enumerate(sizes):
            if index >= len(own):
                continue
            if own[index] > room:
                found.append([])
                room = most
            found[-1].append((owner, index))
            room -= own[index]
    return found


def join(parts: Sequence[MicroBatch]) -> MicroBatch:
    """Micro-batches side by side. Joins the tensors that a pass reads, not samples and losses."""
    lengths = [length for part in parts for length in part.sequences.lengths]
    sequences = PackedSequences.from_lengths(lengths, parts[0].tokens.device)
    sequences.parts = tuple(len(part.sequences.lengths) for part in parts)
    rows = {name: torch.cat([getattr(part, name) for part in parts], 1) for name in ("tokens", "labels", "position_ids")}
    mask = torch.cat([part.mask for part in parts])
    return dataclasses.replace(parts[0], samples=[], starts=[], sequences=sequences, mask=mask, **rows)


def gradient_sums(leaves: Mapping[Any, torch.Tensor]) -> dict[Any, torch.Tensor]:
    """Buffers that get the gradients of these leaves, by the model's parameters, in the wrap's dtype and order of addition."""
    sums = {parameter: torch.zeros_like(parameter.main_grad) for parameter in leaves}
    for parameter, leaf in leaves.items():
        leaf.register_post_accumulate_grad_hook(partial(_move, sums[parameter]))  # type: ignore[no-untyped-call]
    return sums


def _move(total: torch.Tensor, leaf: torch.Tensor) -> None:
    assert leaf.grad is not None
    total += leaf.grad
    leaf.grad = None
