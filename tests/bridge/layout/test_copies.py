"""Copies between memory and a bucket as tiles for one kernel: the same bytes as views give. The kernel itself: test_kernels.py.

python -m pytest tests/bridge/layout/test_copies.py
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bridge.layout.bucket import plan_buckets
from bridge.layout.copies import NO_TILES, WORD_BYTES, BucketCopies, Match, Tiles, bind, find_matches, lay_tiles
from bridge.layout.digest import TILE_WORDS, LENGTH_FACTOR, BucketDigests, digest_bytes
from bridge.layout.manifest import Manifest, TensorSpec
from bridge.layout.regions import Copy, Region, contiguous

CPU = torch.device("cpu")
KINDS = ("words", "words", "converts", "odd", "unaligned", "none")
SIZES = st.integers(1, 4), st.integers(1, 6000), st.integers(0, 300)
TENSORS = st.lists(st.tuples(*SIZES, st.sampled_from(KINDS)), min_size=1, max_size=6)


def run_tiles(tiles: Tiles, memory: dict[str, torch.Tensor], data: torch.Tensor) -> None:
    """What the kernel does, into the bucket; a tile of the bucket itself leaves it as it is."""
    words = data[: len(data) // WORD_BYTES * WORD_BYTES].view(torch.int64)
    for name, there, here, count in tiles.table.tolist():
        if name:
            words[here : here + count] = memory[tiles.names[name - 1]].view(torch.int64)[there : there + count]
        assert name or there == here


@settings(deadline=None, max_examples=100)
@example([(1, 64, 0, kind) for kind in KINDS], 2**20)
@given(TENSORS, st.sampled_from([1024, 2**15, 2**20]))
def test_tiles_copy_what_views_copy(tensors, bucket_bytes) -> None:
    """The rows of a tensor have gaps in memory. foreach copies those that convert or are not whole words."""
    specs, memory, copies = [], {}, dict[int, tuple[Copy, ...] | None]()
    for index, (rows, pairs, gap, kind) in enumerate(tensors):
        columns, stride, start = 2 * pairs, 2 * (pairs + gap), 2 + (kind == "odd")
        name = f"memory {index}"
        specs.append(TensorSpec(f"tensor {index}", "float32", (rows, columns)))
        dtype = torch.float64 if kind == "converts" else torch.float32
        memory[name] = torch.randn(rows * stride + 4, dtype=dtype)[kind == "unaligned" :]
        copies[index] = (Copy(Region(0, rows, columns, columns), name, Region(start, rows, columns, stride)),)
        if kind == "none":
            copies[index] = None
    for bucket in plan_buckets(Manifest(tuple(specs)), bucket_bytes):
        dtypes = ["float32"] * len(specs)
        matches = list(find_matches(bucket.pieces, dtypes, copies))
        tiles = lay_tiles(bucket.pieces, bucket.num_bytes, iter(matches), memory)
        expected, data = (torch.zeros(bucket.num_bytes, dtype=torch.uint8) for _ in range(2))
        copy_views(iter(matches), memory, expected)
        if not tiles.names:  # only where rows are short
            assert not any(tensors[piece.tensor][0] == 1 and tensors[piece.tensor][3] == "words" for piece in bucket.pieces)
            continue
        assert {tensors[piece.tensor][3] for piece in set(bucket.pieces) - set(tiles.rest)} == {"words"}
        copy_views(find_matches(tiles.rest, dtypes, copies), memory, data)
        run_tiles(tiles, memory, data)
        assert torch.equal(data, expected)
        assert tiles.covered_bytes == sum(piece.num_bytes for piece in bucket.pieces)
        times = np.zeros(-(-bucket.num_bytes // WORD_BYTES), np.int64)
        for *_, here, count in tiles.table.tolist():
            times[here : here + count] += 1
        assert times.max() == 1 and times.sum() * WORD_BYTES == tiles.covered_bytes
        starts, counts = torch.from_numpy(tiles.table[:, 2:4]).unbind(1)
        assert bool((counts > 0).all()) and torch.equal(starts // TILE_WORDS, (starts + counts - 1) // TILE_WORDS)


def copy_views(matches: Iterator[Match], memory: dict[str, torch.Tensor], data: torch.Tensor) -> None:
    for in_memory, in_bucket in bind(matches, memory, data):
        torch._foreach_copy_(in_bucket, in_memory)


def lay(copies: dict[int, tuple[Copy, ...]], dtype: str = "float32", size: int = 4096) -> Tiles:
    (bucket,) = plan_buckets(Manifest((TensorSpec("a", dtype, (size,)),)), 2**20)
    return lay_tiles(bucket.pieces, bucket.num_bytes, find_matches(bucket.pieces, [dtype], copies), {"x": torch.zeros(9000)})


def test_what_is_no_case_for_tiles_or_their_digest() -> None:
    whole = Region(0, 1, 4096, 4096)
    assert lay({0: (Copy(whole, "x", whole),)}).covered_bytes == 4 * 4096
    assert lay({0: (Copy(whole, "x", whole), Copy(whole, "x", whole._replace(offset=4096)))}).covered_bytes == 0, "twice"
    half = Copy(Region(0, 1, 2048, 2048), "x", Region(0, 1, 2048, 2048))
    assert lay({0: (half,)}).covered_bytes == 4 * 2048, "less than the piece"
    assert lay({0: (Copy(whole, "x", whole._replace(offset=1)),)}) is NO_TILES, "no words"
    assert lay({0: (Copy(whole, "x", whole),)}, "bfloat16") is NO_TILES, "converts"
    short = Region(0, 2048, 2, 2), Region(0, 2048, 2, 4)
    assert lay({0: (Copy(short[0], "x", short[1]),)}) is NO_TILES, "a tile for each word"
    assert len(lay({0: None}).table) == 0, "not planned"


def test_digests_of_a_bucket_that_copies_did_not_add() -> None:
    (bucket,) = plan_buckets(Manifest((TensorSpec("a", "float32", (100,)),)), 2**20)
    whole = Region(0, 1, 100, 100)
    copies = BucketCopies(bucket.pieces, bucket.num_bytes, ["float32"], {0: (Copy(whole, "x", whole),)}, into_bucket=True)
    digests, data = BucketDigests(2, CPU), torch.zeros(bucket.num_bytes, dtype=torch.uint8)
    for seed in range(2):
        copies.run({"x": torch.full((100,), float(seed))}, data, digests)
        digests.finish(data)
        assert digests.join().tolist()[0] % 2**64 == digest_bytes(data)


def test_only_copies_of_a_whole_bucket_add_its_digest() -> None:
    data = torch.randint(0, 256, (64,), dtype=torch.uint8)
    digests = BucketDigests(3, CPU)
    for parts in ((64,), (40, 24), (40,)):  # for how many bytes of the bucket each copy adds
        for num_bytes in parts:
            digests.accumulate(num_bytes).add_(1)
        digests.finish(data)
    length = 64 * LENGTH_FACTOR
    expected = [(1 + length) % 2**64, (2 + length) % 2**64, digest_bytes(data)]
    assert [value % 2**64 for value in digests.join().tolist()] == expected


def test_the_last_word_of_a_bucket_may_be_a_part_of_one() -> None:
    """Three bytes after words: the digest is not the tiles' then, since behind the bucket something else may lie."""
    specs = TensorSpec("a", "float32", (16,)), TensorSpec("b", "uint8", (3,)), TensorSpec("c", "float32", (16,))
    memory = {"a": torch.zeros(16), "b": torch.zeros(3, dtype=torch.uint8), "c": torch.zeros(16)}
    for count, is_covered in ((2, False), (3, True)):
        (bucket,) = plan_buckets(Manifest(specs[:count]), 2**20)
        sizes = [16, 3, 16]
        copies = {i: (Copy(contiguous(sizes[i]), specs[i].name, contiguous(sizes[i])),) for i in range(count)}
        matches = find_matches(bucket.pieces, [spec.dtype for spec in specs], copies)
        tiles = lay_tiles(bucket.pieces, bucket.num_bytes, matches, memory)
        assert tiles.rest == (bucket.pieces[1],)
        assert (tiles.covered_bytes == sum(piece.num_bytes for piece in bucket.pieces)) == is_covered


