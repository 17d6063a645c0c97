"""Fused tensors of Qwen 3.5 between Hugging Face's layout, megatron-core's, and tensor-parallel ranks.

    python -m pytest tests/engine/model/test_qwen3_5_weights.py
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge.export.trace import trace
from engine.model.build import _bridge_class
from engine.model.families.qwen3_5 import part_sizes

SIZE = st.integers(1, 3)
COLUMNS = 5


def bridge(groups: int, queries: int, key_heads: int, values: int, ranks: int, family: str = "qwen3_5_text") -> Any:
    """Without process groups, for this many ranks."""
    made = _bridge_class(family).__new__(_bridge_class(family))
    made.config = SimpleNamespace(
        num_query_groups=groups * ranks, num_attention_heads=groups * queries * ranks, kv_channels=4,
        linear_num_key_heads=key_heads * ranks, linear_num_value_heads=key_heads * values * ranks,
        linear_key_head_dim=3, linear_value_head_dim=2,
    )  # fmt: skip
    made.dtype, made.mpu, made.make_vocab_size_divisible_by = torch.float32, SimpleNamespace(tp_size=ranks), None
    return made


def rows_of(made: Any, name: str) -> int:
    config = made.config
    if "linear_qkv" in name:
        return int((2 * config.num_attention_heads + 2 * config.num_query_groups) * config.kv_channels)
    return sum(part_sizes(name, config))


@settings(deadline=None)
@given(SIZE, SIZE, SIZE, SIZE, st.sampled_from([1, 2, 4]), st.sampled_from(["linear_qkv.weight", "in_proj.weight", "conv1d"]))
def test_fused_tensors_come_back(groups: int, queries: int, keys: int, values: int, ranks: int, part: str) -> None:
    """Every row is in one tensor of Hugging Face's; ranks' shards make up the whole, by copies alone."""
    made, name = bridge(groups, queries, keys, values, ranks), f"decoder.layers.0.self_attention.{part}"
    shape = (rows_of(made, name), COLUMNS)
    whole = torch.arange(shape[0] * COLUMNS, dtype=torch.float32).view(shape)
    names, tensors = made._weight_to_hf_format(name, whole)
    assert len(names) == len(tensors) == {"linear_qkv.weight": 3, "in_proj.weight": 4, "conv1d": 1}[part]
    assert torch.equal(made._weight_to_mcore_format(name, tensors), whole)
    assert torch.equal(torch.cat(tensors).sort(0).values, whole)
    parameter = SimpleNamespace(shape=(shape[0] // ranks, COLUMNS), tensor_model_parallel=True, partition_dim=0)
    shards = list(made._weight_split_across_tp(name, whole, parameter, ranks))
    assert torch.equal(made._weight_merge_across_tp(name, shards, parameter), whole)

    def convert(given: list[torch.Tensor]) -> list[torch.Tensor]:
        return list(made._weight_to_hf_format(name, made._weight_merge_across_tp(name, given, parameter))[1])

    copies = trace(convert, torch.Size(parameter.shape), torch.float32, [(f"rank {rank}", 0) for rank in range(ranks)])
    assert copies is not None or part == "linear_qkv.weight", "queries are rearranged by heads"


def test_a_head_of_queries_lies_beside_its_gate_in_hugging_face() -> None:
    made = bridge(groups=2, queries=2, key_heads=1, values=1, ranks=1)
    size = made.config.kv_channels
    kinds = [kind for _ in range(2) for kind in ("q", "q", "gate", "gate", "k", "v")]
    rows = torch.tensor([float(["q", "gate", "k", "v"].index(kind)) for kind in kinds]).repeat_interleave(size)
    _, (query, key, value) = made._weight_to_hf_format("decoder.layers.1.self_attention.linear_qkv.weight", rows[:, None])
    assert query.flatten()[::size].tolist() == [0, 1] * 4
    assert set(key.flatten().tolist()) == {2.0} and set(value.flatten().tolist()) == {3.0}


@settings(deadline=None)
@given(SIZE, SIZE)
def test_qwen3_next_has_its_projections_by_key_heads(key_heads: int, values: int) -> None:
    """Rows are numbered, and taken apart as transformers takes the projections themselves."""
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

    made, name = bridge(1, 1, key_heads, values, 1, "qwen3_next"), "decoder.layers.0.self_attention.in_proj.weight"
    heads, (key_dim, value_dim) = key_heads * values, (3, 2)
    rows = [2 * key_heads * key_dim + 2 * heads * value_dim, 2 * heads]
    fused = [torch.arange(count, dtype=torch.float32) + 1000 * part for part, count in enumerate(rows)]
    layer = SimpleNamespace(num_k_heads=key_heads, num_v_heads=heads, head_k_dim=key_dim, head_v_dim=value_dim)
    parts = Qwen3NextGatedDeltaNet.fix_query_key_value_ordering(layer, *(each[None, None] for each in fused))
    whole = made._weight_to_mcore_format(name, [each[:, None] for each in fused])
    assert whole.flatten().tolist() == [number for part in parts for number in part.flatten().tolist()]
    _, back = made._weight_to_hf_format(name, whole)
    assert all(torch.equal(one.flatten(), other) for one, other in zip(back, fused, strict=True))
