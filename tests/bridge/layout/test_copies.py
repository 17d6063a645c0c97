"""Copies between memory and a bucket as tiles for one kernel: the same bytes as views give. The kernel itself: test_kernels.py.

python -m pytest tests/bridge/layout/test_copies.py
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge.layout.bucket import plan_buckets
from bridge.layout.copies import NO_TILES, WORD_BYTES, BucketCopies, Tiles, bind, find_matches, lay_tiles
from bridge.layout.digest import TILE_WORDS, LENGTH_FACTOR, BucketDigests, digest_bytes
from bridge.layout.manifest import Manifest, TensorSpec
from bridge.layout.regions import Copy, Region

CPU = torch.device("cpu")
TENSORS = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 6000), st.integers(0, 300)), min_size=1, max_size=4)


def run_tiles(tiles: Tiles, memory: dict[str, torch.Tensor], data: torch.Tensor) -> None:
    """What the kernel does, into the bucket."""
    words = data[: len(data) // WORD_BYTES * WORD_BYTES].view(torch.int64)
    for name, there, here, count in tiles.table.tolist():
        words[here : here + count] = memory[tiles.names[name]].view(torch.int64)[there : there + count]


@settings(deadline=None, max_examples=60)
@given(TENSORS, st.sampled_from([1024, 2**15, 2**20]))
def test_tiles_copy_what_views_copy(tensors, bucket_bytes) -> None:
    """Tensors of rows that lie in memory with gaps; in words, that is in pairs of float32."""
    specs, memory, copies = [], {}, {}
    for index, (rows, pairs, gap) in enumerate(tensors):
        columns, stride = 2 * pairs, 2 * (pairs + gap)
        name = f"memory {index}"
        specs.append(TensorSpec(f"tensor {index}", "float32", (rows, columns)))
        memory[name] = torch.randn(rows * stride + 2)
        copies[index] = (Copy(Region(0, rows, columns, columns), name, Region(2, rows, columns, stride)),)
    for bucket in plan_buckets(Manifest(tuple(specs)), bucket_bytes):
        matches = list(find_matches(bucket.pieces, ["float32"] * len(specs), copies))
        tiles = lay_tiles(iter(matches), memory)
        expected, data = (torch.zeros(bucket.num_bytes, dtype=torch.uint8) for _ in range(2))
        for in_memory, in_bucket in bind(iter(matches), memory, expected):
            torch._foreach_copy_(in_bucket, in_memory)
        run_tiles(tiles, memory, data)
        if tiles is NO_TILES:
            assert min(columns for _, columns, _ in tensors) * WORD_BYTES * 8 < 2**20  # only where rows are short
            continue
        assert torch.equal(data, expected)
        assert tiles.covered_bytes == sum(piece.num_bytes for piece in bucket.pieces)
        starts, counts = torch.from_numpy(tiles.table[:, 2:]).unbind(1)
        assert bool((counts > 0).all()) and torch.equal(starts // TILE_WORDS, (starts + counts - 1) // TILE_WORDS)


def lay(copies: dict[int, tuple[Copy, ...]], dtype: str = "float32", size: int = 4096) -> Tiles:
    (bucket,) = plan_buckets(Manifest((TensorSpec("a", dtype, (size,)),)), 2**20)
    return lay_tiles(find_matches(bucket.pieces, [dtype], copies), {"x": torch.zeros(9000)})


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


@pytest.mark.gpu
def test_copies_on_a_gpu_follow_memory_that_moves() -> None:
    """Memory that is elsewhere in each run, and memory that stays; the digests are those of the bytes."""
    device = torch.device("cuda", 0)
    specs = (TensorSpec("a", "bfloat16", (300, 1000)), TensorSpec("b", "bfloat16", (28,)))
    (bucket,) = plan_buckets(Manifest(specs), 2**20)
    shapes = {"a": Region(0, 1, 300_000, 300_000), "b": Region(0, 1, 28, 28)}
    copies = {index: (Copy(region, name, region),) for index, (name, region) in enumerate(shapes.items())}
    pack, unpack = (
        BucketCopies(bucket.pieces, bucket.num_bytes, ["bfloat16"] * 2, copies, into_bucket=into) for into in (True, False)
    )
    back = {name: torch.zeros(region.num_columns, dtype=torch.bfloat16, device=device) for name, region in shapes.items()}
    digests, data = BucketDigests(1, device), torch.zeros(bucket.num_bytes, dtype=torch.uint8, device=device)
    kept: list[torch.Tensor] = []
    for _ in range(3):
        memory = {name: torch.randn(len(flat), device=device).bfloat16() for name, flat in back.items()}
        kept += memory.values()  # so that the next is elsewhere
        pack.run(memory, data, digests)
        digests.finish(data)
        assert digests.join().tolist()[0] % 2**64 == digest_bytes(data.cpu())
        unpack.run(back, data, digests)
        digests.finish(data)
        assert digests.join().tolist()[0] % 2**64 == digest_bytes(data.cpu())
        assert all(torch.equal(back[name], flat) for name, flat in memory.items())