@pytest.mark.gpu
def test_copies_on_a_gpu_follow_memory_that_moves() -> None:
    """Memory that is elsewhere in each run, and memory that stays; the digests are those of the bytes.

    Of five tensors three are no tiles: one converts, one has an odd number of elements, one is not planned.
    """
    device = torch.device("cuda", 0)
    sizes = {"a": 300_000, "b": 28, "converts": 32, "odd": 5, "c": 4100}
    (bucket,) = plan_buckets(Manifest(tuple(TensorSpec(name, "bfloat16", (size,)) for name, size in sizes.items())), 2**20)
    copies = {index: (Copy(contiguous(size), name, contiguous(size)),) for index, (name, size) in enumerate(sizes.items())}
    unplanned = {**copies, 4: None}
    end, dtypes = bucket.num_bytes, ["bfloat16"] * len(sizes)
    pack = BucketCopies(bucket.pieces, end, dtypes, copies, into_bucket=True)
    unpack, in_part = (BucketCopies(bucket.pieces, end, dtypes, each, into_bucket=False) for each in (copies, unplanned))
    digests, data = BucketDigests(1, device), torch.zeros(end, dtype=torch.uint8, device=device)
    kept: list[torch.Tensor] = []
    for run in range(4):
        memory = {name: torch.randn(size, device=device).bfloat16() for name, size in sizes.items()}
        back = {name: torch.zeros(size, device=device).to(memory[name].dtype) for name, size in sizes.items()}
        back["converts"] = back["converts"].float()
        kept += [*memory.values(), *back.values()]  # so that the next is elsewhere
        for number, copy in enumerate((pack, unpack, in_part)):
            copy.run(memory if copy is pack else back, data, digests)
            assert digests._num_accumulated == end, "the kernel adds the digest"
            digests.finish(data)
            assert digests.join().tolist()[0] % 2**64 == digest_bytes(data.cpu()), (run, number)
        assert all(torch.equal(back[name], flat.to(back[name].dtype)) for name, flat in memory.items())
