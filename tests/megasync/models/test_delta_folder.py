"""Folders of models with gated delta nets: what is refused before anything starts, with key, value and remedy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from megasync.checks.served_sizes import served_errors
from megasync.config.load import load_config
from megasync.models.folder import check_model_folder
from tests.support.config_files import model_refused, refusal, write_model, write_runnable

DELTA: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "full_attention_interval": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
TINY = {"vocab_size": 131, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
MIXTURE = {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 96, "num_experts": 4, "num_experts_per_tok": 2}
TYPES = ["linear_attention", "full_attention"]


def test_sizes_are_read_with_the_defaults_of_transformers(tmp_path: Path) -> None:
    shape = check_model_folder(write_model(tmp_path, **DELTA))
    assert (shape.num_delta_net_layers, shape.num_cached_layers, shape.linear_conv_kernel_dim) == (2, 2, 4)
    assert check_model_folder(write_model(tmp_path, model_type="qwen3_5_text")).num_delta_net_layers == 3
    given = check_model_folder(write_model(tmp_path, **DELTA, layer_types=[TYPES[0], *TYPES[1:] * 3]))
    assert (given.num_delta_net_layers, given.linear_num_value_heads) == (1, 4)


@pytest.mark.parametrize(
    ("key", "changes"),
    [
        ("linear_num_value_heads", {"linear_num_value_heads": 3}),
        ("linear_key_head_dim", {"linear_key_head_dim": 0}),
        ("linear_conv_kernel_dim", {"linear_conv_kernel_dim": "4"}),
        ("layer_types", {"layer_types": TYPES[:1] * 4}),
        ("layer_types", {"layer_types": TYPES}),
        ("layer_types", {"layer_types": ["sliding_attention", *TYPES[1:] * 3]}),
        ("full_attention_interval", {"full_attention_interval": 0}),
        ("rope_type", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}),
        ("partial_rotary_factor", {"partial_rotary_factor": 0.3}),
        ("attention_bias", {"attention_bias": True}),
        ("attn_output_gate", {"attn_output_gate": False}),
        ("qkv_bias", {"qkv_bias": True}),
        ("layer_scale", {"layer_scale": True}),
    ],
)
def test_unsupported_delta_nets(tmp_path: Path, key: str, changes: dict[str, object]) -> None:
    config = write_model(tmp_path, **DELTA) / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    error = model_refused(tmp_path)
    assert error.key == key and str(changes.get(key, "linear")).strip("'") in error.value


def test_a_share_of_turned_elements_that_is_null(tmp_path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": None}
    error = model_refused(write_model(tmp_path, **DELTA, rope_parameters=rope))
    assert (error.key, error.value) == ("partial_rotary_factor", "None")


def test_tensors_that_are_missing_or_of_a_vision_tower(tmp_path: Path) -> None:
    weights = write_model(tmp_path, **DELTA) / "model.safetensors"
    tensors = load_file(weights)
    gone = "model.layers.0.linear_attn.A_log"
    save_file({name: tensor for name, tensor in tensors.items() if name != gone}, weights)
    assert model_refused(tmp_path).lines["missing"] == gone
    seen = "model.visual.patch_embed.proj.weight"
    save_file({**tensors, seen: np.zeros((2, 2), np.float16)}, weights)
    assert model_refused(tmp_path).lines["tensors"] == seen
    save_file({**tensors, "model.layers.0.linear_attn.conv1d.weight": np.zeros((2, 1, 4), np.float16)}, weights)
    assert "conv1d" in model_refused(tmp_path).headline
    save_file({**tensors, "mtp.fc.weight": np.zeros((2, 2), np.float16)}, weights)
    check_model_folder(tmp_path)


@pytest.fixture
def runnable(tmp_path: Path) -> Path:
    path = write_runnable(tmp_path)
    write_model(Path(load_config(path, []).model.path), **DELTA)
    return path


@pytest.mark.parametrize(
    ("key", "overrides"),
    [
        ("engine.parallel.context", ["engine.parallel.context=2"]),
        ("model.dtype", ["model.dtype=float32"]),
        ("model.exact", ["model.exact=true", "model.dtype=float32", "algorithm.name=sft"]),
        ("engine.lora.targets", ["engine.lora.rank=4", "engine.lora.targets=[linear_q_up_proj]"]),
    ],
)
def test_what_does_not_go_with_delta_nets(runnable: Path, key: str, overrides: list[str]) -> None:
    error = refusal(runnable, *overrides)
    assert error.key == key and error.remedy


@pytest.mark.parametrize("name", ["linear_key_head_dim", "linear_value_head_dim"])
def test_head_sizes_that_vllm_has_no_kernels_of_on_cpus(runnable: Path, name: str) -> None:
    write_model(Path(load_config(runnable, []).model.path), **DELTA | {name: 32})
    error = refusal(runnable)
    assert (error.key, error.value, error.lines["choices"]) == (name, "32", "128") and "algorithm.name=sft" in error.remedy


def test_adapters_alone_go_to_vllm_on_cpus(runnable: Path) -> None:
    config = load_config(runnable, ["engine.lora.rank=4", "engine.lora.sync=adapter", "model.dtype=bfloat16"])
    shape = check_model_folder(config.model.path)
    assert not list(served_errors(config, shape, on_gpus=False))
    (error,) = served_errors(config, shape, on_gpus=True)
    assert (error.key, error.value) == ("engine.lora.sync", "adapter") and error.remedy
