"""The Triton kernels against what they stand for; `python -m tests.bridge.layout.kernel_cases DEVICE` runs them all.

On the CPU in Triton's interpreter, which has to be chosen (TRITON_INTERPRET=1) before Triton is imported: a process of its own.
"""

from __future__ import annotations

import sys

import torch

from bridge.layout.bucket import plan_buckets
from bridge.layout.copies import bind, find_matches, lay_tiles
from bridge.layout.copy_kernel import copy_tiles
from bridge.layout.digest import CHUNK_WORDS, LENGTH_FACTOR, MASK, digest_bytes, multipliers, powers
from bridge.layout.digest_kernel import add_digest
from bridge.layout.manifest import Manifest, TensorSpec
from bridge.export.merge import merge_into
from exact.merge_kernel import merge_on_cuda
from bridge.layout.regions import Copy, Region


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
    tiles = lay_tiles(iter(matches), memory)
    assert tiles.covered_bytes == sum(sizes)
    table = torch.from_numpy(tiles.table).to(device)
    expected = torch.zeros(bucket.num_bytes, dtype=torch.uint8, device=device)
    for in_memory, in_bucket in bind(iter(matches), memory, expected):
        torch._foreach_copy_(in_bucket, in_memory)
    data, total = torch.zeros_like(expected), torch.zeros((), dtype=torch.int64, device=device)
    bases = torch.tensor([memory[name].data_ptr() for name in tiles.names], device=device)
    copy_tiles(table, bases, data, total, into_bucket=True)
    assert torch.equal(data, expected)
    wanted = digest_bytes(expected.cpu())
    assert (int(total) + data.numel() * LENGTH_FACTOR) & MASK == wanted
    back = {name: torch.zeros_like(flat) for name, flat in memory.items()}
    bases = torch.tensor([back[name].data_ptr() for name in tiles.names], device=device)
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


if __name__ == "__main__":
    torch.manual_seed(0)
    check_digests(torch.device(sys.argv[1]))
    check_copies(torch.device(sys.argv[1]))
    check_merges(torch.device(sys.argv[1]))
