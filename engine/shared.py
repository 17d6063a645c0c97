"""Passes that several adapters share: their micro-batches side by side, each an adapter's own rows.

The base model's products take all rows at once; adapters (lora_linears.py), attention (PackedSequences.parts) and losses take
each adapter's rows apart. On CPUs the bits of a row in a product depend on the number of rows, but not among multiples of 8: of
240 products in random splits none differed, of 240 in any splits 13. So micro-batches are padded to ROWS on each rank, also
alone, and products of the model's shapes are tried before any pass is shared (rows_are_stable). On GPUs libraries choose kernels
by the number of rows: there results are equal up to rounding.
Under sequence parallelism each tensor-parallel rank has the rows of every adapter that it has alone, so that only attention sees
whole sequences. Gradients are reduced over ranks adapter by adapter (Adapters.add).
Leaves out whose passes they are (driven.py).
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist

from engine.batch.batch import MicroBatch
from engine.batch.packed import PackedSequences
from engine.config import ParallelConfig
from engine.engine import Engine
from engine.model import lora
from engine.model.lora_linears import AdapterRows, GroupedProduct, fits_grouped_product, join_by_rank, split_by_adapter

ROWS = 16
TRIED = (1, 3, 2, 10)  # rows of the parts of a product, in ROWS


def can_share(engine: Engine) -> bool:
    """Not for exact models: those compute with merged weights, which differ by adapter.

    Factors have to lie whole, as DDP has them. Sums over more than two ranks depend on the place of a row in gloo's buffer,
    experts' products on who else goes to the expert. Interleaved stages need groups of micro-batches.
    """
    split = engine.config.parallel
    has_shards, wrap = num_shards(split) > 1, cast(Any, engine.chunks[0])
    obstacles = (
        not engine.wrapped.is_in_place,
        engine.mbridge.is_exact,
        engine.has_experts,
        max(split.tensor, split.context) > 2,
        has_shards and (split.context > 1 or engine.model_config.multi_latent_attention),
        split.virtual_pipeline > 1,
        wrap.ddp_config.overlap_grad_reduce,
    )
    return not any(obstacles)


@torch.no_grad()
def rows_are_stable(engine: Engine) -> bool:
    """Whether rows of products have the bits that they have without the rows beside them, on all ranks. Collective.

    Tried once for each shape and dtype of the weights, as in the forward and in the backward pass; rank 0 prints what differs.
    Not on GPUs, where passes are shared in any case.
    """
    if engine.device.type != "cpu":
        return True
    named: list[tuple[str, torch.Tensor]] = [pair for chunk in engine.chunks for pair in chunk.named_parameters()]
    named = [(name, weight) for name, weight in named if name.endswith("weight")]
    weights = {(weight.shape, weight.dtype): weight for _, weight in named if weight.dim() == 2}
    if engine.config.head_dtype == "float32":
        heads = [weight.float() for name, weight in named if name.endswith(("word_embeddings.weight", "output_layer.weight"))]
        weights |= {(weight.shape, weight.dtype): weight for weight in heads}
    factors = [factor for weight in weights.values() for factor in (weight.t(), weight)]
    unstable = [f"{list(factor.shape)} in {factor.dtype}" for factor in factors if not _is_stable(factor)]
    found: list[list[str]] = [[] for _ in range(engine.layout.world_size)]
    dist.all_gather_object(found, unstable)
    differing = [each for of_rank in found for each in of_rank]
    if differing and engine.layout.rank == 0:
        text = f"clients take turns: with {differing[0]}, a row's product depends on the rows beside it"
        print(text, file=sys.stderr, flush=True)
    return not differing


def _is_stable(factor: torch.Tensor) -> bool:
    sizes, generator = [ROWS * each for each in TRIED], torch.Generator().manual_seed(0)
    rows = torch.randn(sum(sizes), len(factor), generator=generator).to(factor)
    return torch.equal(rows @ factor, torch.cat([part @ factor for part in torch.split(rows, sizes)]))


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
    rows = {name: join_by_rank([getattr(part, name)[0] for part in parts], sizes)[None] for name in ("tokens", "labels")}
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
    """Zeros for the gradients of these leaves, by the model's parameters, in the wrap's dtype."""
    sizes = [parameter.numel() for parameter in leaves]
    wanted = next(iter(leaves)).main_grad
    parts = torch.split(torch.zeros(sum(sizes), dtype=wanted.dtype, device=wanted.device), sizes)
    return {parameter: part.view(parameter.shape) for parameter, part in zip(leaves, parts, strict=True)}


def move_gradients(leaves: Mapping[Any, torch.Tensor], sums: Mapping[Any, torch.Tensor]) -> None:
    """Add the leaves' gradients of one pass, in the order of addition that an adapter alone has."""
    found = [(sums[parameter], leaf.grad) for parameter, leaf in leaves.items() if leaf.grad is not None]
    if found:
        torch._foreach_add_([total for total, _ in found], [gradient for _, gradient in found])
    for leaf in leaves.values():
        leaf.grad = None


@contextmanager
def sharing(chunks: list[torch.nn.Module], rows: Sequence[tuple[int, Mapping[Any, torch.Tensor], float]]) -> Iterator[None]:
    """Let rows of a pass have adapters of their own: AdapterRows.num_rows, factors by the policy's, scale."""
    linears = [linear for _, linear in lora.adapted_linears(chunks)]
    grouped = GroupedProduct.of([num for num, _, _ in rows], [scale for _, _, scale in rows], next(chunks[0].parameters()).device)
    for linear in linears:
        linear.lora_rows = [AdapterRows(num, own[linear.lora_a], own[linear.lora_b], scale) for num, own, scale in rows]
        linear.lora_grouped = grouped if fits_grouped_product(linear, linear.lora_rows) else None
    hooks = list(_whole_sequences(chunks, [num for num, _, _ in rows]))
    try:
        yield
    finally:
        for linear in linears:
            del linear.lora_rows, linear.lora_grouped
        for hook in hooks:
            hook.remove()


def _whole_sequences(chunks: list[torch.nn.Module], sizes: Sequence[int]) -> Iterator[Any]:
    """Hooks that reorder rows from by-rank to by-adapter before attention, and back after it."""

    def whole(_linear: Any, _inputs: Any, outputs: tuple[torch.Tensor, Any]) -> tuple[torch.Tensor, Any]:
        return torch.cat(split_by_adapter(outputs[0], sizes)), outputs[1]

    def shards(_linear: Any, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        num_ranks = len(inputs[0]) // sum(sizes)
        return (join_by_rank(torch.split(inputs[0], [size * num_ranks for size in sizes]), sizes),)

    for chunk in chunks:
        for name, linear in chunk.named_modules():
            if getattr(linear, "sequence_parallel", False) and name.endswith(("self_attention.linear_qkv", ".in_proj")):
                yield linear.register_forward_hook(whole)
            if getattr(linear, "sequence_parallel", False) and name.endswith(("self_attention.linear_proj", ".out_proj")):
                yield linear.register_forward_pre_hook(shards)
