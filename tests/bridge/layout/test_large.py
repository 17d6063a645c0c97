"""Tensors of more elements than 32 bits count, and a thousand layers: plans and copies, on meta tensors and numbers alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bridge.export.trace import trace
from bridge.layout.bucket import Bucket, SyncPlan
from bridge.layout.copies import WORD_BYTES, Match, bind, find_matches, lay_tiles
from bridge.layout.manifest import Manifest, TensorSpec
from engine.config import ParallelConfig
from engine.model.stages import chunk_layers

ROWS, COLUMNS = 2**17, 2**14 + 8  # together more than 2^31
BUCKET_BYTES = 2**29
ITEM_BYTES = 2  # bfloat16


@pytest.mark.parametrize("dim", [0, 1])
def test_a_tensor_of_more_than_two_to_the_31_elements(dim: int) -> None:
    """Each byte of both shards goes to one place of one bucket, whichever dimension is sharded, also from memory behind 2^31."""
    shape = [ROWS, COLUMNS]
    shape[dim] //= 2
    start = 2**31 + 64  # where the second shard lies in memory, after the first
    places = [("memory", 0), ("memory", start)]
    found = trace(lambda shards: [torch.cat(shards, dim)], torch.Size(shape), torch.bfloat16, places)
    assert found is not None
    plan = SyncPlan(Manifest((TensorSpec("large", "bfloat16", (ROWS, COLUMNS)),)), (1,), BUCKET_BYTES)
    memory = {"memory": torch.empty(start + ROWS * COLUMNS // 2, dtype=torch.bfloat16, device="meta")}
    seen = np.zeros(2, np.int64)
    for bucket in plan.stages[0].buckets:
        matches = list(find_matches(bucket.pieces, ["bfloat16"], {0: found[0]}))
        check_bucket(bucket, matches, memory)
        for match in matches:
            seen[int(match.in_memory.offset >= start)] += match.in_memory.num_rows * match.in_memory.num_columns
            last = match.in_memory.offset + (match.in_memory.num_rows - 1) * match.in_memory.row_stride
            assert last + match.in_memory.num_columns <= memory["memory"].numel()
    assert seen.tolist() == [ROWS * COLUMNS // 2] * 2
    assert sum(piece.num_bytes for bucket in plan.stages[0].buckets for piece in bucket.pieces) == plan.manifest.total_bytes


def check_bucket(bucket: Bucket, matches: list[Match], memory: dict[str, torch.Tensor]) -> None:
    """Tiles and views hold the same elements, each of the bucket once."""
    tiles = lay_tiles(bucket.pieces, bucket.num_bytes, iter(matches), memory)
    words = tiles.table[:, 3].astype(np.int64)
    assert words.sum() * WORD_BYTES == sum(piece.num_bytes for piece in bucket.pieces) == tiles.covered_bytes
    data = torch.empty(bucket.num_bytes, dtype=torch.uint8, device="meta")
    sources = [each for views in bind(iter(matches), memory, data) for each in views[0]]
    firsts = {view.storage_offset() * ITEM_BYTES // WORD_BYTES for view in sources}
    assert firsts <= set(tiles.table[:, 1].tolist()), "no offset was cut to 32 bits"
    assert all(view.storage_offset() >= 0 for view in sources)


def test_a_thousand_layers_are_planned_once() -> None:
    counts = chunk_layers(ParallelConfig(pipeline=8), 1003, 2.5)
    names = ("input_layernorm", "self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj")
    layers = range(sum(counts))
    specs = tuple(TensorSpec(f"model.layers.{layer}.{name}.weight", "bfloat16", (16, 24)) for layer in layers for name in names)
    plan = SyncPlan(Manifest(specs), tuple(count * len(names) for count in counts), 4096)
    planned = [(stage.first_tensor + p.tensor, p.num_bytes) for stage in plan.stages for b in stage.buckets for p in b.pieces]
    assert {index for index, _ in planned} == set(range(len(specs)))
    assert sum(size for _, size in planned) == plan.manifest.total_bytes
