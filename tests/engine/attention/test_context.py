"""Context parallelism on real ranks against one rank, and how tokens are shared out."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from tests.support.ranks import run_ranks
from tests.support.tiny_models import write_tiny_model

LORA = {"rank": 4, "alpha": 8.0}
WINDOW = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}  # the last two layers
EXPERTS = {"family": "qwen3_moe", "load_balancing": 0.1}  # the loss is one of micro-batches: not the same on more data ranks
LATENT = {"family": "deepseek_v3", "load_balancing": 0.1, "router_bias_update_rate": 0.01}
BIASED = {**LATENT, "family": "glm4_moe"}
SINKS = {"family": "gpt_oss", "load_balancing": 0.1}
LAYOUTS: dict[int, list[dict[str, Any]]] = {
    2: [
        {"context": 2, "fusions": "all", "logits_chunk_tokens": 16, "recompute": "full", "recompute_inputs": "host"},
        {"context": 2, "context_attention": "ulysses", "wrap": "megatron_fsdp", "lora": LORA, "recompute": "selective"},
        {**EXPERTS, "context": 2, "expert": 2, "recompute": "full"},
        {**EXPERTS, "context": 2, "context_attention": "ulysses", "wrap": "megatron_fsdp", "lora": LORA},
        {**LATENT, "context": 2, "wrap": "megatron_fsdp"},
        {**BIASED, "context": 2, "expert": 2, "context_attention": "ulysses"},
        {**SINKS, "context": 2},
        {**SINKS, "context": 2, "expert": 2, "context_attention": "ulysses", "wrap": "megatron_fsdp"},
    ],
    4: [
        {**EXPERTS, "context": 2, "expert": 2, "tensor": 2, "sequence": True, "lora": LORA},
        {"context": 2, "pipeline": 2, "stages": {"virtual_pipeline": 2}, "wrap": "megatron_fsdp", "context_attention": "ulysses"},
    ],
}
MORE: list[dict[str, Any]] = [  # on four ranks
    {**LATENT, "context": 2, "tensor": 2, "sequence": True, "context_attention": "ulysses"},
    {"context": 4, "wrap": "megatron_fsdp"},
    {"family": "qwen3_moe", "context": 2, "expert": 4, "context_attention": "ulysses", "wrap": "megatron_fsdp"},
    {**BIASED, "context": 4, "expert": 2, "wrap": "megatron_fsdp"},
    {"context": 2, "tensor": 2, "sequence": True},
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    return {
        "qwen3": str(write_tiny_model(root / "dense", "qwen3", tied=True, num_hidden_layers=4, **WINDOW)),
        "qwen3_moe": str(write_tiny_model(root / "experts", "qwen3_moe", num_hidden_layers=1)),
        "deepseek_v3": str(write_tiny_model(root / "latent", "deepseek_v3", num_hidden_layers=2)),
        "glm4_moe": str(write_tiny_model(root / "biased", "glm4_moe", num_hidden_layers=2)),
        "gpt_oss": str(write_tiny_model(root / "sinks", "gpt_oss")),
    }


def case_of(models: dict[str, str], layout: dict[str, Any]) -> dict[str, Any]:
    layout = dict(layout)
    return {"path": models[layout.pop("family", "qwen3")], **layout}


@pytest.fixture(scope="module")
def alone(models: dict[str, str]) -> dict[str, dict[str, Any]]:
    """One rank, by what is computed."""
    layouts = [{}, {"lora": LORA}, {"family": "qwen3_moe"}, EXPERTS, {**EXPERTS, "lora": LORA}, LATENT, BIASED, SINKS]
    cases = [case_of(models, layout) for layout in layouts]
    results = run_ranks(1, "tests.engine.attention.context_cases:steps", {"cases": cases})[0]
    return {computed(case): result for case, result in zip(cases, results, strict=True)}


def computed(case: dict[str, Any]) -> str:
    """The same for all layouts."""
    return str([case.get(name) for name in ("path", "load_balancing", "lora")])


@pytest.mark.parametrize(
    ("num_ranks", "layouts"), [(2, LAYOUTS[2]), (4, LAYOUTS[4]), pytest.param(4, MORE, marks=pytest.mark.long)]
)
def test_context_ranks_train_as_one_rank(
    models: dict[str, str], alone: dict[str, dict[str, Any]], num_ranks: int, layouts: list[dict[str, Any]]
) -> None:
    """All metrics, gradient norms among them, of unclipped steps in fp32, one of which has context ranks without a token."""
    cases = [case_of(models, layout) for layout in layouts]
    for ranks in zip(*run_ranks(num_ranks, "tests.engine.attention.context_cases:steps", {"cases": cases}), cases, strict=True):
        *results, case = ranks
        print(case)
        expected = alone[computed(case)]
        assert all(result["greedy"] == expected["greedy"] for result in results)
        for result in results:
            assert result["log_probs"] == pytest.approx(expected["log_probs"], abs=1e-4)
            for mine, other in zip(result["metrics"], expected["metrics"], strict=True):
                padding = {"train/padding_fraction": mine["train/padding_fraction"]}  # a layout's own
                assert mine == pytest.approx(other | padding, rel=1e-5, abs=1e-5)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 5))
def test_every_token_has_one_rank_and_all_have_the_same_work(chunks: list[int], size: int) -> None:
    from engine.batch.packed import own_chunks, own_positions

    lengths = [2 * size * count for count in chunks]
    parts = [own_positions(lengths, rank, size) for rank in range(size)]
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(sum(lengths)))
    assert len({len(part) for part in parts}) == 1
    seen = [sum(end - start for start, end, _ in own_chunks(lengths, rank, size)) for rank in range(size)]
    assert len(set(seen)) == 1
