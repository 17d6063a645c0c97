"""Copies between flat memory and a bucket, for packing and for scattering: prepared once, run in every sync.

On CUDA one kernel copies the pieces of a bucket that consist of whole 8-byte words and computes its digest on the way
(copy_kernel.py); the others are left to torch._foreach_copy_ between views. Leaves out how copies are found (bake.py, trace.py).
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from bridge.layout.bucket import Piece
from bridge.layout.digest import TILE_WORDS, BucketDigests
from bridge.layout.regions import Copy, Region, slice_copy
from bridge.layout.upload import Addresses, upload

WORD_BYTES = 8
MAX_TILES = 8  # times as many tiles as full ones would be: with more, foreach copies are faster

Views = tuple[list[torch.Tensor], list[torch.Tensor]]  # of memory, and of a bucket
Dtypes = Sequence[str] | Mapping[int, str]  # by a tensor's index
Copies = Mapping[int, Sequence[Copy] | None]  # likewise; Copy.buffer_region counts the elements of the memory Copy.buffer


class Match(NamedTuple):
    """The same elements in a piece and in memory."""

    piece: Piece
    dtype: torch.dtype
    in_piece: Region
    memory: str
    in_memory: Region


class BucketCopies:
    """The copies of some pieces of a bucket, in one direction."""

    def __init__(self, pieces: Sequence[Piece], end: int, dtypes: Dtypes, copies: Copies, *, into_bucket: bool) -> None:
        """
        Args:
            pieces: in their order.
            end: end offset of these pieces in the bucket; they start where the first does.
            dtypes: of each tensor that a piece is of.
            copies: of each as well.
            into_bucket: the direction.
        """
        self._pieces, self._end, self._dtypes, self._copies = list(pieces), end, dtypes, copies
        self._into_bucket = into_bucket
        # by the bucket's address and the number of pieces: memory, and views of both
        self._views: dict[tuple[int, int], tuple[list[torch.Tensor], list[Views]]] = {}
        self._tiles: tuple[Tiles, torch.Tensor] | None = None  # and their table on the device
        self._covered_bytes = 0  # of the bucket: those whose digest the tiles can add
        self._bases = defaultdict[int, Addresses](Addresses)  # of the bucket and the tiles' memory, by the bucket's address

    @torch.no_grad()
    def run(self, memory: Mapping[str, torch.Tensor], data: torch.Tensor, digests: BucketDigests | None = None) -> None:
        """Copy; on CUDA one kernel adds the digest to `digests` on the way, if each byte of the pieces is copied once.

        Args:
            memory: flat tensors, at least those that the copies name.
            data: the bucket's bytes, uint8.
            digests: on the device of `data`.
        """
        if not (data.is_cuda and self._run_tiles(memory, data, digests)):
            self._run_views(self._pieces, memory, data)

    def _run_views(self, pieces: Sequence[Piece], memory: Mapping[str, torch.Tensor], data: torch.Tensor) -> None:
        names = dict.fromkeys(copy.buffer for piece in pieces for copy in self._copies[piece.tensor] or ())
        flats, key = [memory[name] for name in names], (data.data_ptr(), len(pieces))
        bound, views = self._views.get(key, ([], []))
        if not are_same_memory(bound, flats):
            views = bind(find_matches(pieces, self._dtypes, self._copies), memory, data)
            self._views[key] = flats, views
        for in_memory, in_bucket in views:
            torch._foreach_copy_(*((in_bucket, in_memory) if self._into_bucket else (in_memory, in_bucket)))

    def _run_tiles(self, memory: Mapping[str, torch.Tensor], data: torch.Tensor, digests: BucketDigests | None) -> bool:
        """False where foreach copies have to do all: without tiles, or where memory is not aligned to words any more."""
        if self._tiles is None:
            tiles = lay_tiles(self._pieces, self._end, find_matches(self._pieces, self._dtypes, self._copies), memory)
            self._tiles = tiles, upload(torch.from_numpy(tiles.table), data.device)
            if tiles.covered_bytes == sum(piece.num_bytes for piece in self._pieces):
                self._covered_bytes = self._end - self._pieces[0].bucket_offset
        tiles, table = self._tiles
        if not tiles.names:
            return False
        flats = [data, *(memory[name] for name in tiles.names)]
        addresses = [flat.data_ptr() for flat in flats]
        bases = self._bases[addresses[0]]
        is_known = addresses == bases.last
        if not is_known and any(flat.device != data.device or flat.data_ptr() % WORD_BYTES for flat in flats):
            return False
        from bridge.layout.copy_kernel import copy_tiles

        if tiles.rest:  # first: on the way into the bucket the kernel reads their words there
            self._run_views(tiles.rest, memory, data)
        total = digests.accumulate(self._covered_bytes) if digests is not None and self._covered_bytes else None
        copy_tiles(table, bases.on(data.device, addresses), data, total, into_bucket=self._into_bucket)
        return True


def are_same_memory(kept: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> bool:
    """Whether `tensors` lie where the `kept` ones lie. These keep their memory alive: an equal address means the same memory."""
    return len(kept) == len(tensors) and all(
        one.data_ptr() == other.data_ptr() for one, other in zip(kept, tensors, strict=True)
    )


def find_matches(pieces: Sequence[Piece], dtypes: Dtypes, copies: Copies) -> Iterator[Match]:
    """The regions of memory that each piece is made of."""
    for piece in pieces:
        dtype: torch.dtype = getattr(torch, dtypes[piece.tensor])
        start, size = piece.tensor_offset // dtype.itemsize, piece.num_bytes // dtype.itemsize
        for copy in copies[piece.tensor] or () if size else ():
            for in_piece, in_memory in slice_copy(copy, start, start + size):
                yield Match(piece, dtype, in_piece, copy.buffer, in_memory)


def bind(matches: Iterator[Match], memory: Mapping[str, torch.Tensor], data: torch.Tensor) -> list[Views]:
    """Pairs of views, of memory and of a bucket's bytes `data`, that are the same elements of a tensor.

    In groups that foreach copies in one kernel: of one dtype and without gaps, or else the rest.
    """
    groups: dict[tuple[torch.dtype, bool], Views] = {}
    for piece, dtype, in_piece, name, in_memory in matches:
        values = data[piece.bucket_offset : piece.bucket_offset + piece.num_bytes].view(dtype)
        is_dense = in_piece.num_rows == 1 and memory[name].dtype == dtype
        views = groups.setdefault((dtype, is_dense), ([], []))
        views[0].append(view(memory[name], in_memory))
        views[1].append(view(values, in_piece))
    return list(groups.values())


def view(flat: torch.Tensor, region: Region) -> torch.Tensor:
    """The region of flat memory, [num_rows, num_columns], or [num_columns] where it is one row."""
    start = flat.storage_offset() + region.offset
    if region.num_rows == 1:
        return flat.as_strided((region.num_columns,), (1,), start)
    return flat.as_strided((region.num_rows, region.num_columns), (region.row_stride, 1), start)


class Tiles(NamedTuple):
    """Copies of at most TILE_WORDS words of 8 bytes. No copy crosses a multiple of TILE_WORDS in the bucket.

    `table`, int32 [tiles, 4]: number of the name from 1 on, first word in that memory, first word in the bucket, number of words.
    The words of a piece of `rest` are tiles of number 0, from the bucket to itself, for the digest.
    """

    names: tuple[str, ...]  # of the memory; none where foreach copies have to do all, or are faster
    table: np.ndarray
    rest: tuple[Piece, ...]  # pieces that foreach copies have to do, and those without copies
    covered_bytes: int  # of pieces; 0 where some word of the bucket is copied twice, or cannot be read as a whole


NO_TILES = Tiles((), np.zeros((0, 4), dtype=np.int32), (), 0)


def lay_tiles(pieces: Sequence[Piece], end: int, matches: Iterator[Match], memory: Mapping[str, torch.Tensor]) -> Tiles:
    """The pieces as tiles, but for those that convert, are not made of whole words, or whose tiles would be small.

    Tiles take a thousandth of the weights' memory. `matches`: of all pieces, which end at `end` in the bucket.
    """
    numbers, names = {piece: number for number, piece in enumerate(pieces)}, dict[str, int]()
    is_rest = np.zeros(len(pieces), dtype=bool)
    runs, owners = [np.zeros((0, 4), dtype=np.int64)], [np.zeros(0, dtype=np.int64)]
    for match in matches:
        flat, number = memory[match.memory], numbers[match.piece]
        if flat.dtype != match.dtype or flat.data_ptr() % WORD_BYTES:
            is_rest[number] = True
            continue
        runs.append(_runs_of(match, names.setdefault(match.memory, len(names) + 1)))
        owners.append(np.full(len(runs[-1]), number))
    table, piece_of = np.concatenate(runs), np.concatenate(owners)
    is_rest[piece_of[(table[:, 1:] % WORD_BYTES).any(axis=1)]] = True
    table[:, 1:] //= WORD_BYTES
    num_tiles, num_words = (np.bincount(piece_of, each, len(pieces)) for each in (_tiles_of(table)[1], table[:, 3]))
    is_rest |= (num_tiles > MAX_TILES * -(-num_words // TILE_WORDS)) | (num_words == 0)
    table = table[~is_rest[piece_of]]
    rest = tuple(itertools.compress(pieces, is_rest))
    own = [(0, each.bucket_offset, each.bucket_offset, each.num_bytes) for each in rest if each.num_bytes]
    stays = np.array(own, dtype=np.int64).reshape(-1, 4)
    stays = stays[-(-(stays[:, 2] + stays[:, 3]) // WORD_BYTES) * WORD_BYTES <= end]  # a bucket may end within a word
    covered_bytes = int(table[:, 3].sum()) * WORD_BYTES + int(stays[:, 3].sum())
    stays[:, 1:] = -(-stays[:, 1:] // WORD_BYTES)
    table = np.concatenate([table, stays])
    table = table[np.argsort(table[:, 2], kind="stable")]
    overlaps = bool((table[1:, 2] < table[:-1, 2] + table[:-1, 3]).any())
    tiles = _cut_into_tiles(table)
    if not tiles[:, 0].any() or tiles.max() > np.iinfo(np.int32).max:
        return NO_TILES
    return Tiles(tuple(names), tiles.astype(np.int32), rest, 0 if overlaps else covered_bytes)


def _runs_of(match: Match, name: int) -> np.ndarray:
    """A run a row: `name`, first byte in the memory, first byte in the bucket, number of bytes."""
    piece, dtype, in_piece, _, in_memory = match
    rows = np.arange(in_piece.num_rows)
    runs = np.empty((in_piece.num_rows, 4), dtype=np.int64)
    runs[:, 0] = name
    runs[:, 1] = (in_memory.offset + rows * in_memory.row_stride) * dtype.itemsize
    runs[:, 2] = piece.bucket_offset + (in_piece.offset + rows * in_piece.row_stride) * dtype.itemsize
    runs[:, 3] = in_piece.num_columns * dtype.itemsize
    return runs


def _tiles_of(runs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each run: the first tile of the bucket that it is in, and the number of its tiles."""
    first = runs[:, 2] // TILE_WORDS
    return first, -(-(runs[:, 2] + runs[:, 3]) // TILE_WORDS) - first


def _cut_into_tiles(runs: np.ndarray) -> np.ndarray:
    starts, ends = runs[:, 2], runs[:, 2] + runs[:, 3]
    first, counts = _tiles_of(runs)
    which = np.repeat(np.arange(len(runs)), counts)
    number = np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts) + first[which]
    begins = np.maximum(starts[which], number * TILE_WORDS)
    stops = np.minimum(ends[which], (number + 1) * TILE_WORDS)
    return np.stack([runs[which, 0], runs[which, 1] + begins - starts[which], begins, stops - begins], axis=1)
