"""The Triton kernels against what they stand for; `python -m tests.bridge.layout.kernel_cases DEVICE` runs them all.

On the CPU in Triton's interpreter, which has to be chosen (TRITON_INTERPRET=1) before Triton is imported: a process of its own.
"""

from __future__ import annotations

import sys

import torch

from bridge.layout.bucket import plan_buckets
from bridge.layout.copies import BucketCopies, bind, find_matches, lay_tiles
from bridge.layout.copy_kernel import copy_tiles
from bridge.layout.digest import CHUNK_WORDS, LENGTH_FACTOR, MASK, BucketDigests, digest_bytes, multipliers, powers
from bridge.layout.digest_kernel import add_digest
from bridge.layout.manifest import Manifest, TensorSpec
from bridge.export.merge import merge_into
from exact.merge_kernel import lay_tables, merge_many, merge_on_cuda
from bridge.layout.regions import Copy, Region, contiguous


def check_digests(device: torch.device) -> None:
    chunk = 8 * CHUNK_WORDS
    for size in (0, 1, 7, 8, 9, 16, chunk - 8, chunk, chunk + 3, 3 * chunk + 45):
        data = torch.randint(0, 256, (size + 8,), dtype=torch.uint8, device=device)[:size]
        total = torch.zeros((), dtype=torch.int64, device=device)
        add_digest(data, multipliers(device), powers(device, 5), total)
        assert (int(total) + size * LENGTH_FACTOR) & MASK == digest_bytes(data.cpu()), size


