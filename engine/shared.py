"""Passes that several adapters share: their micro-batches side by side, each an adapter's own rows.

The base model's products take all rows at once; adapters (lora.py), attention (PackedSequences.parts) and losses take each
adapter's rows apart. On CPUs the bits of a row in a product depend on the number of rows, but not among multiples of 8: of 240
products in random splits none differed, of 240 in any splits 13. So micro-batches are padded to ROWS on each rank, alone, too.
Under sequence parallelism each tensor-parallel rank has the rows of every adapter that it has alone, so that only attention sees
whole sequences. Gradients are reduced over ranks adapter by adapter (Adapters.add).
Leaves out whose passes they are (driven.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch

from engine.batch.batch import MicroBatch
from engine.batch.packed import PackedSequences
from engine.config import ParallelConfig
from engine.engine import Engine
from engine.model import lora

ROWS = 16


def can_share(engine: Engine) -> bool:
    """On CPUs; no exact model: those compute with merged weights, which differ by adapter.

    Sums over more than two ranks depend on the place of a row in gloo's buffer, experts' products on who else goes to the expert.
    Interleaved stages need groups of micro-batches.
    """
    split = engine.config.parallel
    has_shards, wrap = num_shards(split) > 1, cast(Any, engine.chunks[0])
    obstacles = (
        engine.device.type != "cpu",
        engine.mbridge.is_exact,
        engine.has_experts,
        max(split.tensor, split.context) > 2,
        has_shards and (split.context > 1 or engine.model_config.multi_latent_attention),
        split.virtual_pipeline > 1,
        wrap.ddp_config.overlap_grad_reduce,
    )
    return not any(obstacles)


def num_shards(split: ParallelConfig) -> int:
    """Tensor-parallel ranks that have parts of the rows."""
    return split.tensor if split.sequence else 1


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


def join(parts: Sequence[MicroBatch], shards: int) -> MicroBatch:
    """Micro-batches side by side: tokens and labels by `num_shards`, the rest one after the other.

    Joins the tensors that a pass reads, not samples and losses.
    """
    lengths = [length for part in parts for length in part.sequences.lengths]
    sequences = PackedSequences.from_lengths(lengths, parts[0].tokens.device)
    sequences.parts = tuple(len(part.sequences.lengths) for part in parts)
    if (context := parts[0].sequences.context) is not None:
        sequences.context = context.of(lengths)
    sizes = [part.tokens.shape[1] // shards for part in parts]
    rows = {name: lora.by_rank([getattr(part, name)[0] for part in parts], sizes)[None] for name in ("tokens", "labels")}
    positions, mask = torch.cat([part.position_ids for part in parts], 1), torch.cat([part.mask for part in parts])
    joined = dataclasses.replace(parts[0], samples=[], starts=[], sequences=sequences, **rows)
    return dataclasses.replace(joined, position_ids=positions, mask=mask)


@contextmanager
def unreduced(engine: Engine) -> Iterator[None]:
    """Passes in the block leave the wrap's gradients alone, which are none of theirs."""
    config = engine.model_config
    kept, config.finalize_model_grads_func = config.finalize_model_grads_func, None
    try:
        yield
    finally:
        config.finalize_model_grads_func = kept


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
