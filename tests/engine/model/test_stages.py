"""Which layers a stage of the pipeline has: invariants, costs, and models of a thousand layers."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from engine.config import ParallelConfig
from engine.batch.costs import attention_length, output_cost
from engine.model.stages import balanced, chunk_layers, describe, layout

SIZES = st.tuples(st.integers(1, 8), st.integers(1, 4)).filter(lambda sizes: sizes[0] > 1 or sizes[1] == 1)
FAST = settings(derandomize=True, database=None, deadline=None, max_examples=60)
COSTS = st.floats(0, 50)


@FAST
@given(SIZES, st.integers(0, 200), COSTS)
def test_every_layer_is_in_one_chunk_and_no_chunk_is_empty(sizes: tuple[int, int], more: int, cost: float) -> None:
    stages, virtual = sizes
    num_layers = stages * virtual + more
    counts = chunk_layers(ParallelConfig(pipeline=stages, virtual_pipeline=virtual), num_layers, cost)
    assert len(counts) == stages * virtual and sum(counts) == num_layers and min(counts) >= 1
    if num_layers % len(counts) == 0:
        assert len(set(counts)) == 1, "as megatron-core does it itself"


@FAST
@given(st.integers(1, 4), st.integers(1, 2), st.integers(0, 5), COSTS)
def test_the_costliest_chunk_costs_as_little_as_can_be(stages: int, virtual: int, more: int, cost: float) -> None:
    def largest(counts: tuple[int, ...]) -> float:
        return max((*counts[:-1], counts[-1] + cost))

    num_chunks = stages * virtual
    found = balanced(num_chunks + more, stages, num_chunks, cost)
    choices = itertools.combinations_with_replacement(range(num_chunks), more)
    best = min(largest(tuple(1 + choice.count(chunk) for chunk in range(num_chunks))) for choice in choices)
    assert largest(found) == pytest.approx(best)


def test_the_output_layer_counts_as_layers() -> None:
    qwen_3b = SimpleNamespace(
        num_layers=36, hidden_size=2048, num_attention_heads=16, kv_channels=128, num_query_groups=2, ffn_hidden_size=11008,
        num_moe_experts=None, multi_latent_attention=False, linear_attention_freq=None,
    )  # fmt: skip
    assert output_cost(qwen_3b, 151936) == pytest.approx(151936 * 2048 / (2048 * (2 * 2048 + 512 + 3 * 11008)))
    experts = SimpleNamespace(
        num_attention_heads=32, kv_channels=128, num_query_groups=4, ffn_hidden_size=6144, num_moe_experts=128,
        moe_router_topk=8, moe_ffn_hidden_size=768, moe_shared_expert_intermediate_size=None,
        multi_latent_attention=False, linear_attention_freq=None,
    )  # fmt: skip
    assert output_cost(experts, 151936) == pytest.approx(151936 / (2 * 4096 + 1024 + 128 + 3 * 8 * 768))
    latent = SimpleNamespace(
        num_layers=27, hidden_size=2048, num_attention_heads=16, q_lora_rank=None, kv_lora_rank=512, qk_head_dim=128,
        qk_pos_emb_head_dim=64, v_head_dim=128, ffn_hidden_size=11264, num_moe_experts=None, multi_latent_attention=True,
        linear_attention_freq=None,
    )  # fmt: skip
    weights = 2048 * (16 * 192 + 576 + 16 * 128 + 3 * 11264) + 512 * 16 * 256
    assert output_cost(latent, 163840) == pytest.approx(163840 * 2048 / weights)
    assert attention_length(latent, 163840) == pytest.approx((27 * weights + 163840 * 2048) / (27 * 16 * (192 + 128) / 2))
    assert attention_length(qwen_3b, 151936) == pytest.approx(3_085_938_688 / (36 * 2048), rel=1e-3)  # Qwen2.5-3B
    assert balanced(37, 2, 2, output_cost(qwen_3b, 151936)) == (21, 16)
    assert balanced(5, 2, 4, 0.5) == (1, 1, 2, 1), "to the stage without the output layer, the chunk without the embedding"


def test_a_thousand_layers() -> None:
    parallel = ParallelConfig(pipeline=16, virtual_pipeline=4)
    counts = chunk_layers(parallel, 1000, 3.7)
    assert sum(counts) == 1000 and counts[-1] == max(counts) - 4 and set(counts[:-1]) <= {15, 16}
    chunks = layout(counts)
    assert [len(chunk) for chunk in chunks[1:-1]] == list(counts[1:-1])
    assert chunks[0][0] == "embedding" and chunks[-1][-1] == "loss"
    assert describe((2, 1, 1, 2), 2) == "pipeline: stage 0: layers 0-1, 3-3; stage 1: layers 2-2, 4-5"


def test_wrong_stages_are_refused_by_the_engine_too() -> None:
    with pytest.raises(ValueError, match=r"pipeline_layers = \[1, 2\]: 3 layers, the model has num_hidden_layers = 4; write"):
        chunk_layers(ParallelConfig(pipeline=2, pipeline_layers=(1, 2)), 4, 1.0)