def check_copies(device: torch.device) -> None:
    """A bucket of three tensors: rows with gaps between them, two parts that follow each other, and a short one."""
    names = ("rows", "parts", "short")
    memory = {name: torch.randn(20_000, device=device).bfloat16() for name in names}
    copies = {
        0: (Copy(Region(0, 6, 400, 400), "rows", Region(8, 6, 400, 1000)),),
        1: (
            Copy(Region(0, 1, 9000, 9000), "parts", Region(10_000, 1, 9000, 9000)),
            Copy(Region(9000, 1, 8, 8), "parts", Region(4, 1, 8, 8)),
        ),
        2: (Copy(Region(0, 1, 20, 20), "short", Region(0, 1, 20, 20)),),
    }
    sizes = [4800, 18_016, 40]
    specs = tuple(TensorSpec(name, "bfloat16", (size // 2,)) for name, size in zip(names, sizes, strict=True))
    (bucket,) = plan_buckets(Manifest(specs), 2**20)
    matches = list(find_matches(bucket.pieces, ["bfloat16"] * 3, copies))
    tiles = lay_tiles(bucket.pieces, bucket.num_bytes, iter(matches), memory)
    assert tiles.covered_bytes == sum(sizes) and not tiles.rest
    table = torch.from_numpy(tiles.table).to(device)
    expected = torch.zeros(bucket.num_bytes, dtype=torch.uint8, device=device)
    for in_memory, in_bucket in bind(iter(matches), memory, expected):
        torch._foreach_copy_(in_bucket, in_memory)
    data, total = torch.zeros_like(expected), torch.zeros((), dtype=torch.int64, device=device)
    bases = torch.tensor([flat.data_ptr() for flat in (data, *(memory[name] for name in tiles.names))], device=device)
    copy_tiles(table, bases, data, total, into_bucket=True)
    assert torch.equal(data, expected)
    wanted = digest_bytes(expected.cpu())
    assert (int(total) + data.numel() * LENGTH_FACTOR) & MASK == wanted
    back = {name: torch.zeros_like(flat) for name, flat in memory.items()}
    bases = torch.tensor([flat.data_ptr() for flat in (data, *(back[name] for name in tiles.names))], device=device)
    total.zero_()
    copy_tiles(table, bases, data, total, into_bucket=False)
    assert (int(total) + data.numel() * LENGTH_FACTOR) & MASK == wanted
    assert back["short"][:20].equal(memory["short"][:20]) and not back["short"][20:].any()
    wanted_rows = torch.zeros_like(memory["rows"])
    for row in range(6):
        wanted_rows[8 + 1000 * row :][:400] = memory["rows"][8 + 1000 * row :][:400]
    assert back["rows"].equal(wanted_rows)
    copy_tiles(table, bases, data.zero_(), None, into_bucket=False)
    assert not any(flat.any() for flat in back.values())


def check_pieces_of_all_kinds(device: torch.device) -> None:
    """Both ways: tiles, with pieces between them that foreach copies, since they convert or are no words. One is not planned."""
    sizes = {"a": 9000, "converts": 32, "odd": 5, "b": 2052, "unplanned": 12, "c": 28}
    (bucket,) = plan_buckets(Manifest(tuple(TensorSpec(name, "bfloat16", (size,)) for name, size in sizes.items())), 2**20)
    copies = {index: (Copy(contiguous(size), name, contiguous(size)),) for index, (name, size) in enumerate(sizes.items())}
    memory = {name: torch.randn(size, device=device).bfloat16() for name, size in sizes.items()}
    back = {name: torch.zeros_like(flat) for name, flat in memory.items()}
    back["converts"] = back["converts"].float()
    digests, data = BucketDigests(1, device), torch.zeros(bucket.num_bytes, dtype=torch.uint8, device=device)
    for flats, planned, into_bucket in ((memory, copies, True), (back, {**copies, 4: None}, False)):
        run = BucketCopies(bucket.pieces, bucket.num_bytes, ["bfloat16"] * len(sizes), planned, into_bucket=into_bucket)
        assert run._run_tiles(flats, data, digests)
        assert digests._num_accumulated == bucket.num_bytes
        digests.finish(data)
        assert digests.join().tolist()[0] % 2**64 == digest_bytes(data.cpu())
    for name, flat in back.items():
        assert flat.equal(memory[name].to(flat.dtype)) == (name != "unplanned")


def check_merges(device: torch.device) -> None:
    """Ranks above and below a tile's, and shapes that fill no tile."""
    for (rows, columns), rank, dtype in [
        ((1, 1), 1, torch.float32),
        ((70, 130), 8, torch.bfloat16),
        ((64, 256), 32, torch.bfloat16),
        ((33, 200), 40, torch.float32),
    ]:
        shapes = ((rows, columns), (rank, columns), (rows, rank))
        weight, a, b = (torch.randn(shape, device=device).to(dtype) for shape in shapes)
        before = weight.clone()
        merged = torch.empty_like(weight)
        lost, moved = merge_on_cuda(merged, weight, a, b, 0.25).sum(0).tolist()
        assert torch.equal(weight, before)
        exact = weight.double() + 0.25 * (b.double() @ a.double())
        unit = torch.finfo(dtype).eps
        assert bool(((merged.double() - exact).abs() <= unit * exact.abs() + 1e-5).all()), (rows, columns, rank, dtype)
        reference = merge_into(torch.empty_like(weight), weight, a, b, 0.25)
        assert torch.allclose(merged.float(), reference.float(), rtol=2 * unit, atol=1e-5)  # sums in another order
        expected = float((merged.double() - exact).square().sum()), float((0.25 * (b.double() @ a.double())).square().sum())
        assert abs(lost - expected[0]) <= 0.02 * expected[0] + 1e-9, (lost, expected)
        assert abs(moved - expected[1]) <= 1e-4 * expected[1], (moved, expected)


def factor(rows: int, columns: int, kind: str, like: torch.Tensor) -> torch.Tensor:
    """A factor that is alone in memory, one of a stack, cut out of rows that are longer, or transposed."""
    if kind == "stack":
        return torch.randn(3, rows, columns, device=like.device).to(like.dtype)[1]
    if kind == "cut":
        return torch.randn(rows + 1, columns + 5, device=like.device).to(like.dtype)[1:, 2 : columns + 2]
    alone = torch.randn((columns, rows) if kind == "transposed" else (rows, columns), device=like.device).to(like.dtype)
    return alone.t() if kind == "transposed" else alone


def check_grouped_merges(device: torch.device) -> None:
    """Weights get the bits of one launch each: all shapes and ranks, weights of one stack, factors of any strides, any start."""
    kinds, experts = ("alone", "stack", "cut", "transposed"), [(1536, 2048), (2048, 768)] * 3
    any_shapes, whole_rows = [(1, 1), (64, 128), (70, 130), (33, 200), (65, 129)], [(64, 128), (100, 144), (70, 144)]
    for dtype, shapes, ranks, of_factors, gap, is_fast in (
        (torch.float32, any_shapes, (1, 16, 33, 32, 31), kinds, 0, False),
        (torch.bfloat16, any_shapes, (1, 16, 33, 32, 31), kinds, 3, False),
        (torch.bfloat16, whole_rows, (33, 8, 16), kinds[:2], 16, True),
        (torch.float16, whole_rows, (1, 8, 16), kinds[:2], 0, True),
        (torch.bfloat16, whole_rows, (1, 8, 16), kinds, 0, False),
        *([(torch.bfloat16, experts, [16] * 6, ["stack"], 0, True)] if device.type == "cuda" else []),
    ):
        for some in (shapes, []):
            pairs, start = [], gap
            for index, (rows, columns) in enumerate(some):
                weight = factor(rows, columns, kinds[index % 2], torch.empty(0, device=device, dtype=dtype))
                of_a, of_b = (of_factors[number % len(of_factors)] for number in (index, index + 1))
                a, b = factor(ranks[index], columns, of_a, weight), factor(rows, ranks[index], of_b, weight)
                pairs.append((weight, a, b, 0.3 / (1 + index), start))
                start += weight.numel() + gap
            out, before = torch.full((start,), 7.0, device=device, dtype=dtype), [weight.clone() for weight, *_ in pairs]
            tables = lay_tables(pairs)
            addresses = [storage.data_ptr() for storage in tables.storages]
            arrays = [torch.from_numpy(array).to(device) for array in (tables.weights, tables.scales, tables.tiles)]
            assert (tables.is_aligned and tables.is_dense) == (is_fast or not some)
            sums = merge_many(out, tables, arrays, torch.tensor(addresses, device=device))
            expected, parts = torch.full_like(out, 7.0), [sums[:0]]
            for weight, a, b, scale, place in pairs:
                merged = expected[place : place + weight.numel()].view(weight.shape)
                parts.append(merge_on_cuda(merged, weight, a, b, scale))
                plain = merge_into(torch.empty(weight.shape, dtype=dtype), weight.cpu(), a.cpu(), b.cpu(), scale)
                unit = torch.finfo(dtype).eps
                assert torch.allclose(merged.cpu().float(), plain.float(), rtol=2 * unit, atol=1e-5)
            assert torch.equal(out, expected), (dtype, is_fast)
            assert torch.allclose(sums, torch.cat(parts), rtol=1e-5, atol=0.0), (dtype, is_fast)  # reduced in another order
            assert all(torch.equal(weight, kept) for (weight, *_), kept in zip(pairs, before, strict=True))


if __name__ == "__main__":
    torch.manual_seed(0)
    check_digests(torch.device(sys.argv[1]))
    check_copies(torch.device(sys.argv[1]))
    check_pieces_of_all_kinds(torch.device(sys.argv[1]))
    check_merges(torch.device(sys.argv[1]))
    check_grouped_merges(torch.device(sys.argv[1]))
