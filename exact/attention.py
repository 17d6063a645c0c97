"""Causal attention of queries over blocks of keys: a query's result depends on its own sequence up to it, and on nothing else.

Queries go in tiles of rows of one sequence and one group of heads; keys in blocks of 64 positions counted from the sequence's
start. Each tile passes over its blocks in order with the running maximum and sum of online softmax (arXiv:1805.02867), by
products of one shape. A block in which a query may see nothing changes nothing of it. Where keys lie is the caller's: `fetch`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch

from exact.pointwise import row_sums

BLOCK = 64  # keys
ROWS = 16  # of a tile: queries times the heads that share a key's, filled up with zeros
MAX_TILES = 128  # at once, for less memory
# of sequences int64 [n] and positions int64 [n, BLOCK]: keys and values [n, BLOCK, groups, size]
Fetch = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


@torch.no_grad()
def attend(
    query: torch.Tensor, starts: Sequence[int], lengths: Sequence[int], fetch: Fetch, groups: int, scale: float
) -> torch.Tensor:
    """Attention of the last queries of several sequences.

    Args:
        query: float32 [T, heads, size], the sequences' queries end to end.
        starts: where each sequence's queries begin in `query`, and at the end T.
        lengths: of each sequence with what came before; its last query is at position length - 1.
        fetch: gives keys and values; it is asked for positions of a sequence's own alone.
        groups: of heads, which share keys and values.
    """
    num_heads, size = query.shape[1:]
    shared = num_heads // groups
    queries = max(1, ROWS // shared)
    first, positions, owners = _tiles(starts, lengths, queries)
    out = torch.empty_like(query)
    ends = torch.tensor(lengths)
    for begin in range(0, len(first), MAX_TILES):
        part = slice(begin, begin + MAX_TILES)
        index = first[part]
        tiles = query[index].view(*index.shape, groups, shared, size).permute(0, 2, 1, 3, 4)  # [n, groups, queries, shared, size]
        done = _over_blocks(tiles, positions[part], owners[part], ends, fetch, scale)
        done = done.permute(0, 2, 1, 3, 4).reshape(-1, num_heads, size)
        out[index.flatten()] = done  # what fills a tile up repeats its last query, and its result
    return out


def _tiles(starts: Sequence[int], lengths: Sequence[int], queries: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """For each tile its rows of the query and their positions, int64 [n, queries], and their sequence, int64 [n]."""
    rows, owners, offsets = [], [], []
    for owner, ((start, end), length) in enumerate(zip(pairwise(starts), lengths, strict=True)):
        begins = torch.arange(start, end, queries)
        rows.append((begins[:, None] + torch.arange(queries)).clamp(max=end - 1))
        owners.append(torch.full((len(begins),), owner))
        offsets.append(torch.full((len(begins), 1), length - end))
    index = torch.cat(rows)
    return index, index + torch.cat(offsets), torch.cat(owners)


def _over_blocks(
    tiles: torch.Tensor, positions: torch.Tensor, owners: torch.Tensor, ends: torch.Tensor, fetch: Fetch, scale: float
) -> torch.Tensor:
    count, groups, queries, shared, size = tiles.shape
    rows = -(-queries * shared // ROWS) * ROWS
    query = tiles.new_zeros(count, groups, rows, size)
    query[:, :, : queries * shared] = tiles.reshape(count, groups, queries * shared, size) * scale
    seen = positions.new_empty(count, rows)
    seen[:] = positions[:, -1:]
    seen[:, : queries * shared] = positions.repeat_interleave(shared, 1)
    peak = query.new_full((count, groups, rows, 1), -torch.inf)
    total, sums = torch.zeros_like(peak), query.new_zeros(count, groups, rows, size)
    most, order = positions[:, -1].sort(descending=True)
    query, seen, owners = query[order], seen[order], owners[order]
    for block in range(int(most[0]) // BLOCK + 1):
        live = int((most >= block * BLOCK).sum())
        places = torch.arange(block * BLOCK, (block + 1) * BLOCK)
        own = owners[:live]
        keys, values = fetch(own, torch.minimum(places, ends[own][:, None] - 1))
        is_hidden = (places > seen[:live, :, None])[:, None]
        _add_block(query[:live], keys, values, is_hidden, (peak[:live], total[:live], sums[:live]))
    result = torch.empty_like(sums)
    result[order] = sums / total
    return result[:, :, : queries * shared].view(count, groups, queries, shared, size)


def _add_block(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, is_hidden: torch.Tensor, state: tuple[torch.Tensor, ...]
) -> None:
    """One block of keys into the running maximum, sum and weighted sum of values, in place."""
    peak, total, sums = state
    count, groups, rows, size = query.shape
    keys = keys.permute(0, 2, 3, 1).reshape(-1, size, BLOCK)
    values = values.permute(0, 2, 1, 3).reshape(-1, BLOCK, size)
    scores = torch.bmm(query.reshape(-1, rows, size), keys).view(count, groups, rows, BLOCK)
    scores = scores.masked_fill_(is_hidden, -torch.inf)
    higher = torch.maximum(peak, scores.amax(-1, keepdim=True))
    weights = torch.exp(scores - higher)
    shrink = torch.exp(peak - higher)
    total.mul_(shrink).add_(row_sums(weights))
    sums.mul_(shrink).add_(torch.bmm(weights.view(-1, rows, BLOCK), values).view(count, groups, rows, size))
    peak.copy_(higher)
