"""Which windows and rotary embeddings of layers of several kinds are taken; real folders throughout."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.attention.windows import layer_windows

from megasync.models.folder import check_model_folder
from tests.support.config_files import model_refused, write_model
from tests.support.tiny_models import write_tiny_model


EXPERTS = {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
SLIDES = {"use_sliding_window": True, "sliding_window": 64}
TYPES = ["sliding_attention", "full_attention"]


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({}, (0, 0, 0, 0)),
        ({"use_sliding_window": True, "max_window_layers": 0}, (4096,) * 4),
        ({"model_type": "qwen2", **SLIDES, "max_window_layers": 0}, (64,) * 4),
        ({"model_type": "mistral"}, (4096,) * 4),
        ({"model_type": "mistral", "sliding_window": None}, (0,) * 4),
        ({"model_type": "mistral", "sliding_window": 64}, (64,) * 4),
        ({**EXPERTS, **SLIDES, "layer_types": TYPES[:1] * 4}, (64,) * 4),
        ({"model_type": "llama", "sliding_window": None}, (0,) * 4),
        ({"model_type": "gemma3_text", "rope_parameters": None}, (4096,) * 4),
        ({"model_type": "olmo3", "rope_parameters": None}, (4096, 4096, 4096, 0)),
        ({"model_type": "olmo3", "rope_parameters": None, "sliding_window": 8, "layer_types": TYPES * 2}, (8, 0, 8, 0)),
        ({"model_type": "gemma3_text", "rope_parameters": None, "sliding_window": 8, "layer_types": TYPES * 2}, (8, 0, 8, 0)),
        ({"model_type": "gemma3_text", "rope_parameters": None, "sliding_window": 8, "sliding_window_pattern": 3}, (8, 8, 0, 8)),
    ],
)
def test_windows_are_those_of_transformers(tmp_path: Path, changes: dict[str, object], windows: tuple[int, ...]) -> None:
    """Of a folder's fields, and of transformers' config of them."""
    from transformers import AutoConfig

    check_model_folder(write_model(tmp_path, **changes))
    fields = json.loads((tmp_path / "config.json").read_text())
    assert layer_windows(fields) == layer_windows(AutoConfig.from_pretrained(tmp_path).to_dict()) == windows


@pytest.mark.parametrize(
    ("key", "changes"),
    [
        ("sliding_window", {"sliding_window": "64"}),
        ("sliding_window", {"sliding_window": -1}),
        ("max_window_layers", {"max_window_layers": None}),
        ("layer_types", {"layer_types": TYPES}),
        ("layer_types", {"layer_types": ["linear_attention"] * 4}),
        ("layer_types", {"layer_types": TYPES[:1] * 4}),
        ("use_sliding_window", {"use_sliding_window": True, "sliding_window": None}),
        ("layer_types", {**SLIDES, "max_window_layers": 2}),
        ("sliding_window", {**SLIDES, "max_window_layers": 4}),
        ("layer_types", {**SLIDES, "model_type": "qwen2", "layer_types": TYPES * 2}),
        ("layer_types", {"model_type": "mistral", "layer_types": TYPES * 2}),
        ("layer_types", {"model_type": "llama", "layer_types": TYPES * 2}),
        ("sliding_window", {"model_type": "llama", "sliding_window": 64}),
    ],
)
def test_unsupported_windows(tmp_path: Path, key: str, changes: dict[str, object]) -> None:
    assert model_refused(write_model(tmp_path, **changes)).key == key


@pytest.mark.parametrize(
    ("key", "changes"),
    [
        ("hidden_activation", {"hidden_activation": "gelu"}),
        ("final_logit_softcapping", {"final_logit_softcapping": 30.0}),
        ("attn_logit_softcapping", {"attn_logit_softcapping": 50.0}),
        ("use_bidirectional_attention", {"use_bidirectional_attention": True}),
        ("layer_types", {"sliding_window": None}),
        ("attention_bias", {"attention_bias": True}),
        ("rope_parameters", {"rope_parameters": {"rope_theta": 1e6}}),
        ("rope_type", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}),
        ("factor", {"rope_parameters": {"sliding_attention": {"rope_type": "linear"}}}),
        ("rope_parameters", {"rope_parameters": {"sliding_attention": "default"}}),
        ("rope_parameters", {"rope_parameters": {"full_attention": [1]}}),
        ("query_pre_attn_scalar", {"query_pre_attn_scalar": 0}),
    ],
)
def test_unsupported_gemma(tmp_path: Path, key: str, changes: dict[str, object]) -> None:
    gemma = {"model_type": "gemma3_text", "rope_parameters": None, "rope_theta": 1e6, "rope_local_base_freq": 1e4}
    check_model_folder(write_model(tmp_path, **gemma, rope_scaling={"rope_type": "linear", "factor": 8.0}))
    assert model_refused(write_model(tmp_path, **gemma | changes)).key == key


PUBLISHED = {"rope_type": "yarn", "factor": 8.0, "attention_factor": 1.2079441541679836, "original_max_position_embeddings": 8192}


@pytest.mark.parametrize(
    ("key", "changes"),
    [
        ("attention_bias", {"attention_bias": True}),
        ("head_dim", {"head_dim": 64}),
        ("head_dim", {"head_dim": None}),
        ("hidden_act", {"hidden_act": "gelu"}),
        ("layer_types", {"sliding_window": None}),
        ("layer_types", {"layer_types": ["chunked_attention"] * 4}),
        ("sliding_window", {"layer_types": TYPES[1:] * 4}),
        ("rope_theta", {"rope_theta": 1e4}),
        ("rope_theta", {"rope_theta": None}),
        ("rope_theta", {"rope_theta": 1e4, "rope_scaling": None, "rope_parameters": {"full_attention": {"rope_theta": 1e4}}}),
        ("rope_theta", {"rope_scaling": None, "rope_parameters": {"sliding_attention": {"rope_theta": "1e4"}}}),
        ("rope_scaling", {"rope_scaling": {"type": "yarn", "factor": 8.0}}),
        ("rope_parameters", {"rope_scaling": None, "rope_parameters": PUBLISHED}),
        ("attention_factor", {"rope_scaling": PUBLISHED | {"attention_factor": 1.0}}),
        ("rope_type", {"rope_scaling": {"rope_type": "longrope", "factor": 8.0}}),
        ("rope_type", {"rope_scaling": None, "rope_parameters": {"sliding_attention": PUBLISHED | {"rope_theta": 5e5}}}),
        ("partial_rotary_factor", {"partial_rotary_factor": 0.5}),
    ],
)
def test_unsupported_olmo(tmp_path: Path, key: str, changes: dict[str, object]) -> None:
    olmo = {"model_type": "olmo3", "rope_parameters": None, "rope_theta": 500000, "rope_scaling": PUBLISHED}
    check_model_folder(write_model(tmp_path, **olmo))
    assert model_refused(write_model(tmp_path, **olmo | changes)).key == key


@pytest.mark.parametrize(
    ("key", "changes"),
    [
        ("no_rope_layers", {"no_rope_layers": [1, 1, 0]}),
        ("no_rope_layers", {"no_rope_layers": [1, 1, 1, "0"]}),
        ("no_rope_layers", {"no_rope_layers": [1, 1, 1, [0]]}),
        ("no_rope_layers", {"no_rope_layers": [1, 1, 1, 0.0]}),
        ("no_rope_layers", {"no_rope_layers": 4}),
        ("no_rope_layer_interval", {"no_rope_layers": None, "no_rope_layer_interval": 0}),
        ("use_sliding_window", {"use_sliding_window": True, "sliding_window": 64}),
        ("sliding_window", {"sliding_window": 64}),
        ("layer_types", {"layer_types": TYPES * 2}),
        ("attention_bias", {"attention_bias": True}),
        ("head_dim", {"head_dim": None}),
    ],
)
def test_unsupported_smollm3(tmp_path: Path, key: str, changes: dict[str, object]) -> None:
    """Also beside fields as the hub has them, with embeddings that are tied where config.json says nothing."""
    given = {"model_type": "smollm3", "no_rope_layers": [1, 1, 1, 0], "layer_types": TYPES[1:] * 4, "sliding_window": None}
    check_model_folder(write_model(tmp_path, **given, use_sliding_window=False))
    assert model_refused(write_model(tmp_path, **given | changes)).key == key


@pytest.mark.parametrize("family", ["olmo3", "seed_oss", "smollm3"])
@pytest.mark.parametrize("field", ["attn_logit_softcapping", "final_logit_softcapping", "kv_lora_rank", "logit_scale"])
def test_what_vllm_alone_reads_of_models_in_transformers_layers(tmp_path: Path, family: str, field: str) -> None:
    """No field of these families, but vLLM's layers of transformers compute with it; null and a scale of 1 are harmless."""
    path = write_tiny_model(tmp_path, family, num_hidden_layers=2) / "config.json"
    fields = json.loads(path.read_text())
    path.write_text(json.dumps(fields | {field: 1 if field == "logit_scale" else None}))
    check_model_folder(tmp_path)
    path.write_text(json.dumps(fields | {field: 0.5 if field == "logit_scale" else 16}))
    assert model_refused(tmp_path).key == field
