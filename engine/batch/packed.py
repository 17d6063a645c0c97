"""How a micro-batch's tokens lie in memory: sequences end to end, a context rank's part, and the routers' input.

Data alone, which batches, attention and routers share. Leaves out who fills it in (batch.py, context.py, router.py).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from engine.runtime.megatron import PackedSeqParams

NO_EXPERT = -1


def offsets(lengths: list[int], device: torch.device) -> torch.Tensor:
    """The start of each sequence and the end of the last, int32 [sequences + 1]."""
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device, non_blocking=True)


@dataclass
class Routing:
    """The routers' input of a micro-batch of T tokens, padding included, or of a context rank's part of them."""

    counts: torch.Tensor  # bool [T]: false for padding, and for all of a stand-in
    scale: float  # of the load-balancing loss: share of the mini-batch's tokens x number of micro-batches x data-parallel size
    # int16 [T, layers, k]: those to go through; the router chooses where one is NO_EXPERT or there twice
    experts: torch.Tensor | None = None

    def part(self, positions: torch.Tensor) -> Routing:
        """The routing of the tokens at `positions`, int64 [*], such as a context rank's."""
        experts = None if self.experts is None else self.experts[positions]
        return dataclasses.replace(self, counts=self.counts[positions], experts=experts)


def own_positions(lengths: Sequence[int], rank: int, size: int) -> npt.NDArray[np.int64]:
    """Positions in the packing of the tokens that context rank `rank` of `size` has, in its order.

    Every position is one rank's; all ranks have as many. `lengths`: of each sequence, multiples of 2 * size.
    """
    return np.concatenate([np.arange(end - tokens, end) for _, end, tokens in own_chunks(lengths, rank, size)])


def own_chunks(lengths: Sequence[int], rank: int, size: int) -> list[tuple[int, int, int]]:
    """For each chunk the start of its sequence and the end of the chunk, both in the packing, and its number of tokens."""
    found, start = [], 0
    for length in lengths:
        tokens, rest = divmod(length, 2 * size)
        assert rest == 0
        found += [(start, start + (number + 1) * tokens, tokens) for number in (rank, 2 * size - 1 - rank)]
        start += length
    return found


@dataclass(frozen=True, eq=False)
class ContextPart:
    """One rank's part of a packing of T tokens over C context ranks."""

    group: dist.ProcessGroup
    lengths: tuple[int, ...]
    uses_ulysses: bool
    by_rank: torch.Tensor  # int64 [T]: the positions of all ranks' tokens, one rank after the other
    order: torch.Tensor  # int64 [T]: its inverse

    @staticmethod
    def from_lengths(
        lengths: Sequence[int], group: dist.ProcessGroup, device: torch.device, *, uses_ulysses: bool
    ) -> ContextPart:
        size = group.size()
        by_rank = torch.from_numpy(np.concatenate([own_positions(lengths, rank, size) for rank in range(size)]))
        return ContextPart(group, tuple(lengths), uses_ulysses, by_rank.to(device), torch.argsort(by_rank).to(device))

    def of(self, lengths: Sequence[int]) -> ContextPart:
        """The same rank's of another packing."""
        return self.from_lengths(lengths, self.group, self.order.device, uses_ulysses=self.uses_ulysses)

    @property
    def own(self) -> torch.Tensor:
        """int64 [T / C]: the positions of this rank's tokens."""
        return self.by_rank.chunk(self.group.size())[self.group.rank()]

    @cached_property
    def chunks(self) -> list[tuple[int, int, int]]:
        """This rank's, see own_chunks."""
        return own_chunks(self.lengths, self.group.rank(), self.group.size())

    @cached_property
    def prefixes(self) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor, tuple[int, int]]:
        """For varlen attention: offsets of the chunks and of the tokens they see, these tokens, and the longest of both."""
        sizes, seen = [size for *_, size in self.chunks], [end - start for start, end, _ in self.chunks]
        index = torch.cat([torch.arange(start, end) for start, end, _ in self.chunks])
        device = self.order.device
        return (offsets(sizes, device), offsets(seen, device)), index.to(device), (max(sizes), max(seen))


@dataclass
class PackedSequences(PackedSeqParams):  # type: ignore[misc]
    """megatron-core's description of a packed batch, and its layout for scaled_dot_product_attention."""

    rotary: tuple[torch.Tensor, torch.Tensor] | None = None  # where our own attention rotates: see PipelineRunner
    lengths: tuple[int, ...] = ()  # of each sequence
    parts: tuple[int, ...] = ()  # numbers of sequences that are computed as if they were alone; empty: all together
    context: ContextPart | None = None  # which of the tokens this context-parallel rank has; all else is of whole sequences
    routing: Routing | None = None  # for the routers of layers with experts

    @classmethod
    def from_lengths(cls, lengths: list[int], device: torch.device) -> PackedSequences:
        """`lengths`: tokens of each sequence, in packing order."""
        offsets = torch.zeros(len(lengths) + 1, dtype=torch.int32)
        offsets[1:] = torch.tensor(lengths, dtype=torch.int32).cumsum(0)
        offsets = offsets.to(device)
        longest = max(lengths)
        return cls(
            qkv_format="thd",
            cu_seqlens_q=offsets,
            cu_seqlens_kv=offsets,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            lengths=tuple(lengths),
        )

    @cached_property
    def int64_offsets(self) -> tuple[torch.Tensor, torch.Tensor]:
        """`cu_seqlens_q` as int64, on its device and on the host."""
        return self.cu_seqlens_q.long(), torch.tensor([0, *itertools.accumulate(self.lengths)])

    @cached_property
    def length_groups(self) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], torch.Tensor]:
        """Sequences of a part grouped by length for padded attention: a group's longest is less than twice its shortest.

        Returns the groups and an inverse permutation. A group is (index, valid): `index` int64 [sequences, longest] gathers the
        packed tokens (the part's first where padded), `valid` int64 lists the real positions of the flattened group. The
        permutation, int64 [tokens], brings the groups' valid tokens, concatenated, back into packing order.
        """
        offsets, device = self.cu_seqlens_q.tolist(), self.cu_seqlens_q.device
        bounds = [0, *itertools.accumulate(self.parts or (len(offsets) - 1,))]
        by_magnitude: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for first, last in pairwise(bounds):
            for start, end in pairwise(offsets[first : last + 1]):
                key = offsets[first], (end - start).bit_length()
                by_magnitude.setdefault(key, []).append((start, end - start))
        groups, order = [], []
        for (begin, _), members in by_magnitude.items():
            starts = torch.tensor([start for start, _ in members])[:, None]
            lengths = torch.tensor([length for _, length in members])[:, None]
            positions = torch.arange(int(lengths.max()))[None]
            filled = positions < lengths
            index = torch.where(filled, starts + positions, begin)
            groups.append((index.to(device), filled.flatten().nonzero().squeeze(1).to(device)))
            order.append(index[filled])
        return groups, torch.argsort(torch.cat(order)).to(device)
